"""Layouts that TPU kernels read without a copy."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.quantised_matmul import major_to_minor

# what XLA chooses for program arguments of these shapes on v5e and tpu7x
CHOSEN = {
    (2, 48, 2, 2048, 224): ("bfloat16", (0, 1, 2, 4, 3)),
    (2, 48, 7168, 64): ("bfloat16", (0, 1, 3, 2)),
    (2, 32, 2, 2880, 1440): ("uint8", (0, 1, 2, 4, 3)),
    (2, 48, 2, 2048, 896): ("int32", (0, 1, 2, 3, 4)),
    (2, 48, 7168, 256): ("int32", (0, 1, 2, 3)),
    (2, 8, 2880, 2880): ("bfloat16", (0, 1, 2, 3)),
}


@pytest.mark.parametrize("shape", CHOSEN)
def test_the_layout_is_the_one_that_xla_chooses(shape):
    dtype, order = CHOSEN[shape]
    assert major_to_minor(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))) == order
