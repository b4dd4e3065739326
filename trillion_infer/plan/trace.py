"""Replay of a request trace through the prefix index and the eviction policies that serve real requests."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trillion_infer.cache.eviction import EvictionPolicy, make_policy
from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.cache.naming import BlockNamer
from trillion_infer.config.cache import CacheGroup
from trillion_infer.core.errors import ConfigError
from trillion_infer.core.request import Request
from trillion_infer.core.sampling_params import SamplingParams

BLOCK_TOKENS = 512
"""Tokens that one name of a trace stands for."""

LAST_TOKEN = 2**32 - 1
"""Follows every prompt, so that its last whole block can be a hit: at least one token is always computed."""


@dataclass(frozen=True)
class TraceRequest:
    """Names of the whole blocks of a prompt, equal names for equal prefixes; prompt length in tokens."""

    blocks: tuple[int, ...]
    input_length: int


@dataclass(frozen=True)
class Replay:
    """Prompt tokens of a trace, how many were found, and blocks evicted, for a pool of `num_blocks`."""

    policy: str
    num_blocks: int
    prompt_tokens: int
    hit_tokens: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def load_trace(path: Path | str) -> list[TraceRequest]:
    """Requests of a JSONL trace with `input_length` and `hash_ids`; raises ConfigError that names the bad line."""
    requests = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    length, names = int(row["input_length"]), row["hash_ids"]
                    if length < 1 or not all(isinstance(name, int) and 0 <= name < LAST_TOKEN for name in names):
                        raise ValueError("lengths are positive and names are whole numbers of 32 bits")
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"{path}, line {number} is not a request of a trace: {error!r}.") from error
                requests.append(TraceRequest(tuple(names[: length // BLOCK_TOKENS]), length))
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read: {error.strerror}.") from error
    if not requests:
        raise ConfigError(f"The trace {path} has no requests.")
    return requests


def footprint(trace: Sequence[TraceRequest]) -> int:
    """Distinct blocks of a trace: a pool of this size never evicts."""
    return len({block for request in trace for block in request.blocks})


def replay(trace: Sequence[TraceRequest], num_blocks: int, policy: str) -> Replay:
    """Serve the requests one after the other from a pool of `num_blocks`.

    A block of the trace is a page of one token whose id is the block's name. Raises ConfigError if some prompt
    does not fit the pool.
    """
    longest = max(len(request.blocks) for request in trace)
    if num_blocks < longest:
        raise ConfigError(f"The longest prompt has {longest} blocks; {num_blocks} do not hold it.")

    def made() -> EvictionPolicy:
        return make_policy(policy)

    cache = KVCache([CacheGroup("trace", None, num_blocks)], 1, BlockNamer(b"trace", b"", 1), policy=made)
    params = SamplingParams(max_tokens=1)
    hit = 0
    for number, row in enumerate(trace):
        request = Request(str(number), [*row.blocks, LAST_TOKEN], params, 1, slot=0)
        request.num_computed = cache.match(request)
        hit += request.num_computed
        cache.attach(request, request.num_computed)
        fits = cache.allocate(request, len(row.blocks))
        assert fits, f"{len(row.blocks)} blocks do not fit {num_blocks}"
        request.num_computed = len(row.blocks)
        cache.commit(request)
        cache.release(request)
        cache.drain_updates()
    tokens = sum(row.input_length for row in trace)
    evictions = cache.stats()["trace.evictions"]
    return Replay(policy, num_blocks, tokens, hit * BLOCK_TOKENS, evictions)


def gap_closed(policy: Replay, lru: Replay, infinite: Replay) -> float:
    """Share of the hit rate between LRU and infinite memory that a policy gains; 0 when there is no gap."""
    gap = infinite.hit_tokens - lru.hit_tokens
    return (policy.hit_tokens - lru.hit_tokens) / gap if gap else 0.0


def compare(
    trace: Sequence[TraceRequest],
    policies: Sequence[str],
    sizes: Sequence[int],
    report: Callable[[Replay], None] = lambda _: None,
) -> list[Replay]:
    """Every policy at every size, and LRU with memory for everything as the last; `report` gets each when done."""
    runs = [(name, size) for size in sizes for name in policies]
    results = []
    for name, size in [*runs, ("lru", footprint(trace))]:
        results.append(replay(trace, size, name))
        report(results[-1])
    return results


def plot(results: Sequence[Replay], path: Path | str) -> bool:
    """Write hit rate over pool size to an image; False, without effect, where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    *runs, infinite = results
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(run.policy for run in runs):
        points = sorted((run.num_blocks, run.hit_rate) for run in runs if run.policy == name)
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.axhline(infinite.hit_rate, linestyle="--", color="grey", label="infinite memory")
    axes.set_xscale("log")
    axes.set_xlabel(f"blocks of {BLOCK_TOKENS} tokens")
    axes.set_ylabel("prompt tokens found")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
    return True
