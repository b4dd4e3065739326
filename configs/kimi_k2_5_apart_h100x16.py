"""Kimi K2.5, int4 experts with bfloat16 activations: one host of 8 H100 prefills, another decodes.

Run:    python scripts/compile.py --config=kimi_k2_5_apart_h100x16
        python scripts/generate.py --model=MODEL --config=kimi_k2_5_apart_h100x16 --prompt="Hello"
        (compile.py --largest: the memory alone)
Expect: a table of programs with memory and cost for each role, prefill on devices 0 to 7 and decode on 8 to 15, and
66.5 GiB left for KV on each side, 1,016,576 tokens.
"""

from configs._kimi import HF_CONFIG, OPTIONS
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="kimi_k2_5_apart_h100x16",
    options=OPTIONS | {"disaggregate": "prefill=8,decode=8", "prefill_options": "max_running=16"},
    topology="h100:2x8",
    hf_config=HF_CONFIG,
)
