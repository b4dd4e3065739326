"""Refusal of a ragged batch whose values would read or write a wrong page: what no check of shapes can see."""

import numpy as np


class BatchValueError(ValueError):
    """A value of a batch is out of range; the message names the operation, the sequence, the block and the value."""


def check_values(
    kv_lens: np.ndarray,
    page_table: np.ndarray,
    cu_q_lens: np.ndarray,
    num_seqs: np.ndarray,
    *,
    op: str,
    pages: int,
    page_size: int,
    tokens: int,
    window: int | None = None,
    chunk: int | None = None,
) -> None:
    """Raises BatchValueError where a batch (host arrays, as given to the op) would read or write a wrong page.

    Args:
      op: the operation, for the message. pages: P of the pool. page_size: positions of a whole page.
      tokens: T, the bucket's query tokens.
    """
    decode, total = (int(n) for n in num_seqs)
    sequences, blocks = page_table.shape
    if not 0 <= decode <= total <= sequences:
        raise BatchValueError(f"{op}: num_seqs is [{decode}, {total}]; 0 <= decode <= all <= {sequences} must hold.")
    lens = np.diff(np.asarray(cu_q_lens, np.int64)[: total + 1])
    if cu_q_lens[0] != 0 or (lens < 0).any() or cu_q_lens[total] > tokens:
        given = list(map(int, cu_q_lens[: total + 1]))
        raise BatchValueError(f"{op}: cu_q_lens must rise from 0 to at most {tokens} tokens; got {given}.")
    if (lens[:decode] != 1).any():
        raise BatchValueError(
            f"{op}: the first {decode} sequences must have one query token each; they have {lens[:decode].tolist()}."
        )
    owner: dict[int, tuple[int, int]] = {}
    for s in range(total):
        kv_len, query = int(kv_lens[s]), int(lens[s])
        if kv_len < query:
            raise BatchValueError(f"{op}: kv_len {kv_len} of sequence {s} is less than its {query} query tokens.")
        if kv_len > blocks * page_size:
            raise BatchValueError(f"{op}: kv_len {kv_len} of sequence {s} exceeds {blocks} blocks of {page_size}.")
        if not query:
            continue
        position = kv_len - query
        first = max(
            0,
            position - window + 1 if window is not None else 0,
            position // chunk * chunk if chunk is not None else 0,
        )
        for block in range(first // page_size, -(-kv_len // page_size)):
            page = int(page_table[s, block])
            if not 0 <= page < pages:
                raise BatchValueError(f"{op}: page {page} of block {block} of sequence {s} is outside 0..{pages - 1}.")
            if (block + 1) * page_size <= position:
                continue
            other = owner.setdefault(page, (s, block))
            if other != (s, block):
                raise BatchValueError(
                    f"{op}: page {page} of block {block} of sequence {s} is written, and is block {other[1]} of "
                    f"sequence {other[0]} as well; a page that is written has one owner."
                )
