"""How the gate and up halves of an expert combine; elementwise, in float32, so that kernels share them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CLAMP_LIMIT = 7.0
CLAMP_ALPHA = 1.702


def silu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """SwiGLU (Shazeer 2020)."""
    return gate * jax.nn.sigmoid(gate) * up


def clamped_swiglu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """gpt-oss: both halves clamped to 7, a sigmoid of slope 1.702, and the up half shifted by one."""
    gate = jnp.minimum(gate, CLAMP_LIMIT)
    up = jnp.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT)
    return gate * jax.nn.sigmoid(CLAMP_ALPHA * gate) * (up + 1.0)


def gelu_tanh(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """GeGLU with the tanh form of GELU."""
    return jax.nn.gelu(gate, approximate=True) * up


ACTIVATIONS = {"silu": silu, "clamped_swiglu": clamped_swiglu, "gelu_tanh": gelu_tanh}
