"""SmolLM2-135M-Instruct on a laptop's CPU.

Run:    python scripts/generate.py --model=SmolLM2-135M-Instruct.Q4_1.gguf --config=smollm2_cpu \\
            --prompt="What is the capital of France?"
Expect: an answer that names Paris, within seconds; under 1.2 GB of memory.
"""

from trillion_infer.config.deployment import Deployment

DEPLOYMENT = Deployment(
    name="smollm2_cpu",
    options={"dtype": "bfloat16", "max_running": 16, "prefill_chunk": 512, "kv_memory": 320e6},
)
