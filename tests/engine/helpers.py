"""Small things the engine's tests share."""

import numpy as np

from trillion_infer import SamplingParams
from trillion_infer.core.outputs import RequestOutput


def greedy(max_tokens: int = 16, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=options.pop("ignore_eos", True), **options)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def check_idle(llm) -> None:
    """Nothing is left behind: free + cached == total pages, every slot free."""
    llm.engine.drain()
    llm.engine.check_integrity()
    stats = llm.stats()
    assert stats["running"] == stats["waiting"] == 0
    for name in {key.rpartition(".")[0] for key in stats if key.endswith(".pages_total")}:
        free, cached, total = (stats[f"{name}.pages_{part}"] for part in ("free", "cached", "total"))
        assert free + cached == total, f"{name}: {free} free + {cached} cached pages, {total} in all"
