"""Batches whose values would touch a wrong page are refused by name."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels.common.batch_values import BatchValueError, check_values

from . import naive

CASE = naive.Case(((3, 1), (20, 1), (5, 9)), dim=16)


def values(**changes):
    batch = naive.build(CASE)
    names = ("kv_lens", "page_table", "cu_q_lens", "num_seqs")
    pages = batch["kv_pool"].shape[1]
    arrays = [np.array(changes.get(name, batch[name])) for name in names]
    return arrays, {"pages": pages, "page_size": CASE.page_size, "tokens": len(batch["q"]), "op": "op"}


def test_a_sound_batch_passes_the_checks_of_values():
    arrays, sizes = values()
    check_values(*arrays, **sizes)


def test_entries_outside_the_window_are_not_checked():
    case = dataclasses.replace(CASE, options={"window": 4})
    batch = naive.build(case)
    names = ("kv_lens", "page_table", "cu_q_lens", "num_seqs")
    sizes = {"pages": batch["kv_pool"].shape[1], "page_size": case.page_size, "tokens": len(batch["q"]), "op": "op"}
    check_values(*(batch[name] for name in names), window=4, **sizes)
    with pytest.raises(BatchValueError, match="is outside 0"):
        check_values(*(batch[name] for name in names), **sizes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cu_q_lens": [0, 1, 2, 1, 1]}, "must rise"),
        ({"cu_q_lens": [0, 1, 3, 11, 11]}, "one query token each"),
        ({"num_seqs": [3, 2]}, "0 <= decode <= all"),
        ({"kv_lens": [4, 21, 3, 0]}, "op: kv_len 3 of sequence 2 is less than its 9 query tokens"),
        ({"kv_lens": [4, 21, 999, 0]}, "kv_len 999 of sequence 2 exceeds 3 blocks of 16"),
        ({"page_table": np.full((4, 3), 99)}, "is outside 0.."),
        ({"page_table": np.zeros((4, 3), np.int32)}, "has one owner"),
    ],
)
def test_values_that_would_touch_a_wrong_page_are_refused(changes, words):
    arrays, sizes = values(**changes)
    with pytest.raises(BatchValueError) as error:
        check_values(*arrays, **sizes)
    assert words in str(error.value)
