"""gpt-oss 20B and 120B: attention sinks, alternating windows, biases everywhere, clamped SwiGLU experts."""

from collections.abc import Mapping
from typing import Any

from trillion_infer.config.hf import HFConfig, read_rope
from trillion_infer.config.model import AttentionSpec, LayerSpec, MoESpec, RouterSpec
from trillion_infer.models import Family
from trillion_infer.models.common import head_sizes, model_config
from trillion_infer.params.names import ExpertNames, TensorNames

WINDOWED, FULL = "sliding_attention", "full_attention"


def read(config: HFConfig, generation: Mapping[str, Any]) -> Family:
    heads, kv_heads, head_dim = head_sizes(config)
    count = config.take("num_hidden_layers")
    config.expect("hidden_act", "silu", ["silu"])
    config.expect("swiglu_limit", 7.0, [7.0])
    config.expect("swiglu_alpha", 1.702, [1.702])
    bias = config.take("attention_bias", True)
    rope = read_rope(config, head_dim, default_theta=150000.0)
    window = config.take("sliding_window", 128)
    top_k = config.take("num_experts_per_tok", config.take("experts_per_token", 4))
    experts = config.take("num_local_experts", config.take("num_experts", None))
    config.ignore("experts_per_token", "num_experts", "initial_context_length")
    moe = MoESpec(
        experts,
        top_k,
        config.take("intermediate_size"),
        RouterSpec("topk_softmax", bias=True),
        activation="clamped_swiglu",
        biases=True,
    )

    def layer(kind: str) -> LayerSpec:
        mixer = AttentionSpec(
            heads,
            kv_heads,
            head_dim,
            scale=head_dim**-0.5,
            rope=rope,
            window=window if kind == WINDOWED else None,
            sinks=True,
            qkv_bias=bias,
            out_bias=bias,
        )
        return LayerSpec(mixer, moe)

    kinds = config.take("layer_types", [WINDOWED if i % 2 == 0 else FULL for i in range(count)])
    for kind in kinds:
        HFConfig({"layer_types": kind}, config.where).expect("layer_types", kind, [WINDOWED, FULL])
    names = TensorNames(experts=ExpertNames(layout="interleaved", router="router."))
    return Family(model_config(config, "gpt_oss", [layer(kind) for kind in kinds], generation), names)
