"""Llama 4 Scout in bfloat16 on 8 v6e chips.

Run:    python scripts/compile.py --config=llama4_scout_v6e_8
        python scripts/generate.py --model=MODEL --config=llama4_scout_v6e_8 --prompt="Hello"
Expect: a table of programs with memory and cost, and the room left for KV.
"""

from configs._llama4_scout import HF_CONFIG
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="llama4_scout_v6e_8",
    options={"mesh": "tensor=8", "max_running": 8, "prefill_chunk": 1024, "max_model_len": 131072},
    topology="v6e:2x4",
    hf_config=HF_CONFIG,
)
