"""Kimi K2.5, int4 experts with bfloat16 activations, on 32 v6e chips.

Run:    python scripts/compile.py --config=kimi_k2_5_v6e_32
        python scripts/generate.py --model=MODEL --config=kimi_k2_5_v6e_32 --prompt="Hello"
Expect: a table of programs with memory and cost, and 400.5 GiB left for KV in all, 5,506,560 tokens (weights once and
no temporaries: 430.0 GiB).
"""

from configs._kimi import HF_CONFIG, OPTIONS
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="kimi_k2_5_v6e_32",
    options=OPTIONS | {"mesh": "expert=32"},
    topology="v6e:4x8",
    hf_config=HF_CONFIG,
)
