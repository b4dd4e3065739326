"""Tiny configurations, one a family, for `LLM(tiny_config("llama"))`: random weights, token ids in and out."""

from typing import Any

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_MIXTURE = {"num_experts_per_tok": 2, "intermediate_size": 64}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **_HEADS, "intermediate_size": 128},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **_HEADS, "intermediate_size": 128},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        **_HEADS,
        "intermediate_size": 128,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_HEADS,
        **_MIXTURE,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "deepseek": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        **_HEADS,
        "num_experts_per_tok": 1,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "attention_chunk_size": 32,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        **_HEADS,
        **_MIXTURE,
        "num_local_experts": 4,
        "sliding_window": 16,
    },
}
FAMILIES = tuple(_CONFIGS)


def tiny_config(family: str) -> dict[str, Any]:
    """What a config.json of a tiny model of this family (see FAMILIES) says."""
    return {**_COMMON, **_CONFIGS[family]}
