"""Parameters of multi-head latent attention."""

from collections.abc import Mapping

from sharding.heads import round_up
from sharding.rules import SERVE_RULES, shards
from trillion_infer.config.model import LatentSpec, ModelConfig
from trillion_infer.params.blocks import norm_params
from trillion_infer.params.tree import Declared, Part, stacked


def latent_params(
    spec: LatentSpec,
    config: ModelConfig,
    prefixes: tuple[str, ...],
    sizes: Mapping[str, int],
    input_width: int | None = None,
) -> Declared:
    """Heads are padded with zeros to a multiple of the shards.

    query: `[H, nope+rope, q_rank or M]`. key_up: `[H, nope, R]`, value_up: `[H, v, R]`. out: `[M, H, v]`.
    `input_width`: of x where it is not M.
    """
    tensor = shards(SERVE_RULES, "heads", sizes)
    width, heads, rank = config.width, round_up(spec.heads, tensor), spec.kv_rank
    wide = input_width or width
    real = slice(0, spec.heads)
    query_dim, per_head = spec.nope_dim + spec.rope_dim, spec.nope_dim + spec.value_dim

    def norm(name: str, size: int) -> Declared:
        return norm_params(tuple(p + name for p in prefixes), size)

    def up(part: slice) -> dict[str, Part]:
        return {"kv_b_proj.weight": Part((real,), lambda w: w.reshape(spec.heads, per_head, rank)[:, part])}

    low_rank = spec.q_rank is not None
    query_in = spec.q_rank or wide
    rows, per_latent = ("latent_rows", "embed"), ("heads", "head_dim", "latent")
    query_down = {"q_a_proj.weight": Part((slice(0, query_in),))}
    query_name = "q_b_proj.weight" if low_rank else "q_proj.weight"
    query = {query_name: Part((real,), lambda w: w.reshape(spec.heads, query_dim, query_in))}
    down = {"kv_a_proj_with_mqa.weight": Part((slice(0, rank + spec.rope_dim),))}
    key_up, value_up = up(slice(0, spec.nope_dim)), up(slice(spec.nope_dim, per_head))
    out = {"o_proj.weight": Part((slice(None), real), lambda w: w.reshape(width, spec.heads, spec.value_dim))}
    query_rows, kv_rows = round_up(query_in, tensor), round_up(rank + spec.rope_dim, tensor)
    return {
        "query_down": stacked(prefixes, (query_rows, wide), rows, query_down, in_axes=1) if low_rank else None,
        "query_norm": norm("q_a_layernorm.", query_in) if low_rank else None,
        "query": stacked(prefixes, (heads, query_dim, query_in), per_latent, query, in_axes=1),
        "kv_down": stacked(prefixes, (kv_rows, wide), rows, down, in_axes=1),
        "kv_norm": norm("kv_a_layernorm.", rank),
        "key_up": stacked(prefixes, (heads, spec.nope_dim, rank), per_latent, key_up),
        "value_up": stacked(prefixes, (heads, spec.value_dim, rank), per_latent, value_up),
        "out": stacked(prefixes, (width, heads, spec.value_dim), ("embed", "heads", "head_dim"), out, in_axes=2),
    }
