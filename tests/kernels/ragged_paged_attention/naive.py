"""Dense attention in numpy float64, and batches to try it on."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Case:
    """A ragged batch: (cached_len, extend_len) of each sequence, decode first, and the shapes around it."""

    lens: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    page_size: int = 16
    layers: int = 2
    layer: int = 1
    padded_tokens: int = 3
    padded_seqs: int = 1
    blocks: int = 1  # at least so many columns in the page table
    pages: int = 1  # at least so many pages in the pool
    pool_dtype: str = "float32"
    q_dtype: str = "float32"
    options: dict = field(default_factory=dict)
    sinks: bool = False
    pack: int = 1
    lanes: int | None = None  # of a row of the pool; None: dim
    seed: int = 0


def stored(x: np.ndarray, scale: float, dtype: np.dtype) -> np.ndarray:
    x = x.astype(np.float32) / np.float32(scale)
    if dtype.kind == "i":
        return np.clip(np.round(x), -127, 127).astype(dtype)
    return x.astype(dtype)


def put(row: np.ndarray, value: np.ndarray) -> None:
    """Fills a row of the pool, whose lanes past the head dim are zero."""
    row[...] = 0
    row[:, : value.shape[-1]] = value


def first_visible(position: int, window: int | None, chunk: int | None) -> int:
    low = 0
    if window is not None:
        low = max(low, position - window + 1)
    if chunk is not None:
        low = max(low, position // chunk * chunk)
    return low


def build(case: Case) -> dict:
    """Arguments of the op as numpy arrays, and `keys`, `values`: the float64 history of each sequence.

    Every slot of the pool that no query may read holds NaN (or the extreme of an integer dtype); entries of
    the page table that no query may use are out of range.
    """
    import ml_dtypes  # noqa: F401  (names the small float dtypes to numpy)

    rng = np.random.default_rng(case.seed)
    dtype, pool_dtype = np.dtype(case.q_dtype), np.dtype(case.pool_dtype)
    sequences = len(case.lens) + case.padded_seqs
    extends = [extend for _, extend in case.lens]
    total = sum(extends)
    blocks = max([case.blocks - 1, *(-(-(c + e) // case.page_size) for c, e in case.lens)]) + 1
    pages = max(case.pages, sum(-(-(c + e) // case.page_size) for c, e in case.lens) + 2)

    def draw(tokens, heads):
        return rng.normal(size=(tokens, heads, case.dim)).astype(dtype)

    q, k, v = (draw(total + case.padded_tokens, h) for h in (case.heads, case.kv_heads, case.kv_heads))
    for array in (q, k, v):
        array[total:] = np.nan
    shape = (
        case.layers,
        pages,
        case.page_size,
        2 * case.kv_heads // case.pack,
        case.pack,
        case.lanes or case.dim,
    )
    pool = np.full(shape, 127 if pool_dtype.kind == "i" else np.nan).astype(pool_dtype)
    merged = pool.reshape(*shape[:3], case.kv_heads, 2, -1)
    table = np.full((sequences, blocks), pages + 7, np.int32)
    free = list(rng.permutation(pages))
    k_scale, v_scale = (case.options.get(name) or 1.0 for name in ("k_scale", "v_scale"))
    window, chunk = case.options.get("window"), case.options.get("chunk")
    keys, values, token = [], [], 0

    for s, (cached, extend) in enumerate(case.lens):
        history = [draw(cached, case.kv_heads) for _ in range(2)]
        low = first_visible(cached, window, chunk) if extend else cached + extend
        new = [x[token : token + extend] for x in (k, v)]
        token += extend
        full = [np.concatenate(pair) for pair in zip(history, new, strict=True)]
        encoded = [stored(x, scale, pool_dtype) for x, scale in zip(full, (k_scale, v_scale), strict=True)]
        keys.append(encoded[0].astype(np.float64) * k_scale)
        values.append(encoded[1].astype(np.float64) * v_scale)
        for b in range(low // case.page_size, -(-(cached + extend) // case.page_size)):
            table[s, b] = free.pop()
        for i in range(low, cached):
            for j in range(2):
                put(merged[case.layer, table[s, i // case.page_size], i % case.page_size, :, j], encoded[j][i])
    cu = np.zeros(sequences + 1, np.int32)
    cu[1 : len(extends) + 1] = np.cumsum(extends)
    cu[len(extends) + 1 :] = total
    decode = next((i for i, e in enumerate(extends) if e != 1), len(extends))
    kv_lens = np.zeros(sequences, np.int32)
    kv_lens[: len(extends)] = [c + e for c, e in case.lens]
    return {
        "q": q,
        "k": k,
        "v": v,
        "kv_pool": pool,
        "layer": np.int32(case.layer),
        "kv_lens": kv_lens,
        "page_table": table,
        "cu_q_lens": cu,
        "num_seqs": np.array([decode, len(extends)], np.int32),
        "keys": keys,
        "values": values,
        "sinks": rng.normal(size=case.heads).astype(np.float32) if case.sinks else None,
    }


def attend(case: Case, batch: dict) -> np.ndarray:
    """The output that the op must have, `[T, H, D]` in float64; padding rows are zero."""
    out = np.zeros(batch["q"].shape, np.float64)
    scale, cap = case.options["scale"], case.options.get("soft_cap")
    for s, (cached, extend) in enumerate(case.lens):
        tokens = slice(batch["cu_q_lens"][s], batch["cu_q_lens"][s] + extend)
        q = batch["q"][tokens].astype(np.float64).reshape(extend, case.kv_heads, case.heads // case.kv_heads, case.dim)
        scores = np.einsum("qkgd,ckd->qkgc", q, batch["keys"][s], optimize=True) * scale
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        for i in range(extend):
            low = first_visible(cached + i, case.options.get("window"), case.options.get("chunk"))
            scores[i, ..., :low] = scores[i, ..., cached + i + 1 :] = -np.inf
        if batch["sinks"] is not None:
            sinks = batch["sinks"].astype(np.float64).reshape(1, *q.shape[1:3], 1)
            scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:3], 1))], -1)
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
        weights = weights[..., : cached + extend]
        out[tokens] = np.einsum("qkgc,ckd->qkgd", weights, batch["values"][s], optimize=True).reshape(
            extend, case.heads, case.dim
        )
    return out


def written(case: Case, batch: dict) -> np.ndarray:
    """The pool that the op must return."""
    pool = batch["kv_pool"].copy()
    merged = pool.reshape(*pool.shape[:3], case.kv_heads, 2, -1)
    scales = [case.options.get(name) or 1.0 for name in ("k_scale", "v_scale")]
    for s, (cached, extend) in enumerate(case.lens):
        for i in range(cached, cached + extend):
            page = batch["page_table"][s, i // case.page_size]
            for j, name in enumerate(("keys", "values")):
                row = stored(batch[name][s][i], scales[j], pool.dtype)
                put(merged[case.layer, page, i % case.page_size, :, j], row)
    return pool
