"""Leaves of quantised weights that a TPU would lay out in another order than its kernels read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.quantised_matmul import QuantisedTensor, abstract, quantise
from pallas_kernels.quantised_matmul.tpu_layouts import as_kernels_read, laid_out_otherwise, lay_out

# (dtype, whether XLA's own choice for a program's argument is another order), as v5e, v5p, v6e and tpu7x compile
CHOICES = {
    (24, 32, 2, 2880, 90): ("uint8", True),
    (24, 32, 2880, 90): ("uint8", True),
    (36, 128, 2880, 90): ("uint8", True),
    (24, 32, 2, 2880, 45): ("uint8", True),
    (24, 32, 2, 2880, 96): ("uint8", False),
    (24, 32, 2, 2880, 128): ("uint8", False),
    (24, 32, 2, 2880, 1440): ("uint8", False),
    (61, 48, 2, 2048, 224): ("bfloat16", False),
    (61, 48, 7168, 64): ("bfloat16", False),
}


@pytest.mark.parametrize("shape", CHOICES)
def test_it_knows_which_leaves_xla_would_lay_out_in_another_order(shape):
    dtype, otherwise = CHOICES[shape]
    assert laid_out_otherwise(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))) == otherwise


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_only_scales_that_fill_no_tile_are_asked_for_in_the_order_of_the_kernels(target):
    from sharding.topologies import topology

    mesh = Mesh(topology(target)[:1], ("expert",))

    def placed(weight):
        here = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), weight)

    asked = as_kernels_read(
        {
            "gpt-oss": placed(abstract((24, 32, 2, 2880, 2880), "mxfp4")),
            "kimi": placed(abstract((61, 48, 2, 2048, 7168), "int4", scale_dtype=jnp.bfloat16)),
        }
    )
    orders = {
        name: [each.format.layout and each.format.layout.major_to_minor for each in jax.tree.leaves(weight)]
        for name, weight in asked.items()
    }
    assert orders == {"gpt-oss": [None, (0, 1, 2, 4, 3)], "kimi": [None, None]}


def test_loaded_weights_are_moved_to_the_layout_asked_for_and_keep_their_values():
    here = NamedSharding(Mesh(jax.devices()[:1], ("expert",)), PartitionSpec())
    weight = jax.device_put(quantise(jax.random.normal(jax.random.key(0), (2, 3, 8, 64)), "mxfp4"), here)
    turned = jax.ShapeDtypeStruct(weight.scale.shape, jnp.uint8, sharding=Format(Layout((0, 1, 3, 2)), here))
    plain = jax.ShapeDtypeStruct(weight.packed.shape, jnp.uint8, sharding=here)
    params = {"experts": weight, "norm": jnp.ones(4)}

    moved = lay_out(dict(params), {"experts": QuantisedTensor(plain, turned, "mxfp4", 32), "norm": params["norm"]})

    assert moved["norm"] is params["norm"]
    assert moved["experts"].packed is weight.packed
    assert moved["experts"].scale.format.layout.major_to_minor == (0, 1, 3, 2)
    np.testing.assert_array_equal(moved["experts"].scale, weight.scale)
