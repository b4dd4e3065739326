"""Loads a server whose model costs nothing: latency it adds, CPU a token, and whether anything leaks.

Run:    python scripts/load_server.py --seconds=300 --streams=200
        python scripts/load_server.py --seconds=10 --streams=50 --json
Expect: no errors, memory that stays flat, every page home; milliseconds from the engine giving a token to the client
        having it (50 streams at once), and microseconds of the server's CPU a generated token.

Both ends run on this machine. The client of the latency only notes when the kernel has bytes for it. On a machine that
others use, chrt -f 10 before the command keeps their time out of the figures.
"""

import json

from absl import flags

from trillion_infer.benchmark.server_load import added_latency_ms, load
from trillion_infer.cli.flags import run

SECONDS = flags.DEFINE_float("seconds", 300.0, "How long to keep up the load.", lower_bound=1)
STREAMS = flags.DEFINE_integer("streams", 200, "Clients at once under load.", lower_bound=1)
STEP_MS = flags.DEFINE_float("step_ms", 20.0, "What a step of the engine takes at least.", lower_bound=0)
REPEATS = flags.DEFINE_integer("repeats", 3, "Measurements of latency, of which the best counts.", lower_bound=1)
JSON = flags.DEFINE_bool("json", False, "One JSON object instead of lines.")


def main(_: list[str]) -> None:
    found = load(SECONDS.value, STREAMS.value, STEP_MS.value)
    pools = [tier["pages"] for tier in found.idle["tiers"]]
    figures = {
        "requests": found.requests,
        "clients_that_left": found.left,
        "aborted": found.aborted,
        "tokens": found.tokens,
        "errors": len(found.errors),
        "host_us_per_token": round(found.host_us_per_token, 1),
        "rss_mb": [round(value, 1) for value in found.rss_mb],
        "pages_leased_at_the_end": sum(pages["leased"] for pages in pools),
        **{
            name: round(value, 2)
            for name, value in added_latency_ms(step_ms=STEP_MS.value, repeats=REPEATS.value).items()
        },
    }
    print(json.dumps(figures) if JSON.value else "\n".join(f"{name}: {value}" for name, value in figures.items()))
    for error in dict.fromkeys(found.errors[:10]):
        print(f"error: {error}")


if __name__ == "__main__":
    run(main)
