"""Options of the router, checked where they are made."""

import dataclasses
import re
from urllib.parse import urlsplit

from trillion_infer.core.errors import ConfigError

FAILURE_POLICIES = ("error", "replay")


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How requests are spread over workers, and what happens when one fails.

    Args:
        workers: base URLs of OpenAI-compatible servers, `http://host:port`; with `prefill`, those that decode.
        prefill: base URLs of servers that prefill for them (serve.py --role=prefill); none without pools.
        on_worker_failure: after the first token, `error` ends the stream with an error event; `replay` generates
            greedy and seeded requests again on another worker and skips the text already sent.
        max_attempts: workers tried before the first token.
        max_requests_per_worker: requests in flight above which a worker takes no more.
        max_tokens_per_worker: estimated prefill and decode tokens in flight above which a worker takes no more.
        balance: largest load of a worker over the even share, for sessions and for recent work; above 1.
        spill_tokens: tokens of imbalance that are tolerated before affinity or a prefix gives way.
        session_ttl_s: seconds without a request after which a session is forgotten.
        max_sessions: sessions remembered; the least recently used is forgotten first.
        prefix_blocks: blocks of prompt prefix remembered for each worker.
        max_body_bytes: largest request body.
        connect_timeout_s: seconds to connect to a worker.
        first_token_timeout_s: seconds from the request to the first token, or to the whole unstreamed answer.
        idle_timeout_s: seconds between two pieces of a stream.
        health_interval_s: seconds between two looks at a worker's /health.
        breaker_failures: failures in a row that open a worker's circuit.
        breaker_cooldown_s: seconds an open circuit waits before one trial request; doubles with each failed trial.
        admin_key: bearer key of POST /admin/drain and /admin/resume; None turns both off.
    """

    workers: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    on_worker_failure: str = "error"
    max_attempts: int = 3
    max_requests_per_worker: int = 256
    max_tokens_per_worker: int = 4_000_000
    balance: float = 1.25
    spill_tokens: int = 8192
    session_ttl_s: float = 1800.0
    max_sessions: int = 65_536
    prefix_blocks: int = 65_536
    max_body_bytes: int = 64 * 2**20
    connect_timeout_s: float = 2.0
    first_token_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    health_interval_s: float = 2.0
    breaker_failures: int = 3
    breaker_cooldown_s: float = 5.0
    admin_key: str | None = None

    def __post_init__(self):
        for name in ("workers", "prefill"):
            object.__setattr__(self, name, tuple(_base_url(url) for url in getattr(self, name)))
        if not self.workers:
            raise ConfigError(
                "--workers is empty; give the base URL of at least one server, --workers=http://HOST:PORT."
            )
        every = self.workers + self.prefill
        doubled = sorted({url for url in every if every.count(url) > 1})
        if doubled:
            raise ConfigError(f"--workers names {', '.join(doubled)} more than once; name every worker once.")
        if self.on_worker_failure not in FAILURE_POLICIES:
            raise ConfigError(
                f"--on_worker_failure={self.on_worker_failure} is not one of {', '.join(FAILURE_POLICIES)}."
            )
        if not self.balance > 1:
            raise ConfigError(f"--balance={self.balance} must be above 1; 1.25 lets a worker hold a quarter over even.")
        if self.admin_key is not None and not self.admin_key:
            raise ConfigError("--admin_key is empty; give a key, or leave the flag out to turn /admin off.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "spill_tokens" else 1 if isinstance(value, int) else None
            if least is not None and value < least:
                raise ConfigError(f"--{field.name}={value} must be at least {least}.")
            if isinstance(value, float) and not 0 < value < float("inf"):
                raise ConfigError(f"--{field.name}={value} must be a positive number.")


def option_help() -> dict[str, str]:
    """What each option means, from the docstring of RouterConfig."""
    lines = re.sub(r"\n {12}", " ", (RouterConfig.__doc__ or "").partition("Args:")[2]).splitlines()
    found = dict(line.strip().split(": ", 1) for line in lines if ": " in line)
    return {name: text[0].upper() + text[1:] for name, text in found.items()}


def check_pools(workers: list[str], prefill: list[str], decode: list[str]) -> None:
    """Raises ConfigError unless either workers are given, or pools of both roles."""
    if prefill or decode:
        if workers:
            raise ConfigError("--workers and --prefill or --decode are given; use --workers for servers without roles.")
        if not prefill or not decode:
            lacking = "decode" if prefill else "prefill"
            raise ConfigError(f"--{lacking} is empty; pools need at least one worker of each role.")
        return
    if not workers:
        raise ConfigError("no worker is given; use --workers=http://HOST:PORT,….")


def _base_url(url: str) -> str:
    """`url` without its trailing slash. Raises ConfigError unless it is scheme, host and port alone."""
    fault = ConfigError(f"--workers: {url!r} is not a base URL; use http://HOST:PORT, without a path.")
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise fault from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or "@" in parts.netloc:
        raise fault
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise fault
    return f"{parts.scheme}://{parts.netloc}"
