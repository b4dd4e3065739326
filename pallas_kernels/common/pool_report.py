"""Rows of the kernel report for attention: a scan over the layers of a pool, which is updated in place."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from pallas_kernels.common.pool_copies import pool_copies
from pallas_kernels.common.report import Cost, Row, temporaries
from pallas_kernels.common.sources import code_digest
from sharding.topologies import KINDS, topology

CACHED = 8192
DECODE, PREFILL = [1] * 64, [512]
"""New tokens of each sequence of a batch."""
Lens = list[tuple[int, int]]
"""Of each sequence the tokens in the pool before the call, and those that the call computes."""


@dataclass(frozen=True)
class PoolReport:
    """Reports of one operation. buckets: what `compile_layers` takes, by name of a batch. compile_layers: (shape,
    bucket, device, backend) -> the compiled scan and its pool. planned: (shape, backend, lens, bucket) -> what a call
    costs, and the on-chip memory it plans with, in bytes. fewest: (shape, lens) -> what no kernel can undercut."""

    op: str
    shapes: Sequence[Any]
    buckets: Mapping[str, Any]
    compile_layers: Callable[[Any, Any, jax.Device, str], tuple[jax.stages.Compiled, jax.ShapeDtypeStruct]]
    planned: Callable[[Any, str, Lens, Any], tuple[Cost, int]]
    fewest: Callable[[Any, Lens], Cost]

    def row(self, target: str, name: str, batch: str) -> Row:
        """Decode of 64 sequences, or a prefill chunk of 512 tokens, each after up to 8192 cached tokens.

        Args:
          target: of `sharding.topologies.topology`. name: of a shape. batch: `decode`, else a way to prefill.

        Raises:
          RuntimeError: the compiled program holds a copy of the pool.
        """
        kind = KINDS[target.partition(":")[0]]
        spec = next(spec for spec in self.shapes if spec.name == name)
        backend = "tpu" if kind.platform == "tpu" else "gpu"
        bucket = self.buckets[batch]
        start = time.process_time()
        compiled, pool = self.compile_layers(spec, bucket, topology(target)[0], backend)
        seconds = time.process_time() - start
        if copies := pool_copies(compiled.as_text() or "", [pool.shape]):
            raise RuntimeError(f"{self.op} {name} on {target} copies its pool: {copies[0].strip()}")
        lens = [(min(spec.max_len, CACHED) - new, new) for new in (DECODE if batch == "decode" else PREFILL)]
        cost, scratch = self.planned(spec, backend, lens, bucket)
        return Row(
            op=self.op,
            spec=name,
            batch=batch,
            target=kind.name,
            compile_seconds=round(seconds, 1),
            scratch_bytes=scratch,
            temp_bytes=temporaries(compiled),
            pool_bytes=prod(pool.shape) * pool.dtype.itemsize,
            cost=cost,
            fewest=self.fewest(spec, lens),
            code=code_digest(self.op, backend, spec),
        )
