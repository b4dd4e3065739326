"""Where one request stands in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarState:
    """Masks the next token of one request and follows the tokens it takes. Not shared between requests or threads.

    End-of-sequence tokens are allowed exactly when the text so far is a whole sentence of the grammar; after one,
    or when nothing but the end can follow, only they are. A mask therefore always allows something.
    """

    def __init__(self, matcher: LLMatcher, eos_ids: Sequence[int], vocab_size: int):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask_words = -(-vocab_size // 32)
        self._eos_ids = tuple(eos_ids)
        self._taken: list[bool] = []  # per accepted token: whether the matcher holds it (EOS it does not)
        self._words, self._bits = _bits(self._eos_ids)

    @property
    def error(self) -> str | None:
        """Why the grammar gave up (its limits were reached), None while it works. Only EOS is allowed then."""
        return self._matcher.get_error() if self._matcher.is_error() else None

    @property
    def may_end(self) -> bool:
        """The text so far is whole; more may follow."""
        return self._ended or self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Nothing but end-of-sequence may follow: the request is done even where min_tokens forbids EOS."""
        return self._ended or self._matcher.is_stopped()

    @property
    def _ended(self) -> bool:
        return bool(self._taken) and not self._taken[-1]

    def mask(self, out: UInt[np.ndarray, W]) -> None:
        """Fills `out` with the allowed tokens: bit v % 32 of word v // 32 allows token v. It must be contiguous and
        may be longer than the vocabulary, beyond which nothing is allowed."""
        if self.is_complete:
            self._allow_only_end(out)
            return
        assert out.flags.c_contiguous
        assert len(out) >= self._mask_words
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, self._mask_words * 4)
        out[self._mask_words :] = 0
        if self._matcher.is_error() or not out.any():
            self._allow_only_end(out)

    def accept(self, ids: Sequence[int]) -> int:
        """Takes `ids` as far as the grammar allows and returns how many that were; the rest changes nothing."""
        for count, id in enumerate(ids):
            if self._ended:
                return count
            if id in self._eos_ids:
                if not (self._matcher.is_accepting() or self._matcher.is_error()):
                    return count
                self._taken.append(False)
            elif not self._matcher.is_stopped() and self._matcher.try_consume_tokens([id]) == 1:
                self._taken.append(True)
            else:
                return count
        return len(ids)

    def rollback(self, count: int) -> None:
        """Forgets the last `count` accepted tokens."""
        if not 0 <= count <= len(self._taken):
            raise ValueError(f"cannot roll back {count} tokens; {len(self._taken)} were accepted.")
        if count:
            held = sum(self._taken[-count:])
            del self._taken[-count:]
            if held:
                self._matcher.rollback(held)

    def draft_masks(self, draft: Sequence[int], out: UInt[np.ndarray, "R W"]) -> int:
        """Row i of `out` masks the token behind `draft[:i]`; returns how many drafted tokens the grammar allows.

        Rows behind the first forbidden token allow nothing but the end; the state itself does not move.
        """
        taken = 0
        for row in range(len(draft) + 1):
            if row == taken:
                self.mask(out[row])
                taken += row < len(draft) and self.accept(draft[row : row + 1])
            else:
                self._allow_only_end(out[row])
        self.rollback(taken)
        return taken

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next whatever the model says; may be empty."""
        return [] if self.is_complete else list(self._matcher.compute_ff_tokens())

    def fork(self) -> GrammarState:
        """An independent state at the same place, for another completion of the same prompt."""
        twin = GrammarState(self._matcher.deep_copy(), self._eos_ids, self._vocab_size)
        twin._taken = list(self._taken)
        return twin

    def _allow_only_end(self, out: UInt[np.ndarray, W]) -> None:
        out[:] = 0
        out[self._words] = self._bits


def _bits(ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Words that hold `ids`, and their bits, each word once."""
    words = np.unique(np.array([id >> 5 for id in ids], np.int64))
    bits = np.zeros(len(words), np.uint32)
    for id in ids:
        bits[np.searchsorted(words, id >> 5)] |= np.uint32(1 << (id & 31))
    return words, bits
