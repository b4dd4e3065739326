"""Rows of the kernel report for products of activations with weights: no pool, and rows by tokens alone."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.common.report import Cost, Row, temporaries
from pallas_kernels.common.sources import code_digest
from sharding.topologies import KINDS, topology

Costs = Callable[[Any, int], tuple[Cost, int]]
"""(shape, tokens) -> what a call costs, and the on-chip memory it plans with, in bytes."""


@dataclass(frozen=True)
class ProductReport:
    """Reports of one operation. tokens: rows of activations by name of a batch. compile_layer: (shape, tokens, device,
    backend) -> the compiled call. costs: by backend. fewest: (shape, tokens) -> what no kernel can undercut."""

    op: str
    shapes: Sequence[Any]
    tokens: Mapping[str, int]
    compile_layer: Callable[[Any, int, jax.Device, str], jax.stages.Compiled]
    costs: Mapping[str, Costs]
    fewest: Callable[[Any, int], Cost]

    def row(self, target: str, name: str, batch: str) -> Row:
        """target: of `sharding.topologies.topology`. name: of a shape. batch: of `tokens`."""
        kind = KINDS[target.partition(":")[0]]
        spec = next(spec for spec in self.shapes if spec.name == name)
        backend = "tpu" if kind.platform == "tpu" else "gpu"
        tokens = self.tokens[batch]
        start = time.process_time()
        compiled = self.compile_layer(spec, tokens, topology(target)[0], backend)
        seconds = time.process_time() - start
        cost, scratch = self.costs[backend](spec, tokens)
        return Row(
            op=self.op,
            spec=name,
            batch=batch,
            target=kind.name,
            compile_seconds=round(seconds, 1),
            scratch_bytes=scratch,
            temp_bytes=temporaries(compiled),
            pool_bytes=0,
            cost=cost,
            fewest=self.fewest(spec, tokens),
            code=code_digest(self.op, backend, spec),
        )
