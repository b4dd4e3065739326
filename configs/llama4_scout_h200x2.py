"""Llama 4 Scout in bfloat16 on 2 H200.

Run:    python scripts/compile.py --config=llama4_scout_h200x2
        python scripts/generate.py --model=MODEL --config=llama4_scout_h200x2 --prompt="Hello"
        (compile.py --largest: the memory alone, in a few minutes)
Expect: a table of programs with memory and cost, and 77.7 GiB left for KV in all, 1,648,992 tokens of contexts of
1,048,576. Two H200 less 1 GiB each and the weights once are 78.1 GiB; what is missing are temporaries.
"""

from configs._llama4_scout import HF_CONFIG
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="llama4_scout_h200x2",
    options={"mesh": "tensor=2", "max_running": 64, "prefill_chunk": 2048, "max_model_len": 1048576},
    topology="h200:2",
    hf_config=HF_CONFIG,
)
