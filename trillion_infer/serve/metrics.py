"""Prometheus figures, under vLLM's names where the meaning is the same."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from trillion_infer.core.outputs import RequestMetrics

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_RATES = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metrics:
    """The figures of one server, in a registry of their own."""

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self.recent_first_token_s: deque[float] = deque(maxlen=64)
        self._model = model_name

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["model_name"], registry=self.registry).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            made = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        self._running = gauge("vllm:num_requests_running", "Requests being computed.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests in the queue.")
        self._pages = gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
        self._coming = gauge("trillion_infer:programs_coming", "Programs still being compiled behind the engine.")
        self._engine = _EngineCounters(model_name)
        self.registry.register(self._engine)
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self._generated = counter("vllm:generation_tokens", "Tokens generated for finished requests.")
        self._cached = counter("vllm:prompt_tokens_cached", "Prompt tokens of finished requests found in the cache.")
        self._success = Counter(
            "vllm:request_success", "Finished completions.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._http = Counter(
            "trillion_infer:http_requests", "Answers by path and status.", ["path", "status"], registry=self.registry
        )
        self._first = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._between = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self._queued = histogram("vllm:request_queue_time_seconds", "From arrival to the first step.")
        self._handoffs = {
            "prefill": histogram("trillion_infer:handoff_prefill_seconds", "From pages reserved to the last computed."),
            "transfer": histogram("trillion_infer:handoff_transfer_seconds", "In which pages were on their way."),
            "exposed": histogram("trillion_infer:handoff_exposed_seconds", "Waited for pages after the prefill."),
            "decode": histogram("trillion_infer:handoff_decode_seconds", "From the last page to the last token."),
            "rate": histogram("trillion_infer:handoff_gigabytes_per_second", "Bytes over transfer time.", _RATES),
        }
        self._prompt_sizes = histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self._output_sizes = histogram("vllm:request_generation_tokens", "Generated tokens a request.", _TOKENS)

    def observe(self, job: Any) -> None:
        """Counts a job that has ended, by its finished outputs."""
        for output in job.outputs.values():
            marks = output.metrics
            self._prompt.inc(len(output.prompt_token_ids))
            self._cached.inc(output.num_cached_tokens)
            self._prompt_sizes.observe(len(output.prompt_token_ids))
            for each in output.outputs:
                self._generated.inc(len(each.token_ids))
                self._output_sizes.observe(len(each.token_ids))
                self._success.labels(self._model, each.finish_reason).inc()
            self._observe_handoff(marks)
            if marks.first_scheduled_time is not None:
                self._queued.observe(marks.first_scheduled_time - marks.arrival_time)
            if marks.time_to_first_token is not None:
                self._first.observe(marks.time_to_first_token)
                self.recent_first_token_s.append(marks.time_to_first_token)
            if marks.last_token_time is not None:
                self._whole.observe(marks.last_token_time - marks.arrival_time)
            for earlier, later in zip(marks.token_times, marks.token_times[1:], strict=False):
                self._between.observe(later - earlier)

    def _observe_handoff(self, marks: RequestMetrics) -> None:
        handoff = marks.handoff
        if handoff is None or handoff.arrived is None or handoff.reserved is None or handoff.offered is None:
            return
        self._handoffs["prefill"].observe(handoff.offered - handoff.reserved)
        self._handoffs["transfer"].observe(handoff.transfer_s)
        self._handoffs["exposed"].observe(handoff.arrived - handoff.offered)
        if marks.last_token_time is not None:
            self._handoffs["decode"].observe(marks.last_token_time - handoff.arrived)
        if handoff.transfer_s > 0:
            self._handoffs["rate"].observe(handoff.bytes / handoff.transfer_s / 1e9)

    def answered(self, path: str, status: int) -> None:
        """Counts an HTTP answer. `path` must be one of few."""
        self._http.labels(path, str(status)).inc()

    def text(self, stats: Mapping[str, int]) -> bytes:
        """Prometheus' text format, with the engine's counters as they are now."""
        if stats:
            self._running.set(stats.get("running", 0))
            self._waiting.set(stats.get("waiting", 0))
            self._pages.set(pages_in_use(stats))
            self._coming.set(stats.get("programs_coming", 0))
            self._engine.stats = stats
        return generate_latest(self.registry)


class _EngineCounters(Collector):
    """Counters that the engine keeps itself, as it last told them."""

    _NAMES: ClassVar = {
        "preemptions": ("vllm:num_preemptions", "Requests set back for want of pages."),
        "prefix_lookup_tokens": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
        "prefix_hit_tokens": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
        "steps": ("trillion_infer:engine_steps", "Steps the engine has made."),
        "kv_promoted_bytes": ("trillion_infer:kv_promoted_bytes", "KV bytes brought back to the device."),
        "kv_demoted_bytes": ("trillion_infer:kv_demoted_bytes", "KV bytes copied out of the device."),
        "kv_dropped": ("trillion_infer:kv_dropped_blocks", "Evicted blocks lost because too much was in flight."),
        "kv_layered_prefills": ("trillion_infer:kv_layered_prefills", "First steps sent while their prefix came."),
        "compilations": ("trillion_infer:compilations", "Programs compiled; flat once none is coming."),
    }
    _OF_WORKERS: ClassVar = {
        "handoffs": "Prompts that another worker prefilled.",
        "kv_bytes_moved": "Bytes of KV received.",
        "kv_pages_moved": "Pages of KV received.",
        "kv_pages_found": "Pages that were here already and not sent.",
        "handoff.leases": "Prompts taken from other workers.",
        "handoff.acks": "Leases that ended with an acknowledgement.",
        "handoff.expired": "Leases that ran out.",
        "handoff.aborts": "Attempts called off.",
        "handoff.retries": "Attempts after the first.",
        "handoff.resends": "Transfers repeated from their lease.",
        "handoff.busy": "Attempts refused for want of room.",
        "handoff.transfer_failures": "Transfers that failed.",
        "handoff.digest_failures": "Pages that did not match their digest.",
        "handoff.stale_messages": "Messages of an earlier life of a worker.",
        "handoff.stale_offers": "Offers nobody waited for.",
        "handoff.given_up": "Requests no prefill worker handed over.",
        "handoff.recomputed": "Of those, prefilled here.",
    }

    _TIERS: ClassVar = {
        "hit_tokens": ("trillion_infer:kv_tier_hit_tokens", "Prompt tokens found in a tier.", CounterMetricFamily),
        "stored": ("trillion_infer:kv_tier_stored_blocks", "Blocks stored in a tier.", CounterMetricFamily),
        "evictions": ("trillion_infer:kv_tier_evictions", "Blocks a tier gave up.", CounterMetricFamily),
        "refused": ("trillion_infer:kv_tier_refused_blocks", "Blocks a tier did not take.", CounterMetricFamily),
        "misses": ("trillion_infer:kv_tier_lost_blocks", "Blocks that were gone when read.", CounterMetricFamily),
        "digest_failures": (
            "trillion_infer:kv_tier_digest_failures",
            "Blocks that were not what was stored.",
            CounterMetricFamily,
        ),
        "outages": ("trillion_infer:kv_tier_outages", "Times a tier was found down.", CounterMetricFamily),
        "bytes": ("trillion_infer:kv_tier_bytes", "Bytes of blocks in a tier.", GaugeMetricFamily),
        "budget": ("trillion_infer:kv_tier_budget_bytes", "Bytes a tier may take, 0 for any.", GaugeMetricFamily),
        "is_down": ("trillion_infer:kv_tier_down", "1 while a tier is left alone.", GaugeMetricFamily),
    }
    """By tier: figure of Tier.stats to name, help and kind."""

    _DRAFTS: ClassVar = {
        "drafts": ("vllm:spec_decode_num_drafts", "Drafts verified."),
        "proposed": ("vllm:spec_decode_num_draft_tokens", "Tokens of drafts verified."),
        "accepted": ("vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that stood."),
    }

    def __init__(self, model_name: str):
        self.stats: Mapping[str, int] = {}
        self._model = model_name

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for key, (name, text) in self._NAMES.items():
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], self.stats.get(key, 0))
            yield family
        for key, text in self._OF_WORKERS.items():
            if key not in self.stats and "handoff.held" not in self.stats:
                continue
            name = f"trillion_infer:{key.replace('.', '_')}"
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], self.stats.get(key, 0))
            yield family
        tiers = [name[3:-7] for name in self.stats if name.startswith("kv_") and name.endswith(".blocks")]
        for figure, (name, text, kind) in self._TIERS.items():
            family = kind(name, text, labels=["model_name", "tier"])
            for tier in tiers:
                family.add_metric([self._model, tier], self.stats.get(f"kv_{tier}.{figure}", 0))
            yield family
        drafters = [name.split(".")[1] for name in self.stats if name.endswith(".acceptance_length")]
        for key, (name, text) in self._DRAFTS.items() if drafters else ():
            family = CounterMetricFamily(name, text, labels=["model_name", "drafter"])
            for drafter in drafters:
                family.add_metric([self._model, drafter], self.stats[f"speculate.{drafter}.{key}"])
            yield family


def pages_in_use(stats: Mapping[str, int]) -> float:
    """Share of KV pages that running requests hold, over all groups."""
    total = sum(value for name, value in stats.items() if name.endswith(".pages_total"))
    held = sum(value for name, value in stats.items() if name.endswith(".pages_leased"))
    return held / total if total else 0.0
