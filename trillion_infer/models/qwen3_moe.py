"""Qwen3 mixtures (30B-A3B, 235B-A22B): Qwen3 attention, softmax-routed experts, no shared expert."""

from collections.abc import Mapping
from typing import Any

from trillion_infer.config.hf import HFConfig
from trillion_infer.config.model import DenseSpec, FFNSpec, LayerSpec, MoESpec, RouterSpec
from trillion_infer.models import Family
from trillion_infer.models.common import model_config
from trillion_infer.models.qwen3 import read_mixer
from trillion_infer.params.names import TensorNames


def read(config: HFConfig, generation: Mapping[str, Any]) -> Family:
    mixer = read_mixer(config)
    config.expect("hidden_act", "silu", ["silu"])
    router = RouterSpec("softmax", renormalise=config.take("norm_topk_prob", False))
    experts = config.take("num_experts", None)
    experts = config.take("num_local_experts", None) if experts is None else experts
    config.ignore("num_local_experts")
    moe = MoESpec(experts, config.take("num_experts_per_tok"), config.take("moe_intermediate_size"), router)
    dense = DenseSpec(config.take("intermediate_size"))
    step, only = config.take("decoder_sparse_step", 1), config.take("mlp_only_layers", [])

    def ffn(i: int) -> FFNSpec:
        return moe if i not in only and experts > 0 and (i + 1) % step == 0 else dense

    layers = [LayerSpec(mixer, ffn(i)) for i in range(config.take("num_hidden_layers"))]
    return Family(model_config(config, "qwen3_moe", layers, generation), TensorNames())
