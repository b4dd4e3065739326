"""What a server can be told."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerOptions:
    """Options of the HTTP side.

    model_name: the name clients use.
    api_keys: keys that open the server; none leaves it open. Each key is a tenant with a prefix cache of its own.
    max_body_bytes: largest request body. body_timeout_s: longest time for a request's head, and
        then for its body, to arrive.
    max_requests: most requests in flight, more get 429. retry_after_s: what 429 and 503 tell clients.
    stall_s: an engine step longer than this makes /health unhealthy.
    tool_format, reasoning_format: names of the model's formats; None finds them in its chat template, "none" turns
        them off.
    admin_key: bearer key of /admin; None turns it off.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 30.0
    max_requests: int = 1024
    retry_after_s: int = 1
    stall_s: float = 120.0
    tool_format: str | None = None
    reasoning_format: str | None = None
    admin_key: str | None = None
