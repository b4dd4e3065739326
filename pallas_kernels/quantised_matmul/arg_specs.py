"""Shapes at which real models call the operation, on one device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.quantised_matmul.formats import Format, abstract


@dataclass(frozen=True)
class ArgSpec:
    """A dense projection of one model."""

    name: str
    n_out: int
    n_in: int
    format: Format

    def abstract(self, layers: int, tokens: int) -> tuple:
        """x, the stacked weight and the layer, as ShapeDtypeStructs."""
        scale_dtype = jnp.float32 if self.format == "fp8" else jnp.bfloat16
        return (
            jax.ShapeDtypeStruct((tokens, self.n_in), jnp.bfloat16),
            abstract((layers, self.n_out, self.n_in), self.format, scale_dtype=scale_dtype),
            jax.ShapeDtypeStruct((), jnp.int32),
        )


SPECS = (
    ArgSpec("llama-3-8b-qkv-int8", 6144, 4096, "int8"),
    ArgSpec("llama-3-8b-down-int4", 4096, 14336, "int4"),
    ArgSpec("llama-3-70b-gate-up-tensor-8-int8", 7168, 8192, "int8"),
    ArgSpec("kimi-k2.5-shared-int4", 4096, 7168, "int4"),
    ArgSpec("deepseek-v3-q-b-tensor-8-fp8", 3072, 1536, "fp8"),
    ArgSpec("deepseek-v3-dense-down-tensor-8-fp8", 7168, 2304, "fp8"),
    ArgSpec("gpt-oss-20b-o-mxfp4", 2880, 4096, "mxfp4"),
)
