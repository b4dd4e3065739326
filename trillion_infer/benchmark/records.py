"""What a benchmark prints: one figure a record."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ENGINE = "trillion_infer"
BASELINE = "transformers"
MACHINE = "machine"

UNITS = {
    "decode_tok_s": "tokens/s",
    "prefill_tok_s": "tokens/s",
    "offline_out_tok_s": "tokens/s",
    "offline_total_tok_s": "tokens/s",
    "startup_cold_s": "s",
    "startup_s": "s",
    "serve_out_tok_s": "tokens/s",
    "serve_first_token_p50_ms": "ms",
    "serve_first_token_p99_ms": "ms",
    "serve_token_p50_ms": "ms",
    "serve_token_p99_ms": "ms",
    "token_p50_ms": "ms",
    "token_p90_ms": "ms",
    "token_max_ms": "ms",
    "total_tok_s": "tokens/s",
    "prompt_p50_s": "s",
    "streams_s": "s",
    "prompts_s": "s",
    "handoff_prefill_s": "s",
    "handoff_exposed_share": "%",
    "handoff_gb_s": "GB/s",
    "copy_gb_s": "GB/s",
    "p90_below_unchunked": "ratio",
    "p90_below_chunked": "ratio",
    "throughput_of_unchunked": "ratio",
    "throughput_of_chunked": "ratio",
    "host_ms_64_100": "ms",
    "host_ms_64_100000": "ms",
    "host_ms_256_100": "ms",
    "kv_first_token_ms": "ms",
    "kv_device_share": "%",
    "kv_host_share": "%",
    "kv_disk_share": "%",
    "kv_object_share": "%",
    "kv_store_share": "%",
    "kv_host_whole_share": "%",
    "kv_disk_whole_share": "%",
    "kv_object_whole_share": "%",
    "kv_store_whole_share": "%",
    "kv_write_behind_share": "%",
    "peak_rss_mb": "MB",
    "read_gb_s": "GB/s",
    "bf16_gflops": "GFLOP/s",
    "f32_gflops": "GFLOP/s",
}
"""Every metric and its unit. host_ms_RUNNING_CONTEXT: see benchmark/host.py.

startup_s is the warm one. MB and GB are powers of ten, except peak_rss_mb (2^20).
kv_*_share: time to first token of a stored prefix over that of computing it, which is kv_first_token_ms;
kv_*_whole_share: of the same where it comes in whole blocks and not layer by layer;
kv_write_behind_share: how much longer decode takes with copying out.
"""

_BY_ENDING = {"_tok_s": "tokens/s", "_ratio": "ratio", "_length": "tokens", "_rate": "share"}
"""Units of metrics that name a workload or a drafter."""


def unit_of(metric: str) -> str:
    """The unit of a metric. Raises KeyError for one that nobody knows."""
    ending = next((unit for end, unit in _BY_ENDING.items() if metric.endswith(end)), None)
    return UNITS[metric] if ending is None or metric in UNITS else ending


@dataclass(frozen=True)
class Record:
    """One figure. engine: who was measured, `machine` for limits, `a/b` for ratios. dtype: of the weights."""

    engine: str
    metric: str
    value: float
    unit: str
    dtype: str
    model: str

    def line(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, allow_nan=False)


def record(engine: str, metric: str, value: float, dtype: str, model: str) -> Record:
    """A record with the metric's unit and the value to four digits."""
    return Record(engine, metric, float(f"{value:.4g}"), unit_of(metric), dtype, model)


def ratios(records: Iterable[Record]) -> Iterator[Record]:
    """This engine's figure over every other's, for the metrics that both have."""
    records = list(records)
    ours = {r.metric: r for r in records if r.engine == ENGINE}
    for other in records:
        mine = ours.get(other.metric)
        if mine is not None and other.engine not in (ENGINE, MACHINE) and other.value > 0:
            value = float(f"{mine.value / other.value:.3g}")
            yield Record(f"{ENGINE}/{other.engine}", mine.metric, value, "ratio", mine.dtype, mine.model)
