"""The router's Prometheus metrics, in a registry of their own."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from trillion_infer.route.worker import Worker

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAUGES = {
    "up": ("1 if health polling finds the worker up.", lambda worker: worker.up),
    "draining": ("1 while the worker takes no new requests.", lambda worker: worker.draining),
    "circuit_open": ("1 while the worker's circuit is not closed.", lambda worker: worker.breaker.state != "closed"),
    "requests_in_flight": ("Requests of this router on the worker.", lambda worker: worker.requests),
    "prefill_tokens_in_flight": ("Prompt tokens still to compute (estimated).", lambda worker: worker.prefill_tokens),
    "decode_tokens_in_flight": ("Tokens still to generate (estimated).", lambda worker: worker.decode_tokens),
    "queued_tokens": ("Prompt tokens in its queue, as it last told.", lambda worker: worker.queued_tokens),
    "kv_in_use": ("Share of its KV pages in use, as it last told.", lambda worker: worker.kv_in_use),
    "prefix_blocks": ("Blocks of prompt prefix remembered.", lambda worker: len(worker.prefix)),
}


class Metrics:
    """Counters of one router; gauges are read from the workers when the page is made."""

    def __init__(self):
        self._registry = CollectorRegistry()
        of = {"registry": self._registry, "namespace": "trillion_infer", "subsystem": "router"}
        self.requests = Counter("requests", "Answers by worker and status.", ["worker", "status"], **of)
        self.choices = Counter("choices", "Reasons for which workers were chosen.", ["worker", "reason"], **of)
        self.failures = Counter("worker_failures", "Attempts that a worker failed.", ["worker", "reason"], **of)
        self.replays = Counter("replays", "Streams whose worker failed after the first token.", ["outcome"], **of)
        self.rejected = Counter("rejected", "Requests refused by the router itself.", ["status"], **of)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens sent (estimated).", ["worker"], **of)
        self.matched_tokens = Counter("matched_tokens", "Of those, tokens of a known prefix.", ["worker"], **of)
        self.cached_tokens = Counter("cached_tokens", "Cached prompt tokens that workers report.", ["worker"], **of)
        self.first_token = Histogram(
            "first_token_seconds", "Seconds to the first token of a stream.", buckets=_SECONDS, **of
        )
        self.duration = Histogram("request_seconds", "Seconds to the end of a request.", buckets=_SECONDS, **of)
        self._gauges = {name: Gauge(f"worker_{name}", text, ["worker"], **of) for name, (text, _) in _GAUGES.items()}

    def page(self, workers: Iterable[Worker]) -> bytes:
        """The text of /metrics."""
        for worker in workers:
            for name, (_, read) in _GAUGES.items():
                self._gauges[name].labels(worker.url).set(read(worker))
        return generate_latest(self._registry)
