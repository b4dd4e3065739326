"""Runs the router under uvicorn."""

import socket

import uvicorn

from trillion_infer.route.app import build_app
from trillion_infer.route.config import RouterConfig


def serve(config: RouterConfig, host: str, port: int, drain_s: int) -> None:
    """Serves until SIGINT or SIGTERM, then lets requests in flight end for at most `drain_s` seconds.

    Raises OSError if the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    shown = f"[{host}]" if ":" in host else host
    count = len(config.workers) + len(config.prefill)
    print(f"routing on http://{shown}:{listener.getsockname()[1]} over {count} workers", flush=True)
    options = uvicorn.Config(
        build_app(config), log_level="warning", access_log=False, timeout_graceful_shutdown=drain_s, lifespan="on"
    )
    uvicorn.Server(options).run(sockets=[listener])
