"""`--speculate`: which drafters a deployment asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

from trillion_infer.core.errors import ConfigError
from trillion_infer.speculate.base import Drafter
from trillion_infer.speculate.grammar import GrammarDrafter
from trillion_infer.speculate.ngram import NgramDrafter
from trillion_infer.speculate.suffix import SuffixDrafter

_HOST = {"ngram": NgramDrafter, "suffix": SuffixDrafter, "grammar": GrammarDrafter}
_WITH_PATH = ("draft", "eagle3")
KINDS = (*_HOST, "mtp", *_WITH_PATH)


@dataclass(frozen=True)
class DrafterSpec:
    """One drafter: its kind, and for `draft` and `eagle3` the checkpoint's path."""

    kind: str
    path: str | None = None

    @property
    def on_host(self) -> bool:
        """Drafts from tokens alone, without a model."""
        return self.kind in _HOST


def parse_speculate(text: str | None) -> tuple[DrafterSpec, ...]:
    """The drafters in a flag like "ngram,eagle3:PATH"; none for None and "". Raises ConfigError."""
    specs = tuple(_parse_one(item.strip(), text) for item in text.split(",")) if text else ()
    kinds = [spec.kind for spec in specs]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ConfigError(f"speculate={text!r} names {kind} {kinds.count(kind)} times; name each drafter once.")
    return specs


def host_drafters(specs: Sequence[DrafterSpec]) -> list[Drafter]:
    """The drafters among `specs` that need no model, in their order."""
    return [_HOST[spec.kind]() for spec in specs if spec.on_host]


def _parse_one(item: str, text: str | None) -> DrafterSpec:
    kind, colon, path = item.partition(":")
    if kind not in KINDS:
        allowed = "ngram, suffix, grammar, mtp, draft:PATH, eagle3:PATH"
        raise ConfigError(f"speculate={text!r} names {kind!r}; allowed, joined by commas: {allowed}.")
    if kind in _WITH_PATH and not path:
        raise ConfigError(f"speculate={text!r} gives {kind} no checkpoint; write {kind}:PATH.")
    if kind not in _WITH_PATH and colon:
        raise ConfigError(f"speculate={text!r} gives {kind} the path {path!r}; it takes none, write {kind}.")
    return DrafterSpec(kind, path or None)
