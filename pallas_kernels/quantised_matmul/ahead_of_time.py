"""Compiles the operation for a device that is not here, reading one layer of a stack as models do."""

import jax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.quantised_matmul.api import quantised_matmul
from pallas_kernels.quantised_matmul.arg_specs import ArgSpec

LAYERS = 4
TOKENS = {"decode": 64, "prefill": 512}


def compile_layer(spec: ArgSpec, tokens: int, device: jax.Device, backend: str) -> jax.stages.Compiled:
    """The product of `tokens` rows with a layer of a stack.

    Args:
      device: from `sharding.topologies`. backend: `tpu` or `gpu`.
    """

    def call(x, weight, layer):
        return quantised_matmul(x, weight, layer=layer, backend=backend)

    mapped = jax.shard_map(call, mesh=Mesh([device], ("x",)), in_specs=PartitionSpec(), out_specs=PartitionSpec())
    return jax.jit(mapped).lower(*spec.abstract(LAYERS, tokens)).compile()
