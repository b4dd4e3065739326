"""Rows of the kernel report: real shapes, compiled for a target that is not here."""

from pallas_kernels.common.kernel_report import attention_report
from pallas_kernels.latent_paged_attention.ahead_of_time import DECODE, PREFILL, Batch, compile_layers
from pallas_kernels.latent_paged_attention.arg_specs import SPECS, ArgSpec
from pallas_kernels.latent_paged_attention.blocks import gpu_blocks, tpu_blocks
from pallas_kernels.latent_paged_attention.cost import fewest, gpu_cost, shape_of, tpu_cost


def _planned(spec: ArgSpec, backend: str, lens: list[tuple[int, int]], _: Batch):
    shape = shape_of(spec, backend)
    if backend == "tpu":
        blocks = tpu_blocks(shape, spec.max_len // spec.page_size)
        return tpu_cost(spec, lens, blocks), blocks.vector_bytes(shape)
    blocks = gpu_blocks(shape)
    return gpu_cost(spec, lens, blocks), blocks.shared_bytes(shape)


_BATCHES = {"decode": DECODE, "prefill": PREFILL}
REPORT = attention_report("latent_paged_attention", SPECS, _BATCHES, compile_layers, _planned, fewest)
