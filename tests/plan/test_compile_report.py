"""Deployments are checked without a compiler; compiles for devices that are not here say what memory holds."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from pallas_kernels.common.pool_copies import pool_copies
from trillion_infer.config.deployment import Deployment, deployment_names, find_deployment
from trillion_infer.core.errors import ConfigError, OutOfMemoryError
from trillion_infer.engine.buckets import Bucket
from trillion_infer.engine.build import Blueprint
from trillion_infer.models import read_family
from trillion_infer.plan.compile_report import CompileReport, compile_deployment
from trillion_infer.plan.cost import step_cost
from trillion_infer.plan.placement import described_packing, plan_deployment, roles_of

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = [name for name in deployment_names() if find_deployment(name).hf_config is not None]
FIELDS = {
    "config",
    "topology",
    "device_kind",
    "devices",
    "weights_gib_per_device",
    "temp_gib_per_device",
    "reserved_gib_per_device",
    "kv_gib_total",
    "kv_tokens",
    "programs",
    "drafters",
}
TINY = Deployment(
    name="tiny",
    options={"mesh": "tensor=2", "max_running": 2, "prefill_chunk": 16, "max_model_len": 256, "penalties": False},
    topology="v5e:2x2",
    hf_config={
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "head_dim": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "vocab_size": 256,
    },
)


@pytest.mark.parametrize("name", NAMES)
def test_every_deployment_states_a_model_this_library_reads(name):
    deployment = find_deployment(name)
    assert deployment.hf_config is not None
    assert deployment.topology
    assert read_family(deployment.hf_config).config.layers
    quantised = "quantization_config" in str(deployment.hf_config)
    assert (described_packing(deployment.hf_config) is not None) == quantised


def test_a_config_without_a_model_is_refused():
    with pytest.raises(ConfigError, match="has no hf_config"):
        plan_deployment(find_deployment("smollm2_cpu"), "v5e:2x2")


def test_a_config_without_a_topology_is_refused():
    with pytest.raises(ConfigError, match="give one, for example v5e:2x4"):
        plan_deployment(dataclasses.replace(TINY, topology=""))


@pytest.mark.aot
def test_a_mesh_that_cannot_hold_the_model_names_the_devices_that_would():
    with pytest.raises(OutOfMemoryError, match=r"need at least \d+ v5e, \d+ v5p, \d+ v6e, \d+ tpu7x, \d+ h100"):
        plan_deployment(find_deployment("kimi_k2_5_v5p_8"), "v5e:2x4")


@pytest.mark.aot
def test_a_mesh_that_repeats_weights_names_one_that_does_not():
    deployment = find_deployment("kimi_k2_5_h100x8")
    repeating = dataclasses.replace(deployment, options={**deployment.options, "mesh": "data=8"})
    with pytest.raises(OutOfMemoryError, match=r"Use mesh=expert=8, which leaves 69\.\d+ GiB on each"):
        plan_deployment(repeating)


@pytest.mark.aot
def test_a_step_costs_what_its_active_weights_cost():
    """Kimi K2.5 uses 32e9 of its 1e12 weights a token; a decode step reads few experts, a prefill step all."""
    blueprint, _, _ = plan_deployment(find_deployment("kimi_k2_5_h100x8"))
    one, chunk = (step_cost(blueprint, bucket) for bucket in (Bucket(1, 1), Bucket(4096, 128)))
    assert one[0] * 8 == pytest.approx(2 * 32e9, rel=0.06)
    assert one[1] * 8 == pytest.approx(32e9 * 0.5 + 20e9, rel=0.3)
    assert chunk[0] / one[0] == pytest.approx(4096, rel=0.06)
    assert chunk[1] == pytest.approx(blueprint.weight_bytes_per_device(), rel=0.01)


@pytest.mark.aot
def test_a_mesh_larger_than_the_topology_is_refused():
    with pytest.raises(ConfigError, match="needs 8 devices; there are 4"):
        plan_deployment(find_deployment("llama3_70b_v6e_8"), "v6e:2x2", "tensor=8")


@pytest.mark.aot
def test_another_topology_is_taken_whole_or_refused_with_what_would_do():
    kimi = find_deployment("kimi_k2_5_v5p_8")
    assert plan_deployment(kimi, "v5p:2x2x4")[0].mesh.shape["expert"] == 16
    with pytest.raises(OutOfMemoryError, match=r"138\.\d+ GiB on each device.* need at least 37 v5e, 6 v5p"):
        plan_deployment(kimi, "v5p:2x2x1")
    with pytest.raises(ConfigError, match=r"v5p:2x2x1 has 4 devices, of which .* cannot take all"):
        plan_deployment(dataclasses.replace(kimi, options={"mesh": "expert=5,data=3"}), "v5p:2x2x1")


@pytest.mark.aot
def test_an_axis_that_does_not_divide_says_what_would():
    with pytest.raises(OutOfMemoryError, match=r"expert=7 does not divide the 384 experts.*; 6 or 8 would"):
        plan_deployment(find_deployment("kimi_k2_5_h100x8"), mesh="expert=7")


@pytest.mark.aot
@pytest.mark.slow
def test_memory_adds_up_and_the_json_has_its_fields():
    """Weights, temporaries, reserve and KV of two devices are what two devices have."""
    report = compile_deployment(TINY)
    row = report.as_json()
    assert set(row) == FIELDS
    assert {set(program) == {"name", "compile_s", "temp_gib", "flops", "bytes"} for program in row["programs"]} == {
        True
    }
    held = row["weights_gib_per_device"] + row["temp_gib_per_device"] + row["reserved_gib_per_device"]
    assert row["kv_gib_total"] == pytest.approx(2 * (15.75 - held), abs=0.01)
    per_token = 2 * 2 * 2 * 128 * 2  # layers, k and v, heads, width, bytes
    assert row["kv_tokens"] == pytest.approx(report.kv_bytes / per_token, rel=0.01)
    assert not report.notes


GOALS = {
    "kimi_k2_5_h100x8": (60, 900_000),
    "kimi_k2_5_tpu7x_4": (150, 2_000_000),
    "llama4_scout_h200x2": (70, 1_400_000),
}
"""GiB and tokens of KV that these must leave; the others, room for a token."""


ROLES = [(name, role) for name in NAMES for role in roles_of(find_deployment(name))]
APART = [name for name in NAMES if roles_of(find_deployment(name)) != (None,)]


@pytest.mark.aot
@pytest.mark.parametrize("name", APART)
def test_each_role_has_devices_and_programs_of_its_own(name):
    """Half of the devices each; prefill has no steps of decode alone, decode one that prefills what was preempted."""
    deployment = find_deployment(name)
    plans = {role: plan_deployment(deployment, role=role)[0] for role in roles_of(deployment)}
    ids = {role: {device.id for device in plan.mesh.devices.flat} for role, plan in plans.items()}
    assert (len(ids["prefill"]), len(ids["decode"]), ids["prefill"] & ids["decode"]) == (8, 8, set())
    buckets = {role: plan.programs((1,)).buckets for role, plan in plans.items()}
    assert not buckets["prefill"].decode
    assert len(buckets["decode"].mixed) == 1
    assert buckets["decode"].decode[-1].sequences == plans["decode"].config.max_running


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(("name", "role"), ROLES)
def test_deployments_compile_and_leave_room(name, role):
    """The largest step and its sampler, with the kernels of the platform, in pools as large as fit."""
    report: CompileReport = compile_deployment(find_deployment(name), only_largest=True, role=role)
    gib, tokens = GOALS.get(name, (0, 1))
    assert report.as_json()["kv_gib_total"] >= gib
    assert report.kv_tokens >= tokens
    assert report.kv_bytes <= report.kv_limit
    assert not report.notes
    blueprint, _, _ = plan_deployment(find_deployment(name), role=role)
    pools = blueprint.state_shape(report.pages).abstract(blueprint.mesh).pools
    shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in pools]
    assert not [line for program in report.programs for line in pool_copies(program.run.as_text() or "", shapes)]


def test_rounded_weights_and_experts_on_the_host_leave_the_device():
    def weights(options: dict) -> int:
        deployment = find_deployment("qwen3_30b_a3b_v5e_8")
        changed = dataclasses.replace(deployment, options={**deployment.options, "mesh": "expert=8", **options})
        return plan_deployment(changed)[0].weight_bytes_per_device()

    plain, int8, int4 = (weights(options) for options in ({}, {"quantize": "int8"}, {"quantize": "int4"}))
    assert 0.5 < int8 / plain < 0.51
    assert 0.28 < int4 / plain < 0.32  # 4.5 bits of 16, tables of 8
    held = weights({"expert_memory": "host:8e9"})
    assert 1e9 / 2 < held - (plain - 48 * 128 * 3 * 2048 * 768 * 2 / 8) < 1e9


def test_weights_that_are_quantised_are_not_rounded():
    deployment = find_deployment("kimi_k2_5_h100x8")
    with pytest.raises(ConfigError, match=r"quantize is 'int8', but the weights of this .* are quantised already"):
        plan_deployment(dataclasses.replace(deployment, options={**deployment.options, "quantize": "int8"}))


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(("topology", "copy"), [("v5e:1x1", "dynamic-slice"), ("h100:1", "call")])
def test_experts_come_from_the_host_beside_products(topology, copy):
    """In the scheduled program a wave's copies begin before the kernels of the wave before, and end behind them."""
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    }
    options = {"max_running": 8, "max_model_len": 256, "prefill_chunk": 64, "expert_memory": "host"}
    tiny = dataclasses.replace(TINY, options=options, hf_config={**(TINY.hf_config or {}), **mixture})
    report = compile_deployment(tiny, topology, only_largest=True)
    assert not report.notes
    kernel = r"(?P<kernel>custom-call)\(.*(?:tpu_custom_call|xla\.gpu\.triton)"
    step = re.compile(rf" = .*?(?: {copy}-(?P<edge>start|done)\(| {kernel})")
    waves = []
    for computation in (report.programs[0].run.as_text() or "").split("\n\n"):
        order = [found["edge"] or found["kernel"] for found in map(step.search, computation.splitlines()) if found]
        if "start" in order:
            waves.append(order)
    assert waves, "nothing is copied asynchronously"
    for order in waves:
        first, last = order.index("start"), len(order) - 1 - order[::-1].index("done")
        assert order[first:last].count("custom-call") == 2, order


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("name", ["kimi_k2_5_tpu7x_4", "kimi_k2_5_h100x8"])
@pytest.mark.parametrize("head", ["kimi_k2_5_eagle3_mla", "kimi_k2_5_eagle3_llama"])
def test_drafters_compile_beside_kimi(name, head):
    """The largest steps of target, head and draft model; the report says what of memory is the drafters'."""
    deployment = find_deployment(name)
    speculate = f"eagle3:{CONFIGS / 'drafters' / head},draft:{CONFIGS / 'drafters' / 'moonlight_16b_a3b'}"
    deployment = dataclasses.replace(deployment, options={**deployment.options, "speculate": speculate})
    report = compile_deployment(deployment, only_largest=True)
    names = [program.name for program in report.programs]
    assert any(each.startswith("accept_") for each in names)
    for drafter in report.as_json()["drafters"]:
        kinds = [each.removeprefix(drafter["name"]).rpartition("_")[0] for each in names if drafter["name"] in each]
        assert kinds == ["_extend_verify", "_chain"], kinds
        assert 0.1 < drafter["weights_gib_per_device"] < 10
        assert 0 < drafter["kv_share"] < 0.5


