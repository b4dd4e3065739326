"""Pages travel unchanged by every transport, and a ticket that is not there is an answer, not a wait."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.mesh import AXES, make_mesh
from sharding.rules import kv_plan
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.cache.parts import LayerParts
from trillion_infer.config.model import CacheKey
from trillion_infer.core.errors import ConfigError
from trillion_infer.engine.handoff.page_programs import checksum
from trillion_infer.engine.handoff.staging import PageStager
from trillion_infer.transfer.convert import VectorFormat
from trillion_infer.transfer.pages import PoolSide
from trillion_infer.transfer.transports import make_transport
from trillion_infer.transfer.transports.base import TransferError
from trillion_infer.transfer.transports.memory import MemoryTransport

KEY = b"a key of sixteen bytes"
HEADS, DIM, LAYERS, PAGE, PAGES = 3, 8, 2, 4, 32


def stager(tensor: int, dtype: str = "float32") -> tuple[PageStager, PoolLayout]:
    plan, head_axis, slot_axis = kv_plan(9, HEADS, {**dict.fromkeys(AXES, 1), "tensor": tensor})
    key = CacheKey("attention", HEADS, DIM, None, None)
    layout = PoolLayout(key, LAYERS, PAGE, plan.physical_kv_heads, DIM, dtype, 1, head_axis, slot_axis)
    mesh = make_mesh({"tensor": tensor})
    parts = LayerParts((0, 1), ((0, LAYERS),))
    side = PoolSide(mesh, ("full",), (layout,), (plan,), (VectorFormat(dtype, (DIM,)),), (0,), parts)
    return PageStager(side, [layout.abstract(PAGES, mesh)]), layout


def filled(layout: PoolLayout, tensor: int, value: float) -> jax.Array:
    abstract = layout.abstract(PAGES, make_mesh({"tensor": tensor}))
    return jax.tree.map(lambda leaf: jax.device_put(jnp.full(leaf.shape, value, leaf.dtype), leaf.sharding), abstract)


def wait(fetch, seconds: float = 20.0):
    end = time.monotonic() + seconds
    while (arrays := fetch.poll()) is None:
        assert time.monotonic() < end, "the fetch neither came nor failed"
        time.sleep(0.002)
    return arrays


@pytest.fixture
def pair():
    """pair(name) -> two transports that reach each other."""
    made = []

    def make(name: str):
        space: dict = {}
        for address in ("one", "two"):
            memory = name == "memory"
            made.append(MemoryTransport(space, address) if memory else make_transport(name, KEY, "127.0.0.1"))
        return made[-2:]

    yield make
    for transport in made:
        transport.close()


@pytest.mark.parametrize("name", ["memory", "jax", "socket"])
@pytest.mark.parametrize(("source", "target"), [(1, 1), (2, 1), (1, 4)])
def test_pages_arrive_as_they_were_whatever_the_tensor_sizes_p12_p18(pair, name, source, target):
    one, two = pair(name)
    (out, ours), (into, theirs) = stager(source), stager(target)
    data = jax.random.normal(jax.random.key(0), (LAYERS, 16, PAGE, HEADS, 2, DIM))
    pool = out.fill(filled(ours, source, 7.0), 0, list(range(5, 21)), data, "float32")
    staged = out.stage(pool, 0, list(range(5, 21)))
    one.expose(9, [staged.data])
    (arrived,) = wait(two.fetch(one.address, 9, [into.arrival(out.specs()[0])], 10.0))
    assert into.digest(arrived) == staged.digest_bytes()
    there = into.fill(filled(theirs, target, -1.0), 0, list(range(2, 18)), arrived, "float32")
    back = into.stage(there, 0, list(range(2, 18)))
    np.testing.assert_array_equal(np.asarray(back.data), np.asarray(data))


@pytest.mark.parametrize("name", ["memory", "jax", "socket"])
def test_a_withdrawn_ticket_fails_at_once_p01(pair, name):
    one, two = pair(name)
    out, ours = stager(1)
    one.expose(3, [out.stage(filled(ours, 1, 1.0), 0, [0]).data])
    one.withdraw(3)
    with pytest.raises(TransferError, match="the lease has ended"):
        wait(two.fetch(one.address, 3, [out.arrival(out.specs()[0])], 10.0))


@pytest.mark.parametrize("name", ["jax", "socket"])
def test_a_peer_that_is_gone_is_an_error(pair, name):
    one, two = pair(name)
    out, _ = stager(1)
    one.close()
    with pytest.raises(TransferError):
        wait(two.fetch(one.address, 1, [out.arrival(out.specs()[0])], 10.0))


def test_a_digest_covers_the_pages_and_not_the_padding():
    out, layout = stager(1)
    pool = filled(layout, 1, 1.0)
    few = out.stage(pool, 0, [4, 5]).digest_bytes()
    changed = pool.at[:, 0].set(9.0)
    assert out.stage(changed, 0, [4, 5]).digest_bytes() == few
    assert out.stage(changed, 0, [4, 0]).digest_bytes() != few


def test_a_checksum_sees_order_and_single_bits():
    data = jnp.arange(64, dtype=jnp.float32)
    plain = np.asarray(checksum(data)).tolist()
    assert np.asarray(checksum(data[::-1])).tolist() != plain
    assert np.asarray(checksum(data.at[7].set(jnp.nextafter(data[7], jnp.inf)))).tolist() != plain


@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("bfloat16", "int8"), ("int8", "float32")])
def test_pages_of_another_dtype_are_converted_where_they_arrive(source, target):
    (out, ours), (into, theirs) = stager(1, source), stager(1, target)
    data = jax.random.normal(jax.random.key(1), (LAYERS, 16, PAGE, HEADS, 2, DIM))
    staged = out.stage(out.fill(filled(ours, 1, 0.0), 0, list(range(16)), data, "float32"), 0, list(range(16)))
    there = into.fill(filled(theirs, 1, 0.0), 0, list(range(16)), staged.data, source)
    back, _ = stager(1)
    plain = back.fill(filled(stager(1)[1], 1, 0.0), 0, [*range(16)], into.stage(there, 0, [*range(16)]).data, target)
    found = np.asarray(back.stage(plain, 0, [*range(16)]).data)
    np.testing.assert_allclose(found, data, atol=0.03 if "int8" in (source, target) else 0.01)
    assert np.abs(found - np.asarray(data)).max() > 0


def test_an_unknown_transport_is_refused():
    with pytest.raises(ConfigError, match="auto, jax, socket"):
        make_transport("pigeon", KEY, "127.0.0.1")
