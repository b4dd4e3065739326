"""Which weights of a checkpoint are packed in device memory: the meaning of `quantize`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jax.sharding import Sharding

from pallas_kernels.quantised_matmul.formats import QuantisedTensor
from trillion_infer.core.errors import ConfigError
from trillion_infer.weights.checkpoint import Checkpoint
from trillion_infer.weights.gguf import GGUFCheckpoint
from trillion_infer.weights.gguf_packed import abstract_blocks
from trillion_infer.weights.orbax import OrbaxCheckpoint
from trillion_infer.weights.quant_checkpoint import QuantisedCheckpoint
from trillion_infer.weights.quant_load import abstract_kept, routed_experts
from trillion_infer.weights.quantise import check_quantisable
from trillion_infer.weights.rounding import RECIPES
from trillion_infer.weights.spec import ParamSpec

Abstract = Callable[[Mapping[str, ParamSpec], Mapping[str, Sharding]], Mapping[str, QuantisedTensor]]
"""abstract(specs, shardings) -> the parameters that are packed, by path."""


@dataclass(frozen=True)
class Packing:
    """abstract: None where no weight is packed beyond what `EngineConfig.quantize` rounds. options: of load_params.
    name: what was chosen where `quantize` was left out."""

    abstract: Abstract | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


def choose_packing(checkpoint: Checkpoint, quantize: str | None, platform: str, native: bool = False) -> Packing:
    """What `quantize` means for a checkpoint: a recipe of RECIPES, keep, none, or None.

    native: blocks of a GGUF have products of their own here, so that None keeps them.
    Raises ConfigError where the checkpoint holds nothing that could be kept, is quantised already, or is in final
    layout, and where the platform cannot multiply what is kept.
    """
    if quantize in RECIPES:
        check_quantisable(checkpoint, quantize)
        return Packing(options={"quantize": quantize})
    if isinstance(checkpoint, OrbaxCheckpoint):
        if quantize == "none":
            raise ConfigError(f"quantize is 'none', but {checkpoint.path} is in final layout. Leave quantize out.")
        return Packing(checkpoint.abstract_kept)
    if isinstance(checkpoint, QuantisedCheckpoint) and quantize != "none":
        return Packing(
            partial(abstract_kept, checkpoint=checkpoint, select=routed_experts), {"keep_quantised": routed_experts}
        )
    if quantize is None and native and isinstance(checkpoint, GGUFCheckpoint):
        quantize = "keep"
    if quantize == "keep":
        if not isinstance(checkpoint, GGUFCheckpoint):
            raise ConfigError(
                f"quantize is 'keep', but {checkpoint.path} holds no quantised weights. Leave quantize out, or use "
                f"one of {', '.join(RECIPES)}."
            )
        if platform != "cpu":
            raise ConfigError(
                f"quantize is 'keep', but blocks of a GGUF are multiplied on CPUs only, not on a {platform}. Leave "
                "quantize out to decode them, or use int8."
            )
        return Packing(partial(abstract_blocks, checkpoint=checkpoint), {"keep_quantised": True}, "keep")
    return Packing()
