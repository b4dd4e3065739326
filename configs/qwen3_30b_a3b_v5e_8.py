"""Qwen3-30B-A3B in bfloat16 on 8 v5e chips.

Run:    python scripts/compile.py --config=qwen3_30b_a3b_v5e_8
        python scripts/generate.py --model=MODEL --config=qwen3_30b_a3b_v5e_8 --prompt="Hello"
Expect: a table of programs with memory and cost, and the room left for KV.
"""

from trillion_infer.config.deployment import Deployment

HF_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

DEPLOYMENT = Deployment(
    name="qwen3_30b_a3b_v5e_8",
    options={"mesh": "expert=2,tensor=4", "max_running": 64, "prefill_chunk": 1024, "max_model_len": 40960},
    topology="v5e:2x4",
    hf_config=HF_CONFIG,
)
