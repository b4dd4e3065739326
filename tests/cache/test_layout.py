"""Device pools: nothing is held twice where it can be split."""

import math

import jax
import pytest
from jax.sharding import NamedSharding

from sharding.mesh import make_mesh
from tests.conftest import GOLDEN
from trillion_infer.config.engine import EngineConfig
from trillion_infer.core.errors import ConfigError
from trillion_infer.engine.budget import local_page_bytes
from trillion_infer.engine.build import plan_engine
from trillion_infer.models import read_family
from trillion_infer.weights.checkpoint import open_checkpoint

MESHES = ["tensor=8", "expert=8", "sequence=8", "expert=2,tensor=4", "sequence=2,expert=2,tensor=2", "data=2,tensor=4"]


def blueprint_of(name: str, mesh: str, **options):
    config = open_checkpoint(GOLDEN / "tiny" / name).config
    return plan_engine(read_family(config), make_mesh(mesh), EngineConfig(**options))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_latent_pool_is_held_once_over_all_devices(mesh):
    blueprint = blueprint_of("deepseek_v3", mesh)
    (layout,) = blueprint.layouts
    shard = NamedSharding(blueprint.mesh, layout.spec).shard_shape(layout.shape(blueprint.data))
    assert math.prod(shard) * 8 == math.prod(layout.shape(blueprint.data))
    assert local_page_bytes(layout, blueprint.mesh) * 8 // blueprint.data == layout.page_bytes


@pytest.mark.parametrize("mesh", ["expert=4,tensor=2", "sequence=2,expert=2,tensor=2", "sequence=4,tensor=2"])
@pytest.mark.parametrize("name", ["qwen3_moe", "llama4_scout", "gpt_oss"])
def test_two_kv_heads_are_held_once_over_eight_devices(name, mesh):
    blueprint = blueprint_of(name, mesh)
    for layout in blueprint.layouts:
        shard = NamedSharding(blueprint.mesh, layout.spec).shard_shape(layout.shape(1))
        assert layout.heads == 2
        assert math.prod(shard) * 8 == math.prod(layout.shape(1))


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4_scout"])
@pytest.mark.parametrize("mesh", [*MESHES, "data=4,expert=2", "data=2,sequence=2,tensor=2"])
def test_experts_are_held_once_and_small_weights_split_over_the_devices_that_share_tokens(name, mesh):
    """Norms and biases of a few values a layer are all that every device holds."""
    blueprint = blueprint_of(name, mesh)
    sizes, specs = blueprint.mesh.shape, blueprint.specs
    for path, weight in blueprint.abstract_params.items():
        for leaf in jax.tree.leaves(weight):
            parts = math.prod(leaf.shape) // math.prod(leaf.sharding.shard_shape(leaf.shape))
            if "experts" in specs[path].axes:
                assert parts == 8, path
            elif leaf.ndim > 2 or "table" in path:
                assert parts == sizes["expert"] * sizes["tensor"], path


def test_a_page_that_the_devices_cannot_share_is_refused_with_what_would_do():
    with pytest.raises(ConfigError, match=r"page_size is 8; on this mesh 6 devices .* Leave page_size out"):
        blueprint_of("deepseek_v3", "sequence=2,tensor=3", page_size=8)


@pytest.mark.parametrize(
    ("name", "mesh", "kv_dtype", "part", "default"),
    [
        ("qwen3_moe", "data=2", "int8", 128, 128),
        ("deepseek_v3", "expert=8", "float32", 8, 128),
        ("deepseek_v3", "expert=2,tensor=2", "fp8", 128, 512),
    ],
)
def test_pages_that_tpu_kernels_cannot_read_are_refused_and_are_not_the_default(name, mesh, kv_dtype, part, default):
    options = {"kv_dtype": kv_dtype, "attention": "tpu", "interpret": True}
    with pytest.raises(ConfigError, match=rf"page_size is 8, of .* a multiple of {part} positions a device"):
        blueprint_of(name, mesh, page_size=8, **options)
    assert blueprint_of(name, mesh, **options).layouts[0].page_size == default
    assert blueprint_of(name, mesh, page_size=8, kv_dtype=kv_dtype).layouts[0].page_size == 8


def test_pages_grow_with_the_devices_that_share_them():
    assert blueprint_of("deepseek_v3", "sequence=2,tensor=3").layouts[0].page_size == 36
