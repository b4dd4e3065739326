"""Time to first token of a stored prefix, tier by tier, against computing it in the same run."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trillion_infer.benchmark.workloads import Sizes
from trillion_infer.core.errors import ConfigError
from trillion_infer.core.outputs import RequestOutput
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.llm import LLM
from trillion_infer.testing.mooncake import Master, master_program

TIER_BYTES = 2 * 10**9
RUNNING, DECODE_OUT, POOL_BYTES, FILL = 8, 96, 128 * 10**6, 512
"""Of the run that measures what copying out costs: requests, tokens each, the pool, and prompts that fill it first."""


def kv_shares(options: Mapping[str, Any], sizes: Sizes, vocab: int, repeats: int) -> Iterator[tuple[str, float]]:
    """One by one, the best of `repeats`: kv_*_share by tier in percent, kv_first_token_ms of computing all."""
    ids = _ids(vocab)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv")))
        tiers: dict[str, dict[str, Any]] = {
            "host": {"host_kv": TIER_BYTES},
            "disk": {"disk_kv": f"{folder / 'disk'}:{TIER_BYTES}"},
            "object": {"store": f"file://{folder / 'objects'}"},
        }
        if master_program() is not None:
            master = Master()
            stack.callback(master.kill)
            tiers["store"] = {"store": master.url(segment=TIER_BYTES)}
        for tier, place in tiers.items():
            llm = LLM(**{**options, "host_kv": 0, "disk_kv": None, "store": None, **place})
            llm.wait_for_programs()
            llm.engine.tiering.promoter.chooses = False  # pyright: ignore
            try:
                yield from _shares(llm, tier, sizes, ids, repeats, folder).items()
            finally:
                llm.close()
    yield "kv_write_behind_share", _write_behind(options, ids, repeats)


def _shares(
    llm: LLM, tier: str, sizes: Sizes, ids: Callable[[int], list[int]], repeats: int, folder: Path
) -> dict[str, float]:
    """One tier's share, by layers and in whole blocks; the device's and the time of computing with the first one, host
    memory."""
    cold, device = [], []
    stored: dict[bool, list[float]] = {True: [], False: []}
    promoter: Any = llm.engine.tiering.promoter  # pyright: ignore
    _first_token(llm, ids(sizes.kv_prefix + sizes.kv_tail))
    for attempt in range(repeats + 1):
        prefix = ids(sizes.kv_prefix)
        cold.append(_first_token(llm, prefix + ids(sizes.kv_tail))[0])
        device.append(_found(llm, prefix, ids(sizes.kv_tail), "device"))
        for by_layers, times in stored.items():
            promoter.may_run_by_layers = by_layers
            _move_out(llm)
            _drop_page_cache(folder)
            times.append(_found(llm, prefix, ids(sizes.kv_tail), tier))
        if attempt == 0:  # the first promotion compiles nothing and still touches all for the first time
            device.clear()
            stored = {True: [], False: []}
    names = {True: f"kv_{tier}_share", False: f"kv_{tier}_whole_share"}
    shares = {names[way]: 100 * min(times) / min(cold) for way, times in stored.items()}
    if tier == "host":
        shares |= {"kv_device_share": 100 * min(device) / min(cold), "kv_first_token_ms": 1e3 * min(cold)}
    return shares


def _first_token(llm: LLM, prompt: list[int]) -> tuple[float, RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    assert output.metrics.time_to_first_token is not None
    return output.metrics.time_to_first_token, output


def _found(llm: LLM, prefix: list[int], tail: list[int], tier: str) -> float:
    """Seconds to the first token, once the prefix was surely found where it should be."""
    before = llm.stats()
    seconds, output = _first_token(llm, prefix + tail)
    page = llm.blueprint.layouts[0].page_size
    if output.num_cached_tokens < len(prefix) // page * page:
        raise ConfigError(
            f"kv: {output.num_cached_tokens} of {len(prefix)} tokens were found in tier {tier}; the KV pool holds too "
            "little, raise kv_memory."
        )
    if tier != "device":
        name = f"kv_{'store' if tier == 'object' else tier}.hit_tokens"
        assert llm.stats()[name] > before[name], "the prefix came from elsewhere"
    return seconds


def _move_out(llm: LLM) -> None:
    """Everything cached on the device goes to the tier."""
    engine: Any = llm.engine
    engine.drain()
    engine.tiering.save_cached(engine.all_pools)
    for scheduler in engine.schedulers:
        scheduler.cache.clear()


def _drop_page_cache(folder: Path) -> None:
    """Has the system forget what it holds of the files in memory."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_behind(options: Mapping[str, Any], ids: Callable[[int], list[int]], repeats: int) -> float:
    """Percent of decode time that copying evicted pages to host memory costs: two engines, by turns."""
    common = {**options, "disk_kv": None, "store": None, "max_running": RUNNING, "kv_memory": POOL_BYTES}
    llms = [LLM(**{**common, "host_kv": host}) for host in (0, TIER_BYTES)]
    try:
        best = [float("inf"), float("inf")]
        prompt = min(FILL, llms[0].max_model_len - 1)
        for llm in llms:
            llm.wait_for_programs()
            layout = llm.blueprint.layouts[0]
            for _ in range(1 + POOL_BYTES * layout.page_size // (layout.page_bytes * prompt)):
                _first_token(llm, ids(prompt))
        for _ in range(repeats + 1):
            work = [ids(32) for _ in range(RUNNING)]
            for place, llm in enumerate(llms):
                best[place] = min(best[place], _decode_seconds(llm, work))
        return max(100 * (best[1] / best[0] - 1), 0.01)
    finally:
        for llm in llms:
            llm.close()


def _decode_seconds(llm: LLM, prompts: list[list[int]]) -> float:
    params = SamplingParams(temperature=0, max_tokens=DECODE_OUT, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    times = sorted(time for output in outputs for time in output.metrics.token_times[1:])
    return times[-1] - times[0]


def _ids(vocab: int) -> Callable[[int], list[int]]:
    rng = random.Random(0)
    return lambda count: [rng.randrange(min(100, vocab // 2), vocab) for _ in range(count)]
