"""Shapes at which real models call the operation, on one device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.quantised_matmul.formats import Format, QuantisedTensor, abstract


@dataclass(frozen=True)
class ArgSpec:
    """One model on one device: experts are what the device holds, choices what a token makes of all experts."""

    name: str
    experts: int
    choices: int
    model: int
    ffn: int
    format: Format | None = None
    activation: str = "silu"
    biases: bool = False
    scores_on_input: bool = False

    def weight(self, *shape: int) -> QuantisedTensor | jax.ShapeDtypeStruct:
        """A stack of matrices in the model's format."""
        if self.format is None:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        return abstract(shape, self.format, scale_dtype=jnp.float32 if self.format == "fp8" else jnp.bfloat16)

    def abstract(self, layers: int, tokens: int) -> dict:
        """Arguments of `grouped_ffn` that are arrays, by name, as ShapeDtypeStructs."""
        experts, model, ffn = self.experts, self.model, self.ffn
        args = {
            "x": jax.ShapeDtypeStruct((tokens, model), jnp.bfloat16),
            "gate_up": self.weight(layers, experts, 2, ffn, model),
            "down": self.weight(layers, experts, model, ffn),
            "expert_ids": jax.ShapeDtypeStruct((tokens, self.choices), jnp.int32),
            "expert_weights": jax.ShapeDtypeStruct((tokens, self.choices), jnp.float32),
            "layer": jax.ShapeDtypeStruct((), jnp.int32),
        }
        if self.biases:
            args["gate_up_bias"] = jax.ShapeDtypeStruct((layers, experts, 2, ffn), jnp.bfloat16)
            args["down_bias"] = jax.ShapeDtypeStruct((layers, experts, model), jnp.bfloat16)
        return args

    def options(self) -> dict:
        """Arguments of `grouped_ffn` that are not arrays."""
        return {"activation": self.activation, "scores_on_input": self.scores_on_input}


SPECS = (
    ArgSpec("kimi-k2.5-expert-8", 48, 8, 7168, 2048, format="int4"),
    ArgSpec("deepseek-v3-expert-8", 32, 8, 7168, 2048, format="fp8"),
    ArgSpec("qwen3-30b-a3b", 128, 8, 2048, 768),
    ArgSpec("qwen3-30b-a3b-int8", 128, 8, 2048, 768, format="int8"),
    ArgSpec("gpt-oss-20b", 32, 4, 2880, 2880, format="mxfp4", activation="clamped_swiglu", biases=True),
    ArgSpec("llama-4-scout-tensor-8", 16, 1, 5120, 1024, scores_on_input=True),
)
