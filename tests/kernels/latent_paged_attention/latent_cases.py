"""Dense latent attention in numpy float64, and batches to try it on."""

from dataclasses import dataclass

import numpy as np

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Case:
    """A ragged batch: (cached_len, extend_len) of each sequence, decode first, and the shapes around it.

    blocks: least width of the page table, so that batches of different lengths share shapes.
    """

    lens: tuple[tuple[int, int], ...]
    heads: int = 4
    rank: int = 32
    rope: int = 16
    width: int = 48
    page_size: int = 16
    layers: int = 2
    layer: int = 1
    padded_tokens: int = 3
    padded_seqs: int = 1
    dtype: str = "float32"
    blocks: int = 0
    seed: int = 0

    @property
    def scale(self) -> float:
        return (self.rank + self.rope) ** -0.5


@dataclass(frozen=True)
class Batch:
    """Arguments of the op in its order, and the history of each sequence in float64."""

    args: tuple[np.ndarray, ...]
    histories: list[np.ndarray]


def build(case: Case) -> Batch:
    """Every slot that no query may read holds NaN; table entries at and past kv_len are out of range."""
    import ml_dtypes  # noqa: F401  (names bfloat16 to numpy)

    rng = np.random.default_rng(case.seed)
    dtype = np.dtype(case.dtype)
    extends = [extend for _, extend in case.lens]
    total, sequences = sum(extends), len(case.lens) + case.padded_seqs
    page_counts = [-(-(c + e) // case.page_size) for c, e in case.lens]
    blocks = max([case.blocks, *(n + 1 for n in page_counts)])
    pages = max(sequences * case.blocks, sum(page_counts)) + 2

    def draw(*shape):
        values = rng.normal(size=(total + case.padded_tokens, *shape)).astype(dtype)
        values[total:] = np.nan
        return values

    q_latent, q_rope = draw(case.heads, case.rank), draw(case.heads, case.rope)
    latent, k_rope = draw(case.rank), draw(case.rope)
    pool = np.full((case.layers, pages, case.page_size, case.width), np.nan, dtype)
    table = np.full((sequences, max(1, blocks)), pages + 7, np.int32)
    free = list(rng.permutation(pages))
    cu = np.full(sequences + 1, total, np.int32)
    cu[: len(extends) + 1] = np.cumsum([0, *extends])
    kv_lens = np.zeros(sequences, np.int32)
    histories = []
    for s, (cached, extend) in enumerate(case.lens):
        kv_lens[s] = cached + extend
        for b in range(page_counts[s]):
            table[s, b] = free.pop()
        old = rng.normal(size=(cached, case.rank + case.rope)).astype(dtype)
        for i in range(cached):
            row = pool[case.layer, table[s, i // case.page_size], i % case.page_size]
            row[:] = 0
            row[: old.shape[1]] = old[i]
        new = np.concatenate([latent[cu[s] : cu[s + 1]], k_rope[cu[s] : cu[s + 1]]], axis=1)
        histories.append(np.concatenate([old, new]).astype(np.float64))
    decode = next((i for i, e in enumerate(extends) if e != 1), len(extends))
    num_seqs = np.array([decode, len(extends)], np.int32)
    layer = np.int32(case.layer)
    return Batch((q_latent, q_rope, latent, k_rope, pool, layer, kv_lens, table, cu, num_seqs), histories)


def attend(case: Case, batch: Batch) -> np.ndarray:
    """The output that the op must have, `[T, H, Rl]` in float64; padding rows are zero."""
    q = np.concatenate(batch.args[:2], axis=2).astype(np.float64)
    out = np.zeros((*q.shape[:2], case.rank))
    token = 0
    for (cached, extend), history in zip(case.lens, batch.histories, strict=True):
        for i in range(extend):
            keys = history[: cached + i + 1]
            scores = q[token] @ keys.T * case.scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[token] = weights / weights.sum(-1, keepdims=True) @ keys[:, : case.rank]
            token += 1
    return out


def written(case: Case, batch: Batch) -> np.ndarray:
    """The pool that the op must return; the unused lanes of written rows are zero."""
    pool, table = batch.args[4].copy(), batch.args[7]
    for s, (cached, extend) in enumerate(case.lens):
        for i in range(cached, cached + extend):
            row = pool[case.layer, table[s, i // case.page_size], i % case.page_size]
            row[:] = 0
            row[: case.rank + case.rope] = batch.histories[s][i]
    return pool


def check(case: Case, op) -> None:
    """Asserts that `op(*args, scale=…)` gives the right output and pool for this batch."""
    batch = build(case)
    out, pool = (np.asarray(a) for a in op(*batch.args, scale=case.scale))
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(out.astype(np.float64), attend(case, batch), atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(pool.astype(np.float32), written(case, batch).astype(np.float32))
