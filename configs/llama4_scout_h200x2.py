"""Llama 4 Scout in bfloat16 on 2 H200.

Run:    python scripts/compile.py --config=llama4_scout_h200x2
        python scripts/generate.py --model=MODEL --config=llama4_scout_h200x2 --prompt="Hello"
Expect: a table of programs with memory and cost, and the room left for KV.
"""

from configs._llama4_scout import HF_CONFIG
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="llama4_scout_h200x2",
    options={"mesh": "tensor=2", "max_running": 64, "prefill_chunk": 2048, "max_model_len": 1048576},
    topology="h200:2",
    hf_config=HF_CONFIG,
)
