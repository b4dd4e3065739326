"""Answered conversations as padded batches, by grain: the same order for the same seed, a share for each process."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from trillion_infer.core.errors import ConfigError
from trillion_infer.train.answers import Answered


def batches(
    examples: Sequence[Answered], rows: int, length: int, seed: int, shard: int = 0, shards: int = 1
) -> grain.DatasetIterator:
    """Endless batches {"tokens" [rows, length], "answers" [rows], "lengths" [rows]} of this shard's examples.

    The iterator's get_state and set_state go on exactly where it stood. Raises ConfigError for too few examples.
    """
    usable = [each for each in examples if len(each.prompt_ids) + 2 < length and len(each.answer_ids) > 2][
        shard::shards
    ]
    if len(usable) < rows:
        raise ConfigError(
            f"{len(usable)} answered conversations shorter than {length} tokens fall to this process, fewer than the "
            f"{rows} rows of a batch; give more prompts, a larger length or a smaller batch."
        )
    dataset = grain.MapDataset.source(usable).seed(seed).shuffle().repeat()
    return iter(dataset.map(lambda each: _padded(each, length)).batch(rows, drop_remainder=True).to_iter_dataset())


def _padded(example: Answered, length: int) -> dict[str, Any]:
    ids = example.ids[:length]
    tokens = np.zeros(length, np.int32)
    tokens[: len(ids)] = ids
    numbers = {"answers": len(example.prompt_ids), "lengths": len(ids)}
    return {"tokens": tokens, **{name: np.int32(value) for name, value in numbers.items()}}


def drafted_vocabulary(examples: Sequence[Answered], vocab: int, size: int) -> np.ndarray:
    """The `size` tokens that answers use most, ascending; ties and what is left over by id."""
    counts = Counter(token for each in examples for token in each.answer_ids)
    order = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return np.array(sorted(order[:size]), np.int32)
