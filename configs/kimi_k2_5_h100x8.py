"""Kimi K2.5, int4 experts with bfloat16 activations, on one host of 8 H100.

Run:    python scripts/compile.py --config=kimi_k2_5_h100x8
        python scripts/generate.py --model=MODEL --config=kimi_k2_5_h100x8 --prompt="Hello"
        (compile.py --largest: the memory alone, in a few minutes)
Expect: a table of programs with memory and cost, and 67.8 GiB left for KV in all, 1,035,520 tokens. Eight H100 less
1 GiB each and the weights once are 71.1 GiB; what is missing are the temporaries of a prefill step of 4,096 tokens.
"""

from configs._kimi import HF_CONFIG, OPTIONS
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="kimi_k2_5_h100x8",
    options=OPTIONS | {"mesh": "tensor=8"},
    topology="h100:8",
    hf_config=HF_CONFIG,
)
