"""Kimi K2.5, int4 experts with bfloat16 activations, on 4 TPU7x chips (8 devices).

Run:    python scripts/compile.py --config=kimi_k2_5_tpu7x_4
        python scripts/generate.py --model=MODEL --config=kimi_k2_5_tpu7x_4 --prompt="Hello"
        (compile.py --largest: the memory alone, in a few minutes)
Expect: a table of programs with memory and cost, and 196.4 GiB left for KV in all, 2,700,160 tokens. Eight devices
less 0.5 GiB each and the weights once are 200.2 GiB; what is missing are the temporaries of a prefill step of 4,096
tokens, 0.48 GiB a device (docs/deployments.md). A latent entry of 576 values takes 640 there, whole lanes.
"""

from configs._kimi import HF_CONFIG, OPTIONS
from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="kimi_k2_5_tpu7x_4",
    options=OPTIONS | {"mesh": "expert=8"},
    topology="tpu7x:2x2x1",
    hf_config=HF_CONFIG,
)
