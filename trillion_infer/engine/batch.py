"""A step's inputs: packed into one int32 array on the host, taken apart inside the program."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from trillion_infer.engine.buckets import Bucket
from trillion_infer.sample import PACKED_FIELDS
from trillion_infer.sample.table import RowTable
from trillion_infer.schedule.plan import Row

ON_DEVICE = -1
"""Token id of a position whose token was sampled by a step the host has not seen yet."""


@dataclass(frozen=True)
class BatchLayout:
    """Where each field of a bucket's packed array `[data, size]` lies.

    following: the token after a row's last, ON_DEVICE where this step finds it. draft_next: a model is to draft.
    """

    bucket: Bucket

    @property
    def row_fields(self) -> int:
        """Numbers that the choosing program reads of each row; drafts and how many they are stand last."""
        return PACKED_FIELDS + (self.bucket.width if self.bucket.verifies else 0)

    @cached_property
    def _fields(self) -> dict[str, int]:
        t, s = self.bucket.tokens, self.bucket.sequences
        return {
            "tokens": t,
            "slots": s,
            "kv_lens": s,
            "cu_q_lens": s + 1,
            "num_seqs": 2,
            "prompt_lens": s,
            "following": s,
            "draft_next": s,
            "sample_rows": s * self.bucket.width,
            "row_params": self.row_fields * s,
        }

    @cached_property
    def size(self) -> int:
        return sum(self._fields.values())

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of one shard's row by field."""
        views, at = {}, 0
        for name, size in self._fields.items():
            views[name] = packed[at : at + size]
            at += size
        return views

    def unpack(self, packed: Int[Array, "d n"]) -> dict[str, Int[Array, "d ..."]]:
        """Fields by name, with a leading data axis."""
        fields, at = {}, 0
        for name, size in self._fields.items():
            fields[name] = packed[:, at : at + size]
            at += size
        return fields

    def rows(self, packed: Int[Array, "d n"]) -> Int[Array, "d F S"]:
        """The packed sampling parameters of each shard, and its drafts."""
        return self.unpack(packed)["row_params"].reshape(packed.shape[0], self.row_fields, self.bucket.sequences)


def pack_rows(layout: BatchLayout, rows: Sequence[Row], num_decode: int, table: RowTable, out: np.ndarray) -> None:
    """Writes one shard's rows (decode first) and their sampling parameters into its zeroed row `out`.

    The scheduler has counted a row's token as in flight already, so it is number num_output - 1.
    """
    views, count = layout.views(out), len(rows)
    tokens: list[int] = []
    numbers = []
    for row in rows:
        request = row.request
        prompt, output = len(request.prompt_ids), request.output_ids
        if row.length > 1:
            tokens += _row_tokens(row)
        elif row.start < prompt:
            tokens.append(request.prompt_ids[row.start])
        else:
            at = row.start - prompt
            tokens.append(output[at] if at < len(output) else ON_DEVICE)
        index = len(output) + request.num_in_flight - 1
        stop = row.start + row.length
        after = request.next_id if row.samples else request.token(stop)
        numbers.append((request.slot, prompt, index, stop, row.length, row.samples, after, row.lookahead))
    slots, prompts, indices, stops, lengths, samples, following, draft_next = (
        np.array(numbers, np.int32).reshape(count, 8).T
    )
    ends = np.cumsum(lengths)
    views["tokens"][: len(tokens)] = tokens
    views["slots"][:count] = slots
    views["kv_lens"][:count] = stops
    views["prompt_lens"][:count] = prompts
    views["following"][:count] = following
    views["draft_next"][:count] = draft_next
    views["cu_q_lens"][1 : count + 1] = ends
    views["cu_q_lens"][count + 1 :] = len(tokens)
    views["num_seqs"][:] = (num_decode, count)
    width = layout.bucket.width
    views["sample_rows"][: count * width] = np.repeat(ends - 1, width)
    params = views["row_params"].reshape(layout.row_fields, layout.bucket.sequences)
    table.gather(slots, indices, samples != 0, params[:PACKED_FIELDS])
    if layout.bucket.verifies:
        _pack_drafts(rows, ends, width, views["sample_rows"], params[PACKED_FIELDS:])


def _pack_drafts(
    rows: Sequence[Row], ends: Int[np.ndarray, "n"], width: int, sample_rows: np.ndarray, drafts: np.ndarray
) -> None:
    """Each row's drafts, how many they are, and the places whose logits judge them."""
    for i, row in enumerate(rows):
        if row.draft_ids:
            count, last = len(row.draft_ids), int(ends[i]) - 1
            sample_rows[i * width : i * width + count] = np.arange(last - count, last)
            drafts[:count, i], drafts[-1, i] = row.draft_ids, count


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
