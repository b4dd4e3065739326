"""Pages out of a pool and into it, bit for bit, whatever the dtype; ids out of range touch nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu_native.pages import read_pages, write_pages

IDS = np.array([4, 0, 2, 9, -1], np.int32)  # of 5 pages


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 8), ("bfloat16", 8), ("int8", 16), ("int8", 3)])
def test_pages_come_out_and_go_in_as_they_are(dtype, dim):
    """Of 3 is a page that no aligned copy takes."""
    pool = jax.random.randint(jax.random.key(0), (3, 5, 4, dim), -99, 99).astype(dtype)
    read = np.asarray(jax.jit(read_pages)(pool, IDS).astype(jnp.float32))
    whole = np.array(pool.astype(jnp.float32))
    np.testing.assert_array_equal(read[:, :3], whole[:, IDS[:3]])
    data = jax.random.randint(jax.random.key(1), (3, 5, 4, dim), -99, 99).astype(dtype)
    whole[:, IDS[:3]] = np.asarray(data.astype(jnp.float32))[:, :3]
    place = pool.unsafe_buffer_pointer()
    written = jax.jit(write_pages, donate_argnums=0)(pool, IDS, data)
    np.testing.assert_array_equal(np.asarray(written.astype(jnp.float32)), whole)
    assert written.unsafe_buffer_pointer() == place


@pytest.mark.parametrize("first", [0, 1, 2])
def test_some_layers_go_in_and_the_others_stay(first):
    pool = jax.random.normal(jax.random.key(0), (4, 5, 4, 8))
    data = jax.random.normal(jax.random.key(1), (2, 5, 4, 8))
    whole, place = np.array(pool), pool.unsafe_buffer_pointer()
    whole[first : first + 2, IDS[:3]] = np.asarray(data)[:, :3]
    written = jax.jit(write_pages, donate_argnums=0)(pool, IDS, data, np.int32(first))
    np.testing.assert_array_equal(np.asarray(written), whole)
    assert written.unsafe_buffer_pointer() == place


def test_a_pool_that_is_kept_stays_as_it_was():
    pool, data = jnp.zeros((2, 4, 16)), jnp.ones((2, 1, 16))
    written = jax.jit(write_pages)(pool, np.array([1], np.int32), data)
    assert float(pool.sum()) == 0
    assert float(written.sum()) == 32


def test_shapes_that_do_not_fit_are_refused():
    for layers, first in ((4, 0), (1, 2), (1, -1)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="shapes must be pool"):
            jax.block_until_ready(
                jax.jit(write_pages)(jnp.zeros((2, 4, 16)), np.array([1], np.int32), jnp.ones((layers, 1, 16)), first)
            )
