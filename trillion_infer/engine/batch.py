"""A step's inputs: packed into one int32 array on the host, taken apart inside the program."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from trillion_infer.engine.buckets import Bucket
from trillion_infer.sample import PACKED_FIELDS, RowParams, pack
from trillion_infer.schedule.plan import Row

ON_DEVICE = -1
"""Token id of a position whose token was sampled by a step the host has not seen yet."""


@dataclass(frozen=True)
class BatchLayout:
    """Where each field of a bucket's packed array `[data, size]` lies."""

    bucket: Bucket

    @property
    def row_fields(self) -> int:
        """Numbers that the choosing program reads of each row; drafts and how many they are stand last."""
        return PACKED_FIELDS + (self.bucket.width if self.bucket.verifies else 0)

    def _fields(self) -> dict[str, int]:
        t, s = self.bucket.tokens, self.bucket.sequences
        return {
            "tokens": t,
            "slots": s,
            "kv_lens": s,
            "cu_q_lens": s + 1,
            "num_seqs": 2,
            "prompt_lens": s,
            "sample_rows": s * self.bucket.width,
            "row_params": self.row_fields * s,
        }

    @property
    def size(self) -> int:
        return sum(self._fields().values())

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of one shard's row by field."""
        views, at = {}, 0
        for name, size in self._fields().items():
            views[name] = packed[at : at + size]
            at += size
        return views

    def unpack(self, packed: Int[Array, "d n"]) -> dict[str, Int[Array, "d ..."]]:
        """Fields by name, with a leading data axis."""
        fields, at = {}, 0
        for name, size in self._fields().items():
            fields[name] = packed[:, at : at + size]
            at += size
        return fields

    def rows(self, packed: Int[Array, "d n"]) -> Int[Array, "d F S"]:
        """The packed sampling parameters of each shard, and its drafts."""
        return self.unpack(packed)["row_params"].reshape(packed.shape[0], self.row_fields, self.bucket.sequences)


def pack_rows(layout: BatchLayout, rows: Sequence[Row], num_decode: int, params: RowParams, out: np.ndarray) -> None:
    """Writes one shard's rows (decode first) and their sampling parameters into its row `out` of the packed array."""
    views, width = layout.views(out), layout.bucket.width
    drafts = np.zeros((layout.row_fields - PACKED_FIELDS, layout.bucket.sequences), np.int32)
    tokens, cu = views["tokens"], views["cu_q_lens"]
    at = 0
    for i, row in enumerate(rows):
        request, stop = row.request, row.start + row.length
        if row.length == 1:
            tokens[at] = request.token(row.start)
        else:
            tokens[at : at + row.length] = _row_tokens(row)
        at += row.length
        cu[i + 1] = at
        views["kv_lens"][i] = stop
        views["slots"][i] = request.slot
        views["prompt_lens"][i] = len(request.prompt_ids)
        views["sample_rows"][i * width : (i + 1) * width] = at - 1
        if row.draft_ids:
            count = len(row.draft_ids)
            views["sample_rows"][i * width : i * width + count] = np.arange(at - 1 - count, at - 1)
            drafts[:count, i], drafts[-1, i] = row.draft_ids, count
    cu[len(rows) + 1 :] = at
    views["num_seqs"][:] = (num_decode, len(rows))
    views["row_params"][:] = np.concatenate([pack(params), drafts]).ravel()


def _row_tokens(row: Row) -> list[int]:
    """Ids of the row's positions; a recomputed request's span both prompt and answer."""
    request, stop = row.request, row.start + row.length
    prompt = request.prompt_ids
    if stop <= len(prompt):
        return prompt[row.start : stop]
    if row.draft_ids:
        return [request.token(row.start), *row.draft_ids]
    return [request.token(position) for position in range(row.start, stop)]


def token_positions(
    tokens: int, kv_lens: Int[Array, "S"], cu_q_lens: Int[Array, "S+1"]
) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
    """Sequence and position of each query token; padding gets the last sequence and position 0."""
    index = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(cu_q_lens[1:], index, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, kv_lens.shape[0] - 1)
    position = kv_lens[sequence] - cu_q_lens[sequence + 1] + index
    return sequence, jnp.where(index < cu_q_lens[-1], position, 0)
