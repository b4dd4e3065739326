"""Pages of real pools through real tiers: they come back as they were, on whatever mesh."""

import jax
import numpy as np
import pytest

from tests.cache.test_layout import blueprint_of
from trillion_infer.cache.tiers.host import HostTier
from trillion_infer.cache.tiers.stack import TierStack
from trillion_infer.engine.page_copies import PageCopier
from trillion_infer.engine.pool_sides import pool_side
from trillion_infer.transfer.pages import PAGES_PER_CALL

PAGES = 24
MODEL = b"m" * 32


def copier_and_pools(name: str, mesh: str, seed: int):
    blueprint = blueprint_of(name, mesh, page_size=8, dtype="float32", max_model_len=64, max_running=2)
    copier = PageCopier(pool_side(blueprint))
    shapes = blueprint.state_shape((PAGES,) * len(blueprint.layouts)).abstract(blueprint.mesh).pools
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    draw = [jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, shapes, strict=True)]
    return copier, tuple(jax.device_put(d, s.sharding) for d, s in zip(draw, shapes, strict=True))


def bytes_of(copier, pools, group: int, pages: list[int]) -> list[bytes]:
    return copier.to_bytes(copier.read(pools, group, pages), group, len(pages))


@pytest.mark.parametrize("by_parts", [False, True], ids=["whole", "by parts"])
@pytest.mark.parametrize("target_mesh", ["tensor=1", "tensor=2", "data=2,tensor=2"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3_text", "deepseek_v3"])
def test_pages_come_back_as_they_were_on_another_mesh(name, target_mesh, by_parts):
    source, pools = copier_and_pools(name, "tensor=1", seed=0)
    target, others = copier_and_pools(name, target_mesh, seed=1)
    stack = TierStack([HostTier(MODEL, 10**8)])
    for group in range(len(pools)):
        pages, places = [3, 5, 17, 4], [9, 0, 23, 8]
        units = source.units[group]
        keys = [(unit, bytes([page]) * 32) for page in pages for unit in units]
        data = source.read(pools, group, pages)
        stack.submit(keys, lambda data=data, group=group: source.to_bytes(data, group, 4), 1)
        found = [content for content, _ in stack.read(keys, stack.locate(keys))]
        untouched = [place for place in range(12, 12 + 8) if place not in places]
        before = bytes_of(target, others, group, untouched)
        if by_parts:
            for at, unit in enumerate(units):
                others = target.write_part(others, unit, places, found[at :: len(units)])
        else:
            blocks = [found[at : at + len(units)] for at in range(0, len(found), len(units))]
            others = target.write(others, group, places, blocks)
        assert bytes_of(target, others, group, places) == bytes_of(source, pools, group, pages)
        assert bytes_of(target, others, group, untouched) == before
        sizes = [source.unit_bytes(unit) for unit in units]
        assert [len(content) for content in found[: len(units)]] == sizes == [*map(target.unit_bytes, units)]
    stack.close()


def test_a_read_sees_what_stands_before_later_writes():
    """The order of the device's steps: a page is copied out before somebody else's block is written to it."""
    copier, pools = copier_and_pools("smollm2", "tensor=1", seed=0)
    pages = list(range(PAGES_PER_CALL))
    before = bytes_of(copier, pools, 0, pages)
    data = copier.read(pools, 0, pages)
    zeros = [bytes(copier.unit_bytes(unit)) for unit in copier.units[0]]
    pools = copier.write(pools, 0, pages, [zeros] * len(pages))
    assert copier.to_bytes(data, 0, len(pages)) == before
    assert not np.asarray(copier.read(pools, 0, pages)[0]).any()
