"""Compiles the operation for a device that is not here, reading one layer of stacks of experts as models do."""

import functools

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.grouped_matmul.api import grouped_ffn
from pallas_kernels.grouped_matmul.arg_specs import ArgSpec
from pallas_kernels.quantised_matmul.tpu_layouts import as_kernels_read

LAYERS = 2
TOKENS = {"decode": 64, "prefill": 512}


def compile_layer(spec: ArgSpec, tokens: int, device: jax.Device, backend: str) -> jax.stages.Compiled:
    """The experts of a layer, for `tokens` tokens.

    Args:
      device: from `sharding.topologies`. backend: `tpu` or `gpu`.
    """
    call = functools.partial(grouped_ffn, **spec.options(), backend=backend)
    mesh = Mesh([device], ("expert",))
    mapped = jax.shard_map(lambda args: call(**args), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    here = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), spec.abstract(LAYERS, tokens)
    )
    return jax.jit(mapped).lower(as_kernels_read(args)).compile()
