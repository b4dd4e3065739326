"""A decoder as data: what each layer mixes, feeds forward and caches. Family files in models/ fill these in."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies stretch beyond the length a model was trained at.

    kind: linear | dynamic | llama3 | yarn. `original_len` is the trained length. `attention_factor` multiplies
    cos and sin (yarn). `truncate` rounds yarn's correction range to whole dimensions.
    """

    kind: str
    factor: float
    original_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the first `dim` values of a head.

    interleaved: pairs are (0,1),(2,3),… instead of (0,dim/2),(1,dim/2+1),….
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention. Position i sees (i-window, i], or its own chunk, or everything before it.

    qk_norm: None | "rms" (learned, per head, before rope) | "l2" (no weight, after rope, where rope is used).
    sinks: one learned logit per head joins the softmax. query_growth: (scale, floor): queries of layers without
    rope are multiplied by 1 + scale*log1p(floor((pos+1)/floor)) (Llama 4).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    qk_norm: str | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    query_growth: tuple[float, int] | None = None


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): a token's cache is kv_rank + rope_dim values."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: Rope
    norm_eps: float = 1e-6
    window: None = None
    chunk: None = None


@dataclass(frozen=True)
class DenseSpec:
    """Gated feed-forward: down(activation(gate(x)) * up(x)). activation: silu | gelu_tanh."""

    width: int
    activation: str = "silu"


@dataclass(frozen=True)
class RouterSpec:
    """Which experts a token visits and with what weight.

    score: softmax | sigmoid (before selection) | topk_softmax (softmax over the chosen logits).
    selection_bias: added to scores for the choice only. groups: experts compete in `groups` groups of which the
    best `top_groups` stay (by the sum of their two best scores). renormalise: chosen weights sum to one, then are
    multiplied by `scale`. on_input: the weight multiplies the expert's input instead of its output. bias: learned
    bias of the router's logits.
    """

    score: str
    selection_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = False
    scale: float = 1.0
    on_input: bool = False
    bias: bool = False


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts, with an optional shared expert every token visits."""

    experts: int
    top_k: int
    width: int
    router: RouterSpec
    shared_width: int = 0
    activation: str = "silu"
    biases: bool = False


MixerSpec = AttentionSpec | LatentSpec
FFNSpec = DenseSpec | MoESpec


@dataclass(frozen=True)
class LayerSpec:
    """residual: "pre" (norm before each block) | "sandwich" (norm before and after each block, Gemma 3)."""

    mixer: MixerSpec
    ffn: FFNSpec
    residual: str = "pre"


@dataclass(frozen=True)
class Segment:
    """A period of layers that repeats; its parameters are stacked over the repeats and run by one scan."""

    period: tuple[LayerSpec, ...]
    repeats: int


@dataclass(frozen=True)
class CacheKey:
    """Layers with equal keys share one KV pool and one page table."""

    kind: str
    heads: int
    dim: int
    window: int | None
    chunk: int | None

    @property
    def name(self) -> str:
        reach = f"window{self.window}" if self.window else f"chunk{self.chunk}" if self.chunk else "full"
        return f"{self.kind}_{reach}"


def cache_key(mixer: MixerSpec) -> CacheKey:
    """The pool a mixer's KV lives in. For latent layers `dim` is the width of one token's entry."""
    if isinstance(mixer, LatentSpec):
        return CacheKey("latent", 1, mixer.kv_rank + mixer.rope_dim, None, None)
    return CacheKey("attention", mixer.kv_heads, mixer.head_dim, mixer.window, mixer.chunk)


@dataclass(frozen=True)
class ModelConfig:
    """Everything the engine needs to know of a decoder.

    norm_plus_one: RMSNorm multiplies by 1 + weight. embed_scale multiplies embeddings. logit_scale multiplies and
    logit_cap soft-caps the logits.
    """

    family: str
    vocab: int
    width: int
    segments: tuple[Segment, ...]
    max_len: int
    norm_eps: float
    tied: bool
    eos_ids: frozenset[int] = frozenset()
    norm_plus_one: bool = False
    embed_scale: float = 1.0
    logit_cap: float | None = None
    dtype: str = "bfloat16"

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for segment in self.segments for _ in range(segment.repeats) for layer in segment.period)

    @cached_property
    def cache_keys(self) -> tuple[CacheKey, ...]:
        """Distinct pools in order of first use."""
        return tuple(dict.fromkeys(cache_key(layer.mixer) for layer in self.layers))

    def layers_of(self, key: CacheKey) -> int:
        return sum(cache_key(layer.mixer) == key for layer in self.layers)

    @property
    def prefix_depends_on_length(self) -> bool:
        """Dynamic rope makes a token's KV depend on the whole prompt's length: a shared prefix cannot be reused."""
        return any(
            layer.mixer.rope is not None
            and layer.mixer.rope.scaling is not None
            and layer.mixer.rope.scaling.kind == "dynamic"
            for layer in self.layers
        )


def segment_layers(layers: Sequence[LayerSpec], longest_period: int = 12) -> tuple[Segment, ...]:
    """Cut a list of layers into segments, each time taking the period that covers the most layers (shortest on ties).

    A period counts only if it repeats; otherwise one layer is a segment of its own.
    """
    segments, start = [], 0
    while start < len(layers):
        best_period, best_repeats = 1, 1
        for period in range(1, min(longest_period, len(layers) - start) + 1):
            head = layers[start : start + period]
            repeats = 1
            while layers[start + repeats * period : start + (repeats + 1) * period] == head:
                repeats += 1
            covered = period * repeats if repeats > 1 or period == 1 else 0
            if covered > best_period * best_repeats:
                best_period, best_repeats = period, repeats
        segments.append(Segment(tuple(layers[start : start + best_period]), best_repeats))
        start += best_period * best_repeats
    return tuple(segments)
