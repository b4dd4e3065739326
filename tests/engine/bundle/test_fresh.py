"""Only freshly compiled programs are bundled, whatever this process compiled or loaded before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding.mesh import make_mesh
from trillion_infer.engine.bundle import executables
from trillion_infer.engine.compile_cache import FreshCompiles, enable_compile_cache
from trillion_infer.engine.programs import compile_program


def ordered(x):
    """A program with functions in it: a comparison, a loop's body."""
    steps, total = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.cumsum(c[1])), (0, jnp.sort(x)))
    return jnp.sin(total[:3]) @ x[:3, None], steps


@pytest.fixture
def cached(tmp_path):
    """XLA's cache in a folder of this test."""
    previous = jax.config.jax_compilation_cache_dir
    enable_compile_cache(str(tmp_path))
    yield
    jax.config.update("jax_compilation_cache_dir", previous)


def test_a_program_that_xlas_cache_gave_before_is_compiled_anew(cached):
    mesh = make_mesh(None)
    args = (jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())),)
    value = jnp.asarray([3.0, 1.0, 2.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    expected = [np.asarray(out) for out in compile_program("ordered", ordered, args, ()).run(value)]
    jax.clear_caches()
    compile_program("ordered", ordered, args, ())  # out of XLA's cache now
    with FreshCompiles() as fresh:
        program = compile_program("ordered", ordered, args, ())
    assert fresh.cached == 0
    payload, description = executables.pack(program.run)
    loaded = executables.unpack(payload, description, args, (), mesh)
    assert all(np.array_equal(a, b) for a, b in zip(loaded(value), expected, strict=True))


def test_the_cache_stays_off_until_the_last_engine_has_compiled(cached):
    """Two that compile behind at the same time end in any order."""
    one, other = FreshCompiles(), FreshCompiles()
    one.__enter__()
    other.__enter__()
    one.__exit__()
    assert not jax.config.jax_enable_compilation_cache
    other.__exit__()
    assert jax.config.jax_enable_compilation_cache
