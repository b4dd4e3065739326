"""gpt-oss-120b, mxfp4 experts with bfloat16 activations, on one H100.

Run:    python scripts/compile.py --config=gpt_oss_120b_h100x1
        python scripts/generate.py --model=MODEL --config=gpt_oss_120b_h100x1 --prompt="Hello"
Expect: a table of programs with memory and cost, and the room left for KV.
"""

from trillion_infer.config.deployment import Deployment

HF_CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}

DEPLOYMENT = Deployment(
    name="gpt_oss_120b_h100x1",
    options={"mesh": "tensor=1", "max_running": 16, "prefill_chunk": 1024, "max_model_len": 131072},
    topology="h100:1",
    hf_config=HF_CONFIG,
)
