"""Llama 3.1 70B in bfloat16 on 8 v6e chips.

Run:    python scripts/compile.py --config=llama3_70b_v6e_8
        python scripts/generate.py --model=MODEL --config=llama3_70b_v6e_8 --prompt="Hello"
Expect: a table of programs with memory and cost, and the room left for KV.
"""

from trillion_infer.config.deployment import Deployment

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

DEPLOYMENT = Deployment(
    name="llama3_70b_v6e_8",
    options={"mesh": "tensor=8", "max_running": 64, "prefill_chunk": 1024, "max_model_len": 131072},
    topology="v6e:2x4",
    hf_config=HF_CONFIG,
)
