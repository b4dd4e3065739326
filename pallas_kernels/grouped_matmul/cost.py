"""Bytes and operations of a layer's experts: those of the kernels' loops, and the fewest that the result needs.

Choices fall on the experts one after another, so that as many as can be have tokens.
"""

from pallas_kernels.common.report import Cost
from pallas_kernels.grouped_matmul import gpu, tpu
from pallas_kernels.grouped_matmul.arg_specs import ArgSpec
from pallas_kernels.grouped_matmul.experts import LEAST_TILE
from pallas_kernels.grouped_matmul.routing import block_rows
from pallas_kernels.quantised_matmul.cost import stored_bytes
from pallas_kernels.quantised_matmul.gpu import OUT_TILE, STAGES
from pallas_kernels.quantised_matmul.tpu import row_tile


def _matrices(spec: ArgSpec) -> list[tuple[int, int, int, int]]:
    """(bytes an expert, halves, output features, input features) of gate with up, and of down."""
    up, down = spec.weight(1, 1, 2, spec.ffn, spec.model), spec.weight(1, 1, spec.model, spec.ffn)
    return [(stored_bytes(up), 2, spec.ffn, spec.model), (stored_bytes(down), 1, spec.model, spec.ffn)]


def fewest(spec: ArgSpec, tokens: int) -> Cost:
    """Each expert that has tokens read once, activations in bfloat16 read and written once."""
    rows = tokens * spec.choices
    used = min(spec.experts, rows)
    weight = sum(size for size, *_ in _matrices(spec))
    return Cost(used * weight + 2 * tokens * spec.model * 2, 2 * rows * 3 * spec.model * spec.ffn)


def tpu_cost(spec: ArgSpec, tokens: int) -> tuple[Cost, int]:
    """Of the kernels, and the vector memory of the larger: an expert is read once, rows once a tile of features."""
    rows = tokens * spec.choices
    used, tile = min(spec.experts, rows), block_rows(rows, spec.experts, LEAST_TILE, tpu.MOST_TILE)
    visits = used + -(-rows // tile) - 1
    moved = flops = scratch = 0
    for size, halves, n_out, n_in in _matrices(spec):
        itemsize = 2 if spec.format is None else 1
        features = row_tile(n_out, n_in, itemsize, spec.format is not None)
        tiles = -(-n_out // features)
        moved += used * size + tiles * visits * tile * n_in * 2 + rows * n_out * 2
        flops += 2 * visits * tile * n_in * tiles * features * halves
        block = size // tiles + tile * (n_in + features) * 2
        scratch = max(scratch, 2 * block + halves * features * n_in * 4)
    return Cost(moved + 2 * rows * spec.model * 2, flops), scratch


def gpu_cost(spec: ArgSpec, tokens: int) -> tuple[Cost, int]:
    """Of the kernels, and their shared memory: an expert is read once a block of its rows."""
    rows = tokens * spec.choices
    used, tile = min(spec.experts, rows), block_rows(rows, spec.experts, LEAST_TILE, gpu.MOST_TILE)
    blocks = used * -(-rows // (used * tile))
    moved = flops = 0
    for size, halves, n_out, n_in in _matrices(spec):
        across = -(-n_out // OUT_TILE)
        moved += blocks * size + halves * across * rows * n_in * 2 + rows * n_out * 2
        flops += 2 * blocks * tile * n_in * across * OUT_TILE * halves
    return Cost(moved + 2 * rows * spec.model * 2, flops), STAGES * (tile + OUT_TILE) * 64 * 2
