"""Kimi K2.5, int4 experts with bfloat16 activations, on 8 v5p chips.

Run:    python scripts/compile.py --config=kimi_k2_5_v5p_8
        python scripts/generate.py --model=MODEL --config=kimi_k2_5_v5p_8 --prompt="Hello"
Expect: a table of programs with memory and cost, and the room left for KV.
"""

from configs._kimi import HF_CONFIG, OPTIONS
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="kimi_k2_5_v5p_8",
    options=OPTIONS | {"mesh": "expert=8"},
    topology="v5p:2x2x2",
    hf_config=HF_CONFIG,
)
