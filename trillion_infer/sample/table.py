"""Packed sampling parameters by slot: written when a request gets its slot, gathered for each step."""

import numpy as np
from jaxtyping import Bool, Int

from trillion_infer.sample.host import SequenceSampling
from trillion_infer.sample.rows import INDEX_FIELD, RowParams, pack


class RowTable:
    """One column of PACKED_FIELDS numbers a slot."""

    def __init__(self, slots: int):
        self._padding = pack(RowParams.padding(1))
        self._columns = np.repeat(self._padding, slots, axis=1)

    def enter(self, slot: int, sampling: SequenceSampling) -> None:
        """`slot` is a request's that is sampled so."""
        row = RowParams.padding(1)
        sampling.fill(row, 0, slot=slot, index=0)
        self._columns[:, slot] = pack(row)[:, 0]

    def gather(
        self,
        slots: Int[np.ndarray, "n"],
        index: Int[np.ndarray, "n"],
        samples: Bool[np.ndarray, "n"],
        out: Int[np.ndarray, "F R"],
    ) -> None:
        """Rows of a step into `out`: their slots' columns with the numbers of the tokens being chosen; rows that do
        not sample, and those after the n-th, are padding."""
        count = len(slots)
        out[:, count:] = self._padding
        out[:, :count] = self._columns[:, slots]
        out[INDEX_FIELD, :count] = index
        if not samples.all():
            out[:, :count][:, ~samples] = self._padding
