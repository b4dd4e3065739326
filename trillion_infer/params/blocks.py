"""Parameters of norms, embeddings and gated feed-forward blocks."""

from sharding.heads import round_up
from trillion_infer.config.model import DenseSpec, ModelConfig
from trillion_infer.params.tree import WHOLE, Declared, Part, single, stacked

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to this many times the shards: whole lanes, whole words of the mask."""


def padded_vocab(vocab: int, shards: int) -> int:
    return round_up(vocab, VOCAB_MULTIPLE * shards)


def norm_params(prefixes: tuple[str, ...] | str, width: int) -> Declared:
    """weight: `[width]`, float32. A str for prefixes is a norm outside the layers."""
    if isinstance(prefixes, str):
        return {"weight": single((width,), ("norm",), f"{prefixes}weight", dtype="float32", init="ones")}
    return {"weight": stacked(prefixes, (width,), ("norm",), {"weight": WHOLE}, dtype="float32", init="ones")}


def embedding_params(config: ModelConfig, name: str, shards: int) -> Declared:
    """table: `[V, M]`, padded."""
    shape = (padded_vocab(config.vocab, shards), config.width)
    return {"table": single(shape, ("vocab", "embed"), name, Part((slice(0, config.vocab),)), in_axes=1)}


def ffn_params(spec: DenseSpec, config: ModelConfig, prefixes: tuple[str, ...], tensor: int) -> Declared:
    """gate_up: `[2, F, M]`, down: `[M, F]`; F is padded to a multiple of the shards."""
    real = slice(0, spec.width)
    width, ffn = config.width, round_up(spec.width, tensor)
    gate_up = {"gate_proj.weight": Part((0, real)), "up_proj.weight": Part((1, real))}
    down = {"down_proj.weight": Part((slice(None), real))}
    return {
        "gate_up": stacked(prefixes, (2, ffn, width), ("gate_up", "ffn", "embed"), gate_up, in_axes=1),
        "down": stacked(prefixes, (width, ffn), ("embed", "ffn"), down, in_axes=1),
    }
