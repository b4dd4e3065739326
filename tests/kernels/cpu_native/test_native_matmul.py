import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cpu_native import native
from pallas_kernels.cpu_native.matmul import matmul

pytestmark = pytest.mark.skipif(not native().isas, reason=native().reason)

FLOATS = st.sampled_from([jnp.float32, jnp.bfloat16])
ISAS = st.sampled_from(native().isas or ("auto",))


def normal(seed: int, shape: tuple[int, ...], dtype) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def exact(x: jax.Array, w: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 40) | st.sampled_from([64, 127, 129, 300]),
    columns=st.integers(1, 130),
    depth=st.integers(1, 100) | st.sampled_from([576, 768, 769, 1536, 2000]),
    layers=st.integers(1, 3),
    x_dtype=FLOATS,
    w_dtype=FLOATS,
    isa=ISAS,
    data=st.data(),
)
def test_is_the_product_in_float32(rows, columns, depth, layers, x_dtype, w_dtype, isa, data):
    x, w = normal(0, (rows, depth), x_dtype), normal(1, (layers, columns, depth), w_dtype)
    layer = data.draw(st.integers(0, layers - 1))
    got = matmul(x, w, layer, out_dtype=jnp.float32, isa=isa)
    np.testing.assert_allclose(got, exact(x, w[layer]), rtol=2e-5, atol=2e-6 * depth)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 150),
    depth=st.sampled_from([64, 96, 100, 768, 1000, 1536]),
    columns=st.sampled_from([1, 5, 6, 50]),
    w_dtype=FLOATS,
    isa=ISAS,
    data=st.data(),
)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(rows, depth, columns, w_dtype, isa, data):
    x, w = normal(2, (rows, depth), jnp.float32), normal(3, (columns, depth), w_dtype)
    whole = np.asarray(matmul(x, w, isa=isa))
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    np.testing.assert_array_equal(whole[start:stop], np.asarray(matmul(x[start:stop], w, isa=isa)))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_bfloat16_output_is_the_rounded_float32_output(rows: int):
    x, w = normal(4, (rows, 96), jnp.bfloat16), normal(5, (50, 96), jnp.bfloat16)
    rounded = matmul(x, w, out_dtype=jnp.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(matmul(x, w)), np.asarray(rounded))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_not_a_number_and_infinity_stay_in_their_row(rows: int):
    x, w = normal(6, (rows, 64), jnp.float32), normal(7, (12, 64), jnp.bfloat16)
    bad = matmul(x.at[0, 5].set(jnp.nan), w, out_dtype=jnp.bfloat16)
    assert np.isnan(np.asarray(bad[0], np.float32)).all()
    np.testing.assert_array_equal(np.asarray(bad[1:]), np.asarray(matmul(x, w, out_dtype=jnp.bfloat16)[1:]))


def test_a_scan_over_layers_copies_no_weights():
    x, w = normal(8, (2, 64), jnp.bfloat16), normal(9, (5, 64, 64), jnp.bfloat16)

    def through(x, w):
        return jax.lax.scan(lambda x, layer: (matmul(x, w, layer), None), x, jnp.arange(5))[0]

    compiled = jax.jit(through).lower(x, w).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < w[0].nbytes
    expected = x
    for layer in range(5):
        expected = matmul(expected, w, layer)
    np.testing.assert_array_equal(np.asarray(through(x, w)), np.asarray(expected))


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_outside_the_stack_is_an_error(layer: int):
    w = normal(10, (3, 8, 8), jnp.float32)
    with pytest.raises(Exception, match=rf"layer {layer} is outside \[0, 3\)"):
        jax.block_until_ready(matmul(w[0], w, layer))


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    x = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match=r"\(2, 8\) and \(3, 4, 9\)"):
        matmul(x, jnp.zeros((3, 4, 9)))
    with pytest.raises(ValueError, match="float16"):
        matmul(x, jnp.zeros((4, 8), jnp.float16))


def test_an_instruction_set_that_is_not_here_is_refused():
    with pytest.raises(NotImplementedError, match="isa='amx' cannot run here"):
        matmul(jnp.zeros((2, 8)), jnp.zeros((4, 8)), isa="amx")


def test_eight_devices_at_once(run_python):
    out = run_python("""
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import PartitionSpec as P
        from pallas_kernels.cpu_native.matmul import matmul
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
        x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 256), np.float32))
        w = jnp.asarray(np.random.default_rng(1).standard_normal((2, 256, 256), np.float32))
        def steps(x, w):
            def step(x, layer):
                return jax.lax.all_gather(matmul(x, w, layer), "tensor", axis=1, tiled=True) / 16, None
            return jax.lax.scan(step, x, jnp.arange(60) % 2)[0]
        sharded = jax.shard_map(steps, mesh=mesh, in_specs=(P(), P(None, "tensor")), out_specs=P(), check_vma=False)
        one = x
        for layer in range(60):
            one = matmul(one, w, layer % 2) / 16
        np.testing.assert_array_equal(np.asarray(jax.jit(sharded)(x, w)), np.asarray(one))
        print("same")
    """)
    assert out == "same\n"
