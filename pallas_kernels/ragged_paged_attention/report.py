"""Rows of the kernel report: real shapes, compiled for a target that is not here."""

from dataclasses import replace

from pallas_kernels.common.kernel_report import attention_report
from pallas_kernels.ragged_paged_attention.ahead_of_time import DECODE, MOSAIC, PREFILL, Batch, compile_layers
from pallas_kernels.ragged_paged_attention.arg_specs import SPECS, ArgSpec
from pallas_kernels.ragged_paged_attention.bench import shape_of
from pallas_kernels.ragged_paged_attention.blocks import gpu_blocks, tpu_blocks
from pallas_kernels.ragged_paged_attention.cost import fewest, gpu_cost, tpu_cost


def _planned(spec: ArgSpec, backend: str, lens: list[tuple[int, int]], batch: Batch):
    shape = shape_of(spec, backend)
    if backend == "tpu":
        blocks = tpu_blocks(shape, spec.max_len // spec.page_size, batch.max_q_len or batch.tokens)
        return tpu_cost(spec, lens, blocks), blocks.vector_bytes(shape)
    blocks = batch.blocks or gpu_blocks(shape)
    return gpu_cost(spec, lens, blocks), blocks.shared_bytes(shape)


def _by_mosaic(spec: ArgSpec, backend: str) -> tuple[str, ...]:
    """On GPU there are rows of prefill by Mosaic GPU, too, of shapes that it takes."""
    taken = backend == "gpu" and spec.shards == 1 and MOSAIC.refusal(shape_of(spec, "gpu")) is None
    return (BY_MOSAIC,) if taken else ()


BY_MOSAIC = "prefill, Mosaic GPU"
_BATCHES = {"decode": DECODE, "prefill": PREFILL, BY_MOSAIC: replace(PREFILL, blocks=MOSAIC)}
REPORT = attention_report("ragged_paged_attention", SPECS, _BATCHES, compile_layers, _planned, fewest, _by_mosaic)
