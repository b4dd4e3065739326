"""Rows of the kernel report: real shapes, compiled for a target that is not here."""

import time
from collections.abc import Iterator
from math import prod

from pallas_kernels.common.pool_copies import pool_copies
from pallas_kernels.common.report import Row
from pallas_kernels.common.sources import code_digest
from pallas_kernels.latent_paged_attention.ahead_of_time import DECODE, PREFILL, compile_layers
from pallas_kernels.latent_paged_attention.arg_specs import SPECS
from pallas_kernels.latent_paged_attention.blocks import gpu_blocks, tpu_blocks
from pallas_kernels.latent_paged_attention.cost import fewest, gpu_cost, shape_of, tpu_cost
from sharding.topologies import KINDS, topology

OP = "latent_paged_attention"
CACHED = 8192


def specs() -> list[str]:
    """Names of the shapes."""
    return [spec.name for spec in SPECS]


def rows(target: str, name: str) -> Iterator[Row]:
    """A row for decode (64 sequences) and one for a chunk of 512 tokens, each after up to 8192 cached ones.

    Args:
      target: of `sharding.topologies.topology`. name: of a shape.

    Raises:
      RuntimeError: the compiled program holds a copy of the pool.
    """
    kind = KINDS[target.partition(":")[0]]
    spec = next(spec for spec in SPECS if spec.name == name)
    device = topology(target)[0]
    backend = "tpu" if kind.platform == "tpu" else "gpu"
    shape = shape_of(spec, backend)
    for batch_name, batch in (("decode", DECODE), ("prefill", PREFILL)):
        start = time.process_time()
        compiled, pool = compile_layers(spec, batch, device, backend)
        seconds = time.process_time() - start
        if copies := pool_copies(compiled.as_text() or "", [pool.shape]):
            raise RuntimeError(f"{OP} {name} on {target} copies its pool: {copies[0].strip()}")
        lens = [(CACHED - 1, 1)] * 64 if batch is DECODE else [(CACHED - 512, 512)]
        if backend == "tpu":
            blocks = tpu_blocks(shape, spec.max_len // spec.page_size)
            cost, scratch = tpu_cost(spec, lens, blocks), blocks.vector_bytes(shape)
        else:
            blocks = gpu_blocks(shape)
            cost, scratch = gpu_cost(spec, lens, blocks), blocks.shared_bytes(shape)
        yield Row(
            op=OP,
            spec=name,
            batch=batch_name,
            target=kind.name,
            compile_seconds=round(seconds, 1),
            scratch_bytes=scratch,
            temp_bytes=getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0),
            pool_bytes=prod(pool.shape) * pool.dtype.itemsize,
            cost=cost,
            fewest=fewest(spec, lens),
            code=code_digest(OP, backend, spec),
        )