def with_kernels(deployment: Deployment, topology: str, mesh: str) -> Blueprint:
    """The deployment with the kernels of the topology's platform, and no others."""
    blueprint = plan_deployment(deployment, topology, mesh)[0]
    return dataclasses.replace(blueprint, config=dataclasses.replace(blueprint.config, attention="pallas"))


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:4"])
def test_stages_compile_and_copy_no_pool(topology):
    blueprint = with_kernels(TINY, topology, "stage=2,tensor=2")
    programs = blueprint.programs((8192,))  # more than fits on the chip, where a small pool is kept meanwhile
    pools = [leaf.sharding.shard_shape(leaf.shape) for leaf in programs.state.pools]
    for bucket in (programs.buckets.decode[-1], programs.buckets.mixed[-1]):
        text = programs.forward(bucket).run.as_text()
        assert "collective-permute" in text
        assert pool_copies(text, pools) == []


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:2"])
@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_quantised_layers_are_read_where_they_lie(quantize, topology):
    """No operation of a decode step yields one layer of a packed stack in device memory."""
    large = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 8}
    tiny = dataclasses.replace(
        TINY, options={**TINY.options, "quantize": quantize}, hf_config={**(TINY.hf_config or {}), **large}
    )
    text = with_kernels(tiny, topology, "tensor=2").programs((8,)).forward(Bucket(2, 2)).run.as_text()
    made = re.findall(
        r"= \(?(s8|u8|s32|u32)\[([\d,]+)\](\S*) (?:copy|copy-start|dynamic-slice|fusion|slice|transpose)\(", text
    )
    sizes = {dims: math.prod(map(int, dims.split(","))) for _, dims, layout in made if "S(1)" not in layout}
    assert max(sizes.values(), default=0) < 2048 * 2048 // 16, sizes
