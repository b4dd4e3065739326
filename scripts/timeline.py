"""Fetches the timelines of workers of a pool and lays them side by side.

Run:    python scripts/timeline.py --workers=http://HOST:8001,http://HOST:8002 --admin_key=KEY --output=run.json
        python scripts/timeline.py --workers=http://HOST:8001,http://HOST:8002 --admin_key=KEY --output=run.png
Expect: a Chrome trace (chrome://tracing, Perfetto), or a picture where the name ends in .png or .svg.
"""

from absl import flags

from trillion_infer.cli.flags import run
from trillion_infer.cli.timeline import fetch_events, write_timeline

WORKERS = flags.DEFINE_list("workers", [], "Base URLs of workers started with --role and --admin_key.")
ADMIN_KEY = flags.DEFINE_string("admin_key", None, "Their admin key.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "File to write: .json, .png or .svg.", required=True)


def main(_: list[str]) -> None:
    events = fetch_events(WORKERS.value, ADMIN_KEY.value)
    write_timeline(events, OUTPUT.value)
    print(f"{sum(event['ph'] == 'X' for event in events)} spans in {OUTPUT.value}")


if __name__ == "__main__":
    run(main)
