"""Routes OpenAI-compatible requests over any number of servers.

Run:    python scripts/route.py --workers=http://10.0.0.1:8000,http://10.0.0.2:8000 --port=8080
        python scripts/route.py --prefill=http://a:8001 --decode=http://b:8002,http://c:8003 --on_worker_failure=replay
        python scripts/route.py --workers=http://a:8000,http://b:8000 --on_worker_failure=replay --admin_key=KEY
Expect: a line with the address; then a JSON line for each request on standard error. SIGTERM drains and exits.

Clients use the router's address as they would a server's. `x-session-affinity: ID` keeps a session on one worker.
"""

import dataclasses
import logging
from typing import Any

from absl import flags

from trillion_infer.cli.flags import run
from trillion_infer.core.errors import ConfigError
from trillion_infer.route.config import FAILURE_POLICIES, RouterConfig, check_pools, option_help

WORKERS = flags.DEFINE_list("workers", [], "Base URLs of servers, http://HOST:PORT, comma separated.")
PREFILL = flags.DEFINE_list("prefill", [], "Base URLs of prefill workers (serve.py --role=prefill); with --decode.")
DECODE = flags.DEFINE_list("decode", [], "Base URLs of decode workers (serve.py --role=decode).")
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
PORT = flags.DEFINE_integer("port", 8080, "Port to listen on; 0 takes a free one.", lower_bound=0, upper_bound=65535)
DRAIN_S = flags.DEFINE_integer("drain_s", 300, "Seconds SIGTERM gives to requests in flight.", lower_bound=0)
_OPTIONS = [field for field in dataclasses.fields(RouterConfig) if field.name not in ("workers", "prefill")]
_HELP = option_help()
for _field in _OPTIONS:
    _text: str = _HELP[_field.name]
    _default: Any = _field.default
    if _field.name == "on_worker_failure":
        flags.DEFINE_enum(_field.name, _default, FAILURE_POLICIES, _text)
    elif isinstance(_default, int):
        flags.DEFINE_integer(_field.name, _default, _text)
    elif isinstance(_default, float):
        flags.DEFINE_float(_field.name, _default, _text)
    else:
        flags.DEFINE_string(_field.name, _default, _text)


def main(_: list[str]) -> None:
    check_pools(WORKERS.value, PREFILL.value, DECODE.value)
    options: dict[str, Any] = {field.name: flags.FLAGS[field.name].value for field in _OPTIONS}
    config = RouterConfig(tuple(WORKERS.value or DECODE.value), tuple(PREFILL.value), **options)
    try:
        from trillion_infer.route.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing; pip install 'trillion-infer[serve]'.") from None
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    serve(config, HOST.value, PORT.value, DRAIN_S.value)


if __name__ == "__main__":
    run(main)
