"""Answered conversations as padded batches, by grain: the same order for the same seed, a share for each process."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trillion_infer.core.errors import ConfigError
from trillion_infer.train.answers import Answered

if TYPE_CHECKING:
    import grain


def batches(
    examples: Sequence[Answered], rows: int, length: int, seed: int, shard: int = 0, shards: int = 1
) -> "grain.DatasetIterator":
    """Endless batches of this shard's examples: as `padded` gives them, each value with a first axis of `rows`.

    The iterator's get_state and set_state go on exactly where it stood. Raises ConfigError for too few examples.
    """
    import grain

    chosen = usable(examples, length, shard, shards)
    if len(chosen) < rows:
        raise ConfigError(
            f"{len(chosen)} answered conversations shorter than {length} tokens fall to this process, fewer than the "
            f"{rows} rows of a batch; give more prompts, a larger length or a smaller batch."
        )
    made = [padded(each, length, number) for number, each in enumerate(chosen)]
    dataset = grain.MapDataset.source(made).seed(seed).shuffle().repeat()
    return iter(dataset.batch(rows, drop_remainder=True).to_iter_dataset())


def usable(examples: Sequence[Answered], length: int, shard: int = 0, shards: int = 1) -> list[Answered]:
    """This shard's examples whose prompt leaves room for some of an answer."""
    return [e for e in examples if len(e.prompt_ids) + 2 < length and len(e.answer_ids) > 2][shard::shards]


def padded(example: Answered, length: int, number: int) -> dict[str, Any]:
    """tokens `[length]`, answers: where the answer begins, lengths: where it ends, index: the number given."""
    ids = example.ids[:length]
    tokens = np.zeros(length, np.int32)
    tokens[: len(ids)] = ids
    numbers = {"answers": len(example.prompt_ids), "lengths": len(ids), "index": number}
    return {"tokens": tokens, **{name: np.int32(value) for name, value in numbers.items()}}


def drafted_vocabulary(examples: Sequence[Answered], vocab: int, size: int) -> np.ndarray:
    """The `size` tokens that answers use most, ascending; ties and what is left over by id."""
    counts = Counter(token for each in examples for token in each.answer_ids)
    order = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return np.array(sorted(order[:size]), np.int32)
