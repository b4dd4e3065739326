"""Kimi K2.5, int4 experts with bfloat16 activations, on one host of 8 H100.

Run:    python scripts/compile.py --config=kimi_k2_5_h100x8
        python scripts/generate.py --model=MODEL --config=kimi_k2_5_h100x8 --prompt="Hello"
Expect: a table of programs with memory and cost, and the room left for KV.
"""

from configs._kimi import HF_CONFIG, OPTIONS
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="kimi_k2_5_h100x8",
    options=OPTIONS | {"mesh": "tensor=8"},
    topology="h100:8",
    hf_config=HF_CONFIG,
)
