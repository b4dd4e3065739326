"""Rows of the kernel report: an operation's real shapes, compiled for devices that are not here."""

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

BATCHES = ("decode", "prefill")
CACHED = 8192
DECODE, PREFILL = [1] * 64, [512]
"""New tokens of each sequence of a batch of attention."""
Lens = list[tuple[int, int]]
"""Of each sequence the tokens in the pool before the call, and those that the call computes."""
Pool = jax.ShapeDtypeStruct


def backend_of(target: str) -> str:
    """`tpu` or `gpu`: whose kernels a target of `sharding.topologies.topology` runs."""
    return "tpu" if KINDS[target.partition(":")[0]].platform == "tpu" else "gpu"


@dataclass(frozen=True)
class KernelReport:
    """Reports of one operation. build: (shape, batch, device, backend) -> the compiled program and the pool that it
    updates in place, if any. costs: (shape, batch, backend) -> what a call costs, and the on-chip memory it plans
    with, in bytes. fewest: (shape, batch) -> what no kernel can undercut. further: (shape, backend) -> batches beside
    `BATCHES`."""

    op: str
    shapes: Sequence[Any]
    build: Callable[[Any, str, jax.Device, str], tuple[jax.stages.Compiled, Pool | None]]
    costs: Callable[[Any, str, str], tuple[Cost, int]]
    fewest: Callable[[Any, str], Cost]
    further: Callable[[Any, str], tuple[str, ...]] = lambda *_: ()

    def batches(self, spec: Any, backend: str) -> tuple[str, ...]:
        """Names of the batches that there are rows of."""
        return (*BATCHES, *self.further(spec, backend))

    def row(self, target: str, name: str, batch: str) -> Row:
        """Compiles one kernel.

        Args:
          target: of `sharding.topologies.topology`. name: of a shape. batch: of `batches`.

        Raises:
          RuntimeError: the compiled program holds a copy of the pool.
        """
        spec = next(spec for spec in self.shapes if spec.name == name)
        backend = backend_of(target)
        start = time.process_time()
        compiled, pool = self.build(spec, batch, topology(target)[0], backend)
        seconds = time.process_time() - start
        if pool is not None and (copies := pool_copies(compiled.as_text() or "", [pool.shape])):
            raise RuntimeError(f"{self.op} {name} on {target} copies its pool: {copies[0].strip()}")
        cost, scratch = self.costs(spec, batch, backend)
        return Row(
            op=self.op,
            spec=name,
            batch=batch,
            target=target.partition(":")[0],
            compile_seconds=round(seconds, 1),
            scratch_bytes=scratch,
            temp_bytes=temporaries(compiled),
            pool_bytes=0 if pool is None else prod(pool.shape) * pool.dtype.itemsize,
            cost=cost,
            fewest=self.fewest(spec, batch),
            code=code_digest(self.op, backend, spec),
        )


def product_report(
    op: str,
    shapes: Sequence[Any],
    tokens: Mapping[str, int],
    compile_layer: Callable[[Any, int, jax.Device, str], jax.stages.Compiled],
    costs: Mapping[str, Callable[[Any, int], tuple[Cost, int]]],
    fewest: Callable[[Any, int], Cost],
) -> KernelReport:
    """Of products of activations with weights. tokens: rows of activations by batch. costs: by backend."""
    return KernelReport(
        op,
        shapes,
        lambda spec, batch, device, backend: (compile_layer(spec, tokens[batch], device, backend), None),
        lambda spec, batch, backend: costs[backend](spec, tokens[batch]),
        lambda spec, batch: fewest(spec, tokens[batch]),
    )


def attention_report(
    op: str,
    shapes: Sequence[Any],
    buckets: Mapping[str, Any],
    compile_layers: Callable[[Any, Any, jax.Device, str], tuple[jax.stages.Compiled, Pool]],
    planned: Callable[[Any, str, Lens, Any], tuple[Cost, int]],
    fewest: Callable[[Any, Lens], Cost],
    further: Callable[[Any, str], tuple[str, ...]] = lambda *_: (),
) -> KernelReport:
    """Of a scan over the layers of a pool: decode of 64 sequences, and a prefill chunk of 512 tokens, each after up to
    8192 cached tokens. buckets: what `compile_layers` takes, by batch. planned: (shape, backend, lens, bucket)."""

    def lens(spec: Any, batch: str) -> Lens:
        return [(min(spec.max_len, CACHED) - new, new) for new in (DECODE if batch == "decode" else PREFILL)]

    return KernelReport(
        op,
        shapes,
        lambda spec, batch, device, backend: compile_layers(spec, buckets[batch], device, backend),
        lambda spec, batch, backend: planned(spec, backend, lens(spec, batch), buckets[batch]),
        lambda spec, batch: fewest(spec, lens(spec, batch)),
        further,
    )
