"""Texts that must not be produced, as sequences of token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from trillion_infer.core.errors import InvalidRequestError


@dataclass(frozen=True)
class BadWords:
    """single: tokens that are a bad word by themselves; longer: the other sequences, which are stopped at their last
    token. Both spellings of a word count: as it is and after a space. A word that the model spells with other
    tokens than the tokenizer does is not seen, as in other engines."""

    single: frozenset[int] = frozenset()
    longer: tuple[tuple[int, ...], ...] = field(default=())

    @classmethod
    def encode(cls, words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> Self:
        """`encode` turns text to ids without special tokens. Refuses a word that has none."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(int(token) for token in encode(text))
                if not ids:
                    raise InvalidRequestError(
                        f"bad_words holds {word!r}, which the tokenizer turns into no token; remove it.",
                        param="bad_words",
                    )
                sequences[ids] = None
        single = frozenset(ids[0] for ids in sequences if len(ids) == 1)
        longer = tuple(ids for ids in sequences if len(ids) > 1 and not single.intersection(ids))
        return cls(single, longer)

    def next_forbidden(self, output: Sequence[int]) -> list[int]:
        """Tokens that would end a longer bad word after this output; `single` is forbidden always."""
        found = []
        for ids in self.longer:
            stem = ids[:-1]
            if len(output) >= len(stem) and tuple(output[len(output) - len(stem) :]) == stem:
                found.append(ids[-1])
        return found
