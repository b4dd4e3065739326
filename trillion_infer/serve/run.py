"""Runs the application on a socket."""

import logging

import uvicorn

from trillion_infer.generation.generator import Generator
from trillion_infer.serve.app import create_app
from trillion_infer.serve.options import ServerOptions


def serve(generator: Generator, options: ServerOptions, host: str, port: int, drain_s: int) -> None:
    """Serves until SIGTERM or SIGINT: then no connection is taken any more, requests in flight have `drain_s`
    seconds to end, and what is left is aborted."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    uvicorn.run(
        create_app(generator, options),
        host=host,
        port=port,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=drain_s,
        server_header=False,
    )
