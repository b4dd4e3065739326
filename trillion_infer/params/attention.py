"""Parameters of grouped-query attention."""

from collections.abc import Mapping

from sharding.heads import HeadPlan
from sharding.rules import SERVE_RULES, shards
from trillion_infer.config.model import AttentionSpec, ModelConfig
from trillion_infer.params.blocks import norm_params
from trillion_infer.params.tree import WHOLE, Declared, Part, stacked


def head_plan(spec: AttentionSpec, sizes: Mapping[str, int]) -> HeadPlan:
    """The physical heads of the weights on a mesh of these sizes."""
    return HeadPlan(spec.heads, spec.kv_heads, shards(SERVE_RULES, "kv_heads", sizes))


def attention_params(
    spec: AttentionSpec,
    config: ModelConfig,
    prefixes: tuple[str, ...],
    sizes: Mapping[str, int],
    input_width: int | None = None,
) -> Declared:
    """q, k, v in one product, laid out by physical KV head so that a shard holds whole groups (see HeadPlan).

    qkv: `[K, G+2, D, M]`: the G query heads of KV head k, then its key and its value. out: `[M, K, G, D]`.
    `input_width`: of x where it is not M.
    """
    plan = head_plan(spec, sizes)
    kv, group, dim, width = plan.physical_kv_heads, plan.group, spec.head_dim, config.width
    head_axes = ("kv_heads", "heads_in_group", "head_dim")
    places = {"q": slice(0, group), "k": group, "v": group + 1}

    def rows(which: str, tail: tuple[int, ...]) -> Part:
        heads = spec.heads if which == "q" else spec.kv_heads
        place = plan.place_queries if which == "q" else plan.place_keys
        return Part((slice(None), places[which]), lambda w: place(w.reshape(heads, dim, *tail)))

    def head_norm(name: str) -> Declared | None:
        return norm_params(tuple(p + name for p in prefixes), dim) if spec.qk_norm == "rms" else None

    weights = {f"{which}_proj.weight": rows(which, (-1,)) for which in places}
    biases = {f"{which}_proj.bias": rows(which, ()) for which in places}
    out = {"o_proj.weight": Part((), lambda w: _place_out(plan, w, dim))}
    sinks = {"sinks": Part((), plan.place_queries)}
    qkv = (kv, group + 2, dim, input_width or width)
    return {
        "qkv": stacked(prefixes, qkv, (*head_axes, "embed"), weights, in_axes=1),
        "out": stacked(prefixes, (width, kv, group, dim), ("embed", *head_axes), out, in_axes=3),
        "qkv_bias": stacked(prefixes, qkv[:3], head_axes, biases) if spec.qkv_bias else None,
        "out_bias": stacked(prefixes, (width,), ("embed",), {"o_proj.bias": WHOLE}) if spec.out_bias else None,
        "sinks": stacked(prefixes, (kv, group), head_axes[:2], sinks, dtype="float32") if spec.sinks else None,
        "q_norm": head_norm("q_norm."),
        "k_norm": head_norm("k_norm."),
    }


def _place_out(plan: HeadPlan, w, dim: int):
    """o_proj `[M, H*D]` -> `[M, K, G, D]` over physical heads."""
    by_head = w.reshape(w.shape[0], plan.heads, dim)
    if (plan.physical_heads, plan.replicas) == (plan.heads, 1):
        return by_head.reshape(w.shape[0], plan.physical_kv_heads, plan.group, dim)
    return plan.place_queries(by_head.swapaxes(0, 1)).transpose(2, 0, 1, 3)
