"""Kimi K2.5, int4 experts with bfloat16 activations: of 8 TPU7x chips (16 devices) half prefill and half decode.

Run:    python scripts/compile.py --config=kimi_k2_5_apart_tpu7x_8
        python scripts/generate.py --model=MODEL --config=kimi_k2_5_apart_tpu7x_8 --prompt="Hello"
        (compile.py --largest: the memory alone)
Expect: a table of programs with memory and cost for each role, prefill on devices 0 to 7 and decode on 8 to 15, and
183.4 GiB left for KV on the prefill side, 2,522,496 tokens.
"""

from configs._kimi import HF_CONFIG, OPTIONS
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="kimi_k2_5_apart_tpu7x_8",
    options=OPTIONS | {"disaggregate": "prefill=8,decode=8", "prefill_options": "max_running=16"},
    topology="tpu7x:2x2x2",
    hf_config=HF_CONFIG,
)
