"""How a family's checkpoint names its tensors."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class ExpertNames:
    """How a checkpoint names and lays out experts.

    layout: "separate" (a tensor an expert and matrix, `[out, in]`), "fused" (all experts in one tensor, `[E, in, out]`,
    gate before up) or "interleaved" (the same, gate and up rows alternating).
    """

    layout: str = "separate"
    router: str = "gate."
    selection_bias: str = "e_score_correction_bias"
    shared: str = "shared_experts."


@dataclass(frozen=True)
class TensorNames:
    """How a family's checkpoint names its tensors; `{}` is the layer's number."""

    layer: str = "model.layers.{}."
    mixer: str = "self_attn."
    ffn: str = "mlp."
    mixer_norm: str = "input_layernorm."
    ffn_norm: str = "post_attention_layernorm."
    mixer_post_norm: str = "post_attention_layernorm."
    ffn_post_norm: str = "post_feedforward_layernorm."
    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm."
    head: str = "lm_head.weight"
    experts: ExpertNames = field(default_factory=ExpertNames)

    def within(self, prefix: str) -> "TensorNames":
        """The same names inside a multimodal checkpoint, which puts `prefix` before its language model's tensors."""
        outer = {name: prefix + getattr(self, name) for name in ("layer", "embed", "final_norm", "head")}
        return replace(self, **outer)
