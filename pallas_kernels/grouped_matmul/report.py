"""Rows of the kernel report: real shapes, compiled for a target that is not here."""

import time
from collections.abc import Iterator

from pallas_kernels.common.report import Row
from pallas_kernels.grouped_matmul.ahead_of_time import TOKENS, compile_layer
from pallas_kernels.grouped_matmul.arg_specs import SPECS
from pallas_kernels.grouped_matmul.cost import fewest, gpu_cost, tpu_cost
from sharding.topologies import KINDS, topology


def specs() -> list[str]:
    """Names of the shapes."""
    return [spec.name for spec in SPECS]


def rows(target: str, name: str) -> Iterator[Row]:
    """A row for 64 tokens and one for 512. target: of `sharding.topologies.topology`. name: of a shape."""
    kind = KINDS[target.partition(":")[0]]
    spec = next(spec for spec in SPECS if spec.name == name)
    backend = "tpu" if kind.platform == "tpu" else "gpu"
    for batch, tokens in TOKENS.items():
        start = time.perf_counter()
        compiled = compile_layer(spec, tokens, topology(target)[0], backend)
        seconds = time.perf_counter() - start
        cost, scratch = (tpu_cost if backend == "tpu" else gpu_cost)(spec, tokens)
        yield Row(
            op="grouped_matmul",
            spec=name,
            batch=batch,
            target=kind.name,
            compile_seconds=round(seconds, 1),
            scratch_bytes=scratch,
            temp_bytes=getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0),
            pool_bytes=0,
            cost=cost,
            fewest=fewest(spec, tokens),
        )
