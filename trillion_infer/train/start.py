"""Where training begins: a Llama-shaped head for a target, its tensors those of the target's end where they fit, or a
head that was trained before."""

import dataclasses
from pathlib import Path

import numpy as np

from trillion_infer.config.drafter import Eagle3Spec
from trillion_infer.config.model import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, Rope, Segment
from trillion_infer.core.errors import ConfigError
from trillion_infer.engine.draft_plan import check_head
from trillion_infer.models.eagle3 import read_eagle3
from trillion_infer.params.names import TensorNames
from trillion_infer.train.head import LAYER, random_weights, weight_shapes
from trillion_infer.weights.checkpoint import Checkpoint, open_checkpoint

HEAD_DIM = 128
"""Of heads for targets whose own attention is not grouped-query attention."""


def head_for(target: ModelConfig, drafted: int) -> Eagle3Spec:
    """A head shaped like one of the target's layers: its heads and rope, a feed-forward of its width or 8/3 of M."""
    last = target.layers[-1]
    if isinstance(last.mixer, AttentionSpec):
        mixer = AttentionSpec(
            last.mixer.heads, last.mixer.kv_heads, last.mixer.head_dim, last.mixer.head_dim**-0.5, _rope(target)
        )
    else:
        heads = max(1, target.width // HEAD_DIM)
        mixer = AttentionSpec(heads, heads, HEAD_DIM, HEAD_DIM**-0.5, Rope(last.mixer.rope.theta, HEAD_DIM))
    wide = isinstance(last.ffn, DenseSpec)
    ffn = DenseSpec(last.ffn.width if wide else -(-target.width * 8 // 3 // 128) * 128)
    config = dataclasses.replace(
        target,
        family="eagle3",
        vocab=drafted,
        segments=(Segment((LayerSpec(mixer, ffn),), 1),),
        tied=False,
        norm_plus_one=False,
        embed_scale=1.0,
        logit_cap=None,
        eos_ids=frozenset(),
        dtype="float32",
    )
    count = len(target.layers)
    aux = (min(2, count), count // 2, max(count - 3, 0))
    return Eagle3Spec(config, target.vocab, target.width, aux, LAYER, pruned=True)


def trained_before(path: Path, target: ModelConfig) -> tuple[Eagle3Spec, np.ndarray, dict[str, np.ndarray]]:
    """An exported head to go on with: what it is, the target's ids that it drafts, ascending, and its weights.

    Raises ConfigError for one of another target and for one that is not shaped as those trained here.
    """
    checkpoint = open_checkpoint(path)
    read = read_eagle3(checkpoint.config, checkpoint.names())
    check_head(str(path), read, target)
    aux = read.aux_of(len(target.layers))
    spec = dataclasses.replace(read, aux_layers=aux, config=dataclasses.replace(read.config, dtype="float32"))
    if not isinstance(spec.config.layers[0].mixer, AttentionSpec) or spec.own_embed or not spec.pruned:
        raise ConfigError(
            f"{path} is a head with latent attention, an embedding of its own or its target's whole vocabulary, and "
            "training goes on with Llama-shaped heads of some of it; give one that was trained here, or none."
        )
    shapes = weight_shapes(spec)
    found = {name: checkpoint.shape(name) for name in checkpoint.names() if name not in ("d2t", "t2d")}
    wrong = sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
    if wrong:
        raise ConfigError(
            f"{path} has {wrong[0]} of shape {found.get(wrong[0])}, and its config.json describes a head that has it "
            f"of shape {shapes.get(wrong[0])} (None: not at all); give a head that was trained here, or none."
        )
    weights = {name: np.asarray(checkpoint.read(name, np.dtype(np.float32)), np.float32) for name in shapes}
    kept = np.asarray(checkpoint.read("d2t")) + np.arange(spec.config.vocab)
    return spec, kept.astype(np.int32), weights


def _rope(target: ModelConfig) -> Rope:
    """The target's, without stretching that a config cannot say again."""
    ropes = [layer.mixer.rope for layer in target.layers if layer.mixer.rope is not None]
    return Rope(ropes[-1].theta, ropes[-1].dim, None, False) if ropes else Rope(10000.0, HEAD_DIM)


def first_weights(
    spec: Eagle3Spec, target: ModelConfig, checkpoint: Checkpoint, names: TensorNames, kept: np.ndarray, seed: int
) -> dict[str, np.ndarray]:
    """Random weights, but: `fc` passes on the latest of the three states, the layer is the target's last one as far as
    shapes agree (what it makes of the token's embedding is random), norm and output rows are the target's."""
    weights = {name: np.array(value) for name, value in random_weights(spec, seed).items()}
    shapes, stored = weight_shapes(spec), set(checkpoint.names())
    width = spec.config.width
    fc = np.zeros(shapes["fc.weight"], np.float32)
    fc[:, -spec.target_width :] = np.eye(width, spec.target_width)
    weights["fc.weight"] = fc
    last = names.layer.format(len(target.layers) - 1)
    sources = {f"{LAYER}{part}.weight": f"{last}{part}.weight" for part in _PARTS}
    sources[f"{LAYER}hidden_norm.weight"] = f"{last}{names.mixer_norm}weight"
    sources["norm.weight"] = names.final_norm + "weight"
    for name, source in sources.items():
        if source not in stored:
            continue
        value = np.asarray(checkpoint.read(source, np.dtype(np.float32)), np.float32)
        if target.norm_plus_one and value.ndim == 1:
            value = value + 1
        if value.shape == shapes[name]:
            weights[name] = value
        elif (*value.shape[:-1], 2 * value.shape[-1]) == shapes[name]:
            weights[name][:, value.shape[-1] :] = value
    head = names.head if names.head in stored and not target.tied else names.embed
    weights["lm_head.weight"] = np.asarray(checkpoint.read(head, np.dtype(np.float32)), np.float32)[kept]
    return weights


_PARTS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
_PARTS.append("post_attention_layernorm")
