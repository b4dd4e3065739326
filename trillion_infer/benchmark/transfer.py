"""The transfer workload: what handing a prompt's KV from prefill to decode costs, both in one process."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.engine.disaggregated import DisaggregatedEngine
from trillion_infer.llm import LLM
from trillion_infer.transfer.pages import PAGES_PER_CALL

OUT = 4
"""Tokens of each prompt: the second shows that its KV was there."""
SPLIT = "prefill=1,decode=1"
IN_FLIGHT = 1
"""Batches of pages that are read ahead of those put in place: what a chunk of 512 tokens finishes, of 32 a page."""


Trace = Callable[[list[dict[str, Any]]], None]
"""Gets the spans of all prompts, as Chrome's trace viewer reads them."""


def transfer(
    options: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    trace: Trace | None = None,
) -> dict[str, float]:
    """Medians over `prompts` after one that does not count; `trace` gets the spans of all.

    handoff_prefill_s: from the first step to the first token. handoff_exposed_share: percent of it that the request
    then waited for its pages. handoff_gb_s: pages of a prompt read, moved and put in place, one prompt after the other
    on idle meshes; copy_gb_s: a plain copy of as many bytes. copy_ratio: their ratio.
    """
    _two_devices()
    llm = LLM(**{**options, "disaggregate": options.get("disaggregate") or SPLIT})
    llm.wait_for_programs()
    engine = llm.engine
    assert isinstance(engine, DisaggregatedEngine)
    params = SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True)
    llm.generate([list(prompts[0][::-1])], params)
    prefill, exposed = [], []
    for prompt in prompts:
        metrics = llm.generate([list(prompt)], params)[0].metrics
        marks = metrics.handoff
        assert marks is not None, "the prompt was not handed over"
        assert marks.offered is not None, "the prompt was not handed over"
        prefill.append(marks.offered - (metrics.first_scheduled_time or metrics.arrival_time))
        exposed.append(marks.exposed_s or 0.0)
    if trace is not None:
        trace(engine.trace_events())
    size, seconds, copied = _rates(engine, len(prompts[0]))
    llm.close()
    return {
        "handoff_prefill_s": float(np.median(prefill)),
        "handoff_exposed_share": 100 * float(np.median(exposed)) / float(np.median(prefill)),
        "handoff_gb_s": size / seconds / 1e9,
        "copy_gb_s": size / copied / 1e9,
        "copy_ratio": copied / seconds,
    }


def _two_devices() -> None:
    """Two CPU devices, where the CPU is all there is and nobody has asked for devices yet."""
    try:
        jax.config.update("jax_num_cpu_devices", 2)
    except RuntimeError:
        return  # the devices are there already: those that the caller chose


def _rates(engine: DisaggregatedEngine, tokens: int) -> tuple[int, float, float]:
    """Bytes of a prompt's pages in the first pool; the shortest of several times to move and to copy them."""
    source, target, mover = engine.prefill[0], engine.decode[0], engine.movers[0][0]
    pages = range(min(tokens // source.schedulers[0].cache.page_size, source.pools[0].shape[1]))
    batches = [list(pages[i : i + PAGES_PER_CALL]) for i in range(0, len(pages), PAGES_PER_CALL)]

    def move() -> int:
        reads, size, pool = deque(), 0, target.pools[0]
        for batch in (*batches, *[None] * IN_FLIGHT):
            if batch is not None:
                reads.append((batch, mover.take(0, source.pools[0], batch)))
            if len(reads) > IN_FLIGHT or (batch is None and reads):
                ids, read = reads.popleft()
                data = mover.send(read)
                size += data.nbytes
                pool = mover.put(0, pool, ids, data)
        target.replace_pools((jax.block_until_ready(pool), *target.pools[1:]))
        return size

    size = move()
    if jax.default_backend() == "cpu":
        array, out = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        return size, _shortest(move), _shortest(lambda: np.copyto(out, array))
    array, copy = jnp.ones(size, jnp.uint8), jax.jit(jnp.copy)
    return size, _shortest(move), _shortest(lambda: copy(array).block_until_ready())


def _shortest(work: Callable[[], object], times: int = 7) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
