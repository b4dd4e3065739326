"""Serves a model over HTTP, with OpenAI's endpoints.

Run:    python scripts/serve.py --model=MODEL --port=8000
        python scripts/serve.py --model=MODEL --role=prefill --handoff_port=9001 --handoff_key=@KEYFILE
        python scripts/serve.py --model=MODEL --host=0.0.0.0 --api_key=KEY --mesh=tensor=4
        python scripts/serve.py --model=MODEL --mesh=stage=2,tensor=8 --coordinator=HOST:8476 --num_processes=2 \
            --process_id=0   # and the same with --process_id=1 on the other host; process 0 answers HTTP
        curl http://127.0.0.1:8000/v1/completions -d '{"model": "MODEL", "prompt": "Paris is", "max_tokens": 8}'
Expect: a line with the address once the model is loaded and compiled; SIGTERM ends it after the requests in flight.

Every keyword of LLM is a flag. See docs/serving.md.
"""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from trillion_infer import LLM
from trillion_infer.cli.flags import define_dataclass_flags, define_llm_flags, run
from trillion_infer.cli.hosts import define_host_flags, follows
from trillion_infer.cli.progress import progress_bars
from trillion_infer.transfer.handoff.limits import HandoffLimits, limits_help
from trillion_infer.transfer.transports import TRANSPORTS

if TYPE_CHECKING:
    from trillion_infer.engine.handoff.build import HandoffOptions

HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
PORT = flags.DEFINE_integer("port", 8000, "Port to listen on.", lower_bound=0, upper_bound=65535)
API_KEY = flags.DEFINE_multi_string("api_key", [], "Key that opens the server; may be given several times.")
SERVED_NAME = flags.DEFINE_string("served_model_name", None, "Name clients use; the model's own if not given.")
MAX_REQUESTS = flags.DEFINE_integer("max_requests", 1024, "Most requests in flight; more get 429.", lower_bound=1)
MAX_BODY = flags.DEFINE_integer("max_body_bytes", 8 * 2**20, "Largest request body.", lower_bound=1)
DRAIN = flags.DEFINE_integer("drain_s", 30, "Seconds that requests in flight have after SIGTERM.", lower_bound=0)
TOOL_FORMAT = flags.DEFINE_string(
    "tool_format", None, "How the model writes calls; found in its template if not given."
)
REASONING = flags.DEFINE_string("reasoning_format", None, "How the model marks reasoning, or none; found if not given.")
ADMIN_KEY = flags.DEFINE_string("admin_key", None, "Bearer key of /admin, which is off without one.")
ROLE = flags.DEFINE_enum("role", None, ("prefill", "decode", "both"), "The server's role among workers of pools.")
HANDOFF_HOST = flags.DEFINE_string("handoff_host", "127.0.0.1", "Address at which other workers reach this one.")
HANDOFF_PORT = flags.DEFINE_integer("handoff_port", 0, "Port for that; 0 takes a free one.", 0, 65535)
PEERS = flags.DEFINE_list("peers", [], "Hand-off addresses HOST:PORT of prefill workers; none: the router names them.")
HANDOFF_KEY = flags.DEFINE_string("handoff_key", None, "Key that all workers share, or @FILE that holds it.")
TRANSPORT = flags.DEFINE_enum("handoff_transport", "auto", TRANSPORTS, "How KV pages travel between workers.")
limit_flags = define_dataclass_flags(HandoffLimits, limits_help())
llm_flags = define_llm_flags()
join_hosts = define_host_flags()


def handoff_options() -> "HandoffOptions | None":
    """What the flags say of this worker's place in its pools; None without a role."""
    from trillion_infer.engine.handoff.build import HandoffOptions, read_key, split_addresses

    if ROLE.value is None:
        return None
    return HandoffOptions(
        role=ROLE.value,
        key=read_key(HANDOFF_KEY.value),
        host=HANDOFF_HOST.value,
        port=HANDOFF_PORT.value,
        peers=split_addresses(PEERS.value),
        transport=TRANSPORT.value,
        limits=HandoffLimits(**limit_flags()),
    )


def main(_: list[str]) -> None:
    from trillion_infer.engine.handoff.build import make_worker_of
    from trillion_infer.serve.options import ServerOptions
    from trillion_infer.serve.run import serve

    handoff = handoff_options()
    join_hosts()
    with progress_bars() as progress:
        llm = LLM(**llm_flags(), progress=progress)
    if follows(llm):
        return
    if handoff is not None:
        print(f"{handoff.role} worker, handing over at {make_worker_of(llm, handoff).links.address}", flush=True)
    options = ServerOptions(
        model_name=SERVED_NAME.value or Path(flags.FLAGS.model).name,
        api_keys=tuple(API_KEY.value),
        max_requests=MAX_REQUESTS.value,
        max_body_bytes=MAX_BODY.value,
        tool_format=TOOL_FORMAT.value,
        reasoning_format=REASONING.value,
        admin_key=ADMIN_KEY.value,
    )
    print(f"serving {options.model_name} on http://{HOST.value}:{PORT.value}", flush=True)
    with closing(llm):
        serve(llm.generator, options, HOST.value, PORT.value, DRAIN.value)


if __name__ == "__main__":
    run(main)
