"""Kimi K2.5, int4 experts with bfloat16 activations, on 4 TPU7x chips (8 devices).

Run:    python scripts/compile.py --config=kimi_k2_5_tpu7x_4
        python scripts/generate.py --model=MODEL --config=kimi_k2_5_tpu7x_4 --prompt="Hello"
Expect: a table of programs with memory and cost, and the room left for KV.
"""

from configs._kimi import HF_CONFIG, OPTIONS
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="kimi_k2_5_tpu7x_4",
    options=OPTIONS | {"mesh": "expert=8"},
    topology="tpu7x:2x2x1",
    hf_config=HF_CONFIG,
)
