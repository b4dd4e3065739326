"""Random parameters for models without weights: tests, benchmarks, compile checks."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from pallas_kernels.quantised_matmul.formats import QuantisedTensor, quantise
from trillion_infer.weights.quantise import abstract_quantised
from trillion_infer.weights.rounding import RECIPES
from trillion_infer.weights.spec import ParamSpec

STD = 0.02


@dataclass(frozen=True)
class RandomCheckpoint:
    """Stands for a checkpoint where there are no weights: `config` as a config.json, values drawn from `seed`."""

    config: Mapping[str, Any]
    seed: int = 0
    generation_config: Mapping[str, Any] = field(default_factory=dict)

    def fingerprint(self) -> bytes:
        """SHA-256 of the configuration and the seed."""
        return hashlib.sha256(json.dumps([dict(self.config), self.seed], sort_keys=True).encode()).digest()


def init_params(
    specs: Mapping[str, ParamSpec],
    shardings: Mapping[str, Sharding],
    dtype: Any,
    seed: int,
    quantize: str | None = None,
) -> dict[str, Any]:
    """A random model: normal values of deviation `STD`, or ones or zeros as each spec says.

    Values depend on seed and parameter name alone, not on the sharding. They are made on the devices, and there rounded
    to nearest by the formats that `quantize` (see `quantise_specs`) gives each parameter.
    """
    makers, params = {}, {}
    rounded = abstract_quantised(specs, shardings, quantize) if quantize in RECIPES else {}
    for name, spec in specs.items():
        kind = (spec.shape, jnp.dtype(spec.dtype or dtype), spec.init, shardings[name])
        if kind not in makers:
            draw = partial(_draw, shape=kind[0], dtype=kind[1], init=kind[2])
            makers[kind] = jax.jit(draw, out_shardings=kind[3])
        fold = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        params[name] = makers[kind](jax.random.fold_in(jax.random.key(seed), fold))
        if name in rounded:
            params[name] = _rounded(params[name], rounded[name])
    return params


def _draw(key: jax.Array, *, shape: tuple[int, ...], dtype: jnp.dtype, init: str) -> jax.Array:
    if init == "normal":
        return jax.random.normal(key, shape, dtype) * jnp.asarray(STD, dtype)
    return jnp.full(shape, 1 if init == "ones" else 0, dtype)


def _rounded(weight: jax.Array, target: QuantisedTensor) -> QuantisedTensor:
    """The weight with its `in` axes merged, in the format and on the shardings of `target`."""

    def run(w: jax.Array) -> QuantisedTensor:
        t = quantise(w.reshape(*target.shape), target.format, group=target.group)
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), t, target)

    return jax.jit(run, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target), donate_argnums=0)(weight)
