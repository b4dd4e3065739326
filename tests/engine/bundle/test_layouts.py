"""A program whose arguments lie in an order of axes of their own keeps it in its written form."""

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trillion_infer.engine.bundle import executables

MESH = Mesh(jax.devices()[:1], ("x",))
HERE = NamedSharding(MESH, PartitionSpec())
TURNED = Format(Layout((0, 2, 1)), HERE)
VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture(scope="module")
def abstract():
    """Arguments of a program: one laid out as asked, one as XLA likes."""
    asked = jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=TURNED)
    return asked, jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=HERE)


@pytest.fixture(scope="module")
def loaded(abstract, only_fresh_programs):
    payload, description = executables.pack(jax.jit(lambda a, b: a - 2 * b).lower(*abstract).compile())
    return executables.unpack(payload, description, abstract, (), MESH)


def test_it_runs_on_arguments_laid_out_as_it_was_compiled_for(loaded):
    turned, plain = jax.device_put(VALUES, TURNED), jax.device_put(VALUES + 1, HERE)
    np.testing.assert_array_equal(loaded(turned, plain), VALUES - 2 * (VALUES + 1))


def test_the_manifest_tells_arguments_of_other_layouts_apart(abstract):
    asked, plain = executables.describe_arguments(abstract)
    assert asked == [*plain, [0, 2, 1]]


def test_it_refuses_an_argument_in_another_layout(loaded):
    plain = jax.device_put(VALUES, HERE)
    with pytest.raises(ValueError, match="layout"):
        loaded(plain, plain)
