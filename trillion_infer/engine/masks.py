"""Which tokens each position that yields logits may have: grammars, forbidden words, minimal lengths."""

from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from trillion_infer.engine.buckets import Bucket
from trillion_infer.engine.programs import Programs
from trillion_infer.sample.bitmask import allow_all, forbid
from trillion_infer.schedule.plan import Row


class TokenMasks:
    """Masks of a step's rows; one that allows everything lies on the device for each shape. vocab: of the sampler."""

    def __init__(self, programs: Programs, vocab: int):
        self._programs = programs
        self._bits = -(-vocab // 32) * 32
        self._no_mask = programs.place(np.False_, P())
        self._with_mask = programs.place(np.True_, P())
        self._open: dict[int, Any] = {}

    def make(self, bucket: Bucket, shards: int, rows: list[Row], places: list[int]) -> tuple[Any, Any]:
        """Allowed-token bits of every position that yields logits, `bucket.width` a row, and whether any is not set.

        Row `rows[i]` stands at place `places[i]` of the `shards` times `bucket.sequences` there are.
        """
        total, grammars = bucket.sequences * bucket.width * shards, []
        forbidden: dict[int, list[int]] = {}
        for row, place in zip(rows, places, strict=True):
            if row.samples and row.request.sampling.may_forbid:
                _forbid(row, place * bucket.width, forbidden)
            if row.samples and row.request.grammar:
                grammars.append((row.request.grammar, row, place * bucket.width))
        if not forbidden and not grammars:
            if total not in self._open:
                self._open[total] = self._programs.place(allow_all(total, self._bits), P())
            return self._open[total], self._no_mask
        mask = allow_all(total, self._bits)
        for grammar, row, first in grammars:
            grammar.draft_masks(row.draft_ids, mask[first : first + len(row.draft_ids) + 1])
        for place, tokens in forbidden.items():
            forbid(mask[place], tokens)
        return self._programs.place(mask, P()), self._with_mask


def _forbid(row: Row, first: int, forbidden: dict[int, list[int]]) -> None:
    """The tokens that a row's masks, from the one at `first` on, must exclude."""
    request, sampling = row.request, row.request.sampling
    index = request.num_output - 1
    for drafted in range(len(row.draft_ids) + 1):
        banned: list[int] = []
        if sampling.needs_last_tokens:
            banned = sampling.bad_words.next_forbidden([*request.output_ids, *row.draft_ids[:drafted]])
        if index + drafted < sampling.params.min_tokens:
            banned.extend(sampling.guarded)
        if banned:
            forbidden[first + drafted] = banned
