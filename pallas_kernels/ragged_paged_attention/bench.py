"""Measured rates of the operation beside a device's limits, and the search for block sizes."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.common.slot_shard import SlotShard
from pallas_kernels.ragged_paged_attention import gpu, reference, tpu
from pallas_kernels.ragged_paged_attention.arg_specs import SPECS, ArgSpec
from pallas_kernels.ragged_paged_attention.blocks import GpuBlocks, Shape, TpuBlocks
from pallas_kernels.ragged_paged_attention.cost import fewest

TINY = ArgSpec("tiny", 2, 4, 2, 128, page_size=16, pool_dtype="float32", max_len=64)


@dataclass(frozen=True)
class Case:
    """A shape, and (cached_len, extend_len) of each sequence."""

    spec: ArgSpec
    lens: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Measurement:
    """Rates by the fewest bytes and operations that the result needs."""

    seconds: float
    bytes_per_second: float
    flops_per_second: float


def cases(name: str, memory: int) -> Iterator[Case]:
    """Decode at batch 8 to 256 and context 1k to 128k, and prefill, where the pool fits in `memory` bytes."""
    spec = next(spec for spec in SPECS if spec.name == name)
    batches = [[(context - 1, 1)] * size for size, context in product((8, 32, 64, 256), (1024, 8192, 32768, 131072))]
    batches += [[(context, 2048)] for context in (0, 8192, 131072 - 2048)]
    row = 2 * spec.kv_heads * max(spec.dim, 128) * jnp.dtype(spec.pool_dtype).itemsize
    for lens in batches:
        if sum(cached + extend for cached, extend in lens) * row <= memory:
            yield Case(replace(spec, layers=1), tuple(lens))


def tiny_cases() -> Iterator[Case]:
    """A decode and a prefill batch that an interpreter can run."""
    yield Case(TINY, ((20, 1), (3, 1)))
    yield Case(TINY, ((5, 9),))


def measure(case: Case, backend: str, *, repeats: int, interpret: bool = False, blocks=None) -> Measurement:
    """Fastest of `repeats` calls on the default device; random values, pages in random order."""
    arguments = _arguments(case, backend)
    pools = {name: arguments.pop(name) for name in ("kv_pool", "kv_scales") if name in arguments}
    options = dict.fromkeys(("soft_cap", "k_scale", "v_scale")) | case.spec.keywords()
    extends = [extend for _, extend in case.lens]
    run = {"reference": reference, "tpu": tpu, "gpu": gpu}[backend].ragged_paged_attention
    if backend != "reference":
        run = partial(run, interpret=interpret, blocks=blocks)
    sinks = jnp.zeros(case.spec.heads) if case.spec.sinks else None
    slots = SlotShard(jnp.int32(0), case.spec.shards) if case.spec.shards > 1 else None
    op = jax.jit(
        partial(run, sinks=sinks, max_q_len=max(extends), slots=slots, **options), donate_argnames=tuple(pools)
    )
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        found = jax.block_until_ready(op(**pools, **arguments))
        best = min(best, time.perf_counter() - start)
        pools = dict(zip(pools, found[-len(pools) :], strict=True))
    cost = fewest(case.spec, case.lens)
    return Measurement(best, cost.bytes / best, cost.flops / best)


def tune_case(name: str) -> Case:
    """Decode and prefill of a shape, at once: what its blocks are chosen for."""
    spec = replace(next(spec for spec in SPECS if spec.name == name), layers=1)
    return Case(spec, (*[(8191, 1)] * 32, (7680, 512)))


def candidates(shape: Shape, backend: str) -> list[TpuBlocks] | list[GpuBlocks]:
    """Block sizes to try: those that fit."""
    if backend == "tpu":
        pages = sorted({max(1, keys // shape.page_size) for keys in (256, 512, 1024, 2048)})
        sizes = [TpuBlocks(*sizes) for sizes in product((16, 32, 64, 128, 256), pages)]
        return [blocks for blocks in sizes if blocks.refusal(shape) is None]
    sizes = [GpuBlocks(*sizes) for sizes in product((32, 64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4))]
    sizes += [GpuBlocks(keys, 128, 8, stages, "mosaic") for keys, stages in product((64, 128), (2, 3, 4))]
    return [blocks for blocks in sizes if blocks.refusal(shape) is None]


def tune(case: Case, backend: str, device: str, *, repeats: int = 5, interpret: bool = False, among=None) -> dict:
    """The entry of tuning/*.json for a shape: the fastest of the blocks `among` (None: `candidates`) for `case`.

    Blocks that only other devices, arguments or releases of jax can run are left out.
    """
    shape = shape_of(case.spec, backend)

    def seconds(blocks) -> float:
        try:
            return measure(case, backend, repeats=repeats, interpret=interpret, blocks=blocks).seconds
        except UnsupportedError:
            return float("inf")

    best = min(among or candidates(shape, backend), key=seconds)
    return {"shape": {"device": device, **asdict(shape)}, "blocks": asdict(best)}


def shape_of(spec: ArgSpec, backend: str) -> Shape:
    """What the blocks of a real shape depend on."""
    lanes = -(-spec.dim // 128) * 128 if backend == "tpu" else spec.dim
    return Shape(spec.heads, spec.kv_heads, lanes, spec.page_size // spec.shards, spec.pool_dtype)


def _arguments(case: Case, backend: str) -> dict[str, jax.Array]:
    spec, rng = case.spec, np.random.default_rng(0)
    counts = [-(-(cached + extend) // spec.page_size) for cached, extend in case.lens]
    tokens = sum(extend for _, extend in case.lens)
    spec = replace(spec, max_len=max(counts) * spec.page_size)
    names = ("q", "k", "v", "kv_pool", "layer", "kv_lens", "page_table", "cu_q_lens", "num_seqs")
    shapes = dict(zip(names, spec.abstract(backend, len(case.lens), tokens, sum(counts)), strict=True))
    order, table = rng.permutation(sum(counts)), np.zeros(shapes["page_table"].shape, np.int32)
    for s, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        table[s, :count] = order[end - count : end]
    arrays = {name: jnp.asarray(rng.normal(size=shapes[name].shape), shapes[name].dtype) for name in ("q", "k", "v")}
    ints = {
        "layer": 0,
        "kv_lens": [cached + extend for cached, extend in case.lens],
        "page_table": table,
        "cu_q_lens": np.cumsum([0, *(extend for _, extend in case.lens)]),
        "num_seqs": [sum(extend == 1 for _, extend in case.lens), len(case.lens)],
    }
    arrays |= {name: jnp.asarray(value, jnp.int32) for name, value in ints.items()}
    pools = {"kv_pool": shapes["kv_pool"], "kv_scales": spec.scales(sum(counts))}
    return arrays | {name: jnp.zeros(like.shape, like.dtype) for name, like in pools.items() if like is not None}
