"""Runs the application on a socket."""

import gc
import logging
from functools import partial
from typing import Any

import uvicorn

from trillion_infer.generation.generator import Generator
from trillion_infer.serve.app import create_app
from trillion_infer.serve.options import ServerOptions
from trillion_infer.serve.protocol import GuardedProtocol


def serve(generator: Generator, options: ServerOptions, host: str, port: int, drain_s: int) -> None:
    """Serves until SIGTERM or SIGINT: then no connection is taken any more, requests in flight have `drain_s`
    seconds to end, and what is left is aborted."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    gc.freeze()  # what is there now stays: going through it again and again would stall every stream
    uvicorn.run(create_app(generator, options), host=host, port=port, **uvicorn_settings(options, drain_s))


def uvicorn_settings(options: ServerOptions, drain_s: int) -> dict[str, Any]:
    """How uvicorn runs the application."""
    return {
        "http": partial(GuardedProtocol, head_timeout_s=options.body_timeout_s),
        "access_log": False,
        "log_config": None,
        "timeout_graceful_shutdown": drain_s,
        "server_header": False,
    }
