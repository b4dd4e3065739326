"""What the families' config readers share."""

from collections.abc import Mapping, Sequence
from typing import Any

from trillion_infer.config.hf import HFConfig, eos_union
from trillion_infer.config.model import LayerSpec, ModelConfig, segment_layers

DTYPES = ("float32", "bfloat16", "float16")


def head_sizes(config: HFConfig) -> tuple[int, int, int]:
    """Query heads, KV heads, head width."""
    heads = config.take("num_attention_heads")
    return (
        heads,
        config.take("num_key_value_heads", heads),
        config.take("head_dim", config.take("hidden_size") // heads),
    )


def model_config(
    config: HFConfig, family: str, layers: Sequence[LayerSpec], generation: Mapping[str, Any], **extra: Any
) -> ModelConfig:
    """Fields every family reads alike; refuses attributes that are left over."""
    eos = eos_union({"eos_token_id": config.take("eos_token_id", None)}, generation)
    dtype = config.take("dtype", config.take("torch_dtype", "bfloat16"))
    fields = {
        "vocab": config.take("vocab_size"),
        "width": config.take("hidden_size"),
        "max_len": longest_context(config.take("max_position_embeddings"), layers),
        "norm_eps": config.take("rms_norm_eps"),
        "tied": config.take("tie_word_embeddings", False),
        "dtype": config.expect("dtype", dtype, DTYPES),
    }
    config.finish()
    return ModelConfig(family=family, segments=segment_layers(list(layers)), eos_ids=eos, **{**fields, **extra})


def longest_context(positions: int, layers: Sequence[LayerSpec]) -> int:
    """Tokens a model's context holds: linear, dynamic and yarn scaling stretch what its config calls positions."""
    lengths = [positions]
    for layer in layers:
        scaling = layer.mixer.rope.scaling if layer.mixer.rope else None
        if scaling is not None and scaling.kind != "llama3":
            lengths.append(int(scaling.original_len * scaling.factor))
    return max(lengths)
