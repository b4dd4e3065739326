"""Steps compiled for devices that are not here hold no second pool, and no second copy of the weights."""

import dataclasses

import pytest

from pallas_kernels.common.pool_copies import pool_copies
from trillion_infer.benchmark.roofline import LLAMA3_8B
from trillion_infer.config.deployment import Deployment, find_deployment
from trillion_infer.plan.compile_report import compile_deployment
from trillion_infer.plan.placement import plan_deployment


def llama_3_8b(topology: str, mesh: str) -> Deployment:
    options = {"mesh": mesh, "max_running": 64, "prefill_chunk": 512, "max_model_len": 8192}
    return Deployment(name="llama_3_8b", options=options, topology=topology, hf_config=LLAMA3_8B)


CASES = {
    "llama_3_8b_v5e": llama_3_8b("v5e:2x2", "tensor=4"),
    "llama_3_8b_tpu7x": llama_3_8b("tpu7x:2x2x1", ""),
    "llama_3_8b_h100": llama_3_8b("h100:1", ""),
    "kimi_k2_5_tpu7x": find_deployment("kimi_k2_5_tpu7x_4"),
    "kimi_k2_5_h100": find_deployment("kimi_k2_5_h100x8"),
}


@pytest.mark.aot
def test_no_stack_of_weights_is_tiled_anew():
    """TPU7x reads 16-bit matrices in tiles of 16 rows where parameters have 8: a step must not copy all of them."""
    deployment = llama_3_8b("tpu7x:2x2x1", "tensor=2")
    deployment = dataclasses.replace(deployment, hf_config={**LLAMA3_8B, "vocab_size": 256, "num_hidden_layers": 8})
    blueprint, _, _ = plan_deployment(deployment)
    programs = blueprint.programs((64,))
    program = programs.forward(programs.buckets.decode[-1])
    assert program.temp_bytes < 4096 * 14336 * 2 // 2, "one matrix of one layer on one of two devices"


@pytest.mark.aot
def test_no_stack_of_scales_is_laid_out_anew():
    """A TPU would put the experts of gpt-oss's scales into the rows of its tiles, where no kernel reads them."""
    deployment = find_deployment("gpt_oss_120b_h100x1")
    options = {**deployment.options, "mesh": "expert=4", "max_running": 4, "max_model_len": 4096}
    hf_config = {**(deployment.hf_config or {}), "num_hidden_layers": 2, "vocab_size": 256}
    deployment = dataclasses.replace(deployment, topology="v5p:2x2x1", options=options, hf_config=hf_config)
    blueprint, _, _ = plan_deployment(deployment)
    programs = blueprint.programs(tuple(64 for _ in blueprint.layouts))
    program = programs.forward(programs.buckets.decode[0])
    one_layer = 32 * 2 * 2880 * 90
    assert program.temp_bytes < one_layer // 2, program.temp_bytes


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_largest_steps_of_prefill_and_decode_hold_no_second_pool(name):
    """Temporaries are below 2% of the pools that then fit, and nothing of the pools' shape is copied."""
    report = compile_deployment(CASES[name], only_largest=True)
    blueprint, _, _ = plan_deployment(CASES[name])
    programs = blueprint.programs(report.pages)
    pools = [leaf.sharding.shard_shape(leaf.shape) for leaf in programs.state.pools]
    held = report.kv_bytes / report.devices
    steps = (report.programs[0], programs.forward(programs.buckets.decode[-1]))
    assert {program.name.partition("_")[0] for program in steps} == {"mixed", "decode"}
    for program in steps:
        assert program.temp_bytes < 0.02 * held, (program.name, program.temp_bytes, held)
        assert pool_copies(program.run.as_text() or "", pools) == []
