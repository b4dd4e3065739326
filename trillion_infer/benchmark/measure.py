"""Timing of an LLM that is loaded: decode, prefill and offline throughput, peak memory."""

import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trillion_infer.benchmark.workloads import Work
from trillion_infer.core.outputs import RequestOutput
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.llm import LLM


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _run(llm: LLM, prompts: list[list[int]], out: int) -> tuple[list[RequestOutput], float]:
    """Outputs and seconds. Prompts must be new to the engine: a prefix found in the cache would fake the figures."""
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], _greedy(out))
    seconds = time.perf_counter() - start
    page = llm.blueprint.layouts[0].page_size
    for output in outputs:
        assert len(output.outputs[0].token_ids) == out, "a request ended early"
        assert output.num_cached_tokens < page, "a prompt was in the prefix cache"
    return outputs, seconds


def decode(llm: LLM, work: Work) -> dict[str, float]:
    """Tokens a second after the first one, batch 1."""
    outputs, _ = _run(llm, [work.decode], work.sizes.decode_out)
    times = outputs[0].metrics.token_times
    return {"decode_tok_s": (len(times) - 1) / (times[-1] - times[0])}


def prefill(llm: LLM, work: Work) -> dict[str, float]:
    """Prompt tokens a second from the call to the first token."""
    _, seconds = _run(llm, [work.prefill], 1)
    return {"prefill_tok_s": len(work.prefill) / seconds}


def offline(llm: LLM, work: Work) -> dict[str, float]:
    """Tokens a second over all requests, given at once."""
    _, seconds = _run(llm, work.offline, work.sizes.offline_out)
    out = len(work.offline) * work.sizes.offline_out
    return {"offline_out_tok_s": out / seconds, "offline_total_tok_s": (out + sum(map(len, work.offline))) / seconds}


MEASURES: dict[str, Callable[[LLM, Work], dict[str, float]]] = {
    "decode": decode,
    "prefill": prefill,
    "offline": offline,
}
"""Workloads that need a loaded LLM."""


def warm_up(llm: LLM, work: Work) -> None:
    """A few tokens of a prompt of each kind, so that nothing is done for the first time while the clock runs."""
    llm.generate([{"prompt_token_ids": ids[::-1]} for ids in (work.decode, work.prefill)], _greedy(4))


def peak_rss_mb() -> float:
    """Most memory this process ever had resident, in MiB."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) / 1024  # ru_maxrss would count what the parent held before this program was started
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
