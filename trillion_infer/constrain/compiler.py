"""Compiles what a request asks for into grammars over the model's tokens, by llguidance."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from trillion_infer.constrain.schema import parse_schema, refuse, subschemas
from trillion_infer.constrain.state import GrammarState
from trillion_infer.core.errors import ConfigError, InvalidRequestError
from trillion_infer.core.sampling_params import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# At most one space, or one line break with its indentation, between JSON tokens: a weak model cannot write white
# space for ever, and pretty-printed JSON stays within reach.
WHITESPACE = r"\x20?|\x0A[\x20\x09]{0,40}"
_CACHED_GRAMMARS = 256


class Vocabulary(Protocol):
    """What a tokenizer must offer (trillion_infer.text.Tokenizer does)."""

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    added_tokens: dict[str, int]

    def id_to_bytes(self, id: int) -> bytes: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class GrammarCompiler:
    """Grammars for one vocabulary. Building it reads every token (about a second for 50,000), so keep it.

    Compiled grammars are kept too, the most recently used first.
    """

    def __init__(self, tokenizer: Vocabulary):
        eos_ids = sorted(id for id in tokenizer.eos_ids if 0 <= id < tokenizer.vocab_size)
        if not eos_ids:
            raise ConfigError("the tokenizer has no end-of-sequence token, without which no constrained text can end.")
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._ll_tokenizer = _ll_tokenizer(tokenizer, eos_ids)
        self._grammars: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, spec: StructuredOutput | str) -> GrammarState:
        """A fresh state for `spec` (a str is a Lark grammar). Raises InvalidRequestError that says what of it
        cannot be enforced, for a schema with its JSON pointer."""
        source = spec if isinstance(spec, str) else json.dumps(_fields(spec), sort_keys=False, default=str)
        matcher = self._grammars.get(source)
        if matcher is None:
            matcher = self._grammars[source] = self._matcher(spec)
            if len(self._grammars) > _CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(source)
        return GrammarState(matcher.deep_copy(), self._eos_ids, self._tokenizer.vocab_size)

    def _matcher(self, spec: StructuredOutput | str) -> LLMatcher:
        if isinstance(spec, str):
            return self._lark(spec, "grammar")
        if spec.json_schema is not None:
            return self._json(parse_schema(spec.json_schema))
        if spec.json_object:
            return self._json({"type": "object"})
        if spec.regex is not None:
            return self._regex(spec.regex)
        if spec.choice is not None:
            return self._lark(_choice_grammar(spec.choice), "choice")
        return self._lark(str(spec.grammar), "grammar")

    def _json(self, schema: dict[str, Any]) -> LLMatcher:
        matcher, why = self._try_json(schema)
        if matcher is not None:
            return matcher
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for pointer, inner in subschemas(schema):
            if not isinstance(inner, bool) and self._try_json({**definitions, **inner})[0] is None:
                raise refuse(pointer, f"{why.splitlines()[0]}.")
        raise refuse("#", f"{why.splitlines()[0]}.")

    def _try_json(self, schema: dict[str, Any]) -> tuple[LLMatcher | None, str]:
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}
            )
        except ValueError as error:
            return None, str(error)
        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        return (None, matcher.get_error()) if matcher.is_error() else (matcher, "")

    def _regex(self, regex: str) -> LLMatcher:
        from llguidance import LLMatcher

        return self._checked(LLMatcher.grammar_from_regex(regex), "regex")

    def _lark(self, grammar: str, param: str) -> LLMatcher:
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            grammar = any_to_lark(grammar)
        except Exception as error:  # the converter raises what its parser happens to
            raise InvalidRequestError(f"{param} is neither Lark nor EBNF: {error}.", param=param) from error
        return self._checked(LLMatcher.grammar_from_lark(grammar), param)

    def _checked(self, grammar: str, param: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequestError(f"{param} cannot be compiled: {matcher.get_error().strip()}", param=param)
        return matcher


def compile_grammar(spec: StructuredOutput | str, tokenizer: Vocabulary) -> GrammarState:
    """One state for `spec`, for a single use; keep a GrammarCompiler where there are many."""
    return GrammarCompiler(tokenizer).compile(spec)


def _fields(spec: StructuredOutput) -> dict[str, Any]:
    return {name: value for name, value in vars(spec).items() if value not in (None, False)}


def _choice_grammar(choices: Iterable[str]) -> str:
    texts = list(choices)
    if not texts or any(not isinstance(text, str) or not text for text in texts):
        raise InvalidRequestError(f"choice is {texts!r:.80}; non-empty strings are expected.", param="choice")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _ll_tokenizer(tokenizer: Vocabulary, eos_ids: list[int]) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise ConfigError(
            "structured output needs the package llguidance; install it with pip install 'trillion-infer[serve]'."
        ) from error
    wrapper: Any = TokenizerWrapper(_Tokens(tokenizer, eos_ids))
    return LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size, eos_token=eos_ids)


class _Tokens:
    """A vocabulary in the shape that llguidance's TokenizerWrapper reads.

    Special tokens, and added tokens that look like markup, never stand for their own spelling in a grammar.
    """

    def __init__(self, tokenizer: Vocabulary, eos_ids: list[int]):
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.id_to_bytes(id) for id in range(tokenizer.vocab_size)]
        marks = {text: id for text, id in tokenizer.added_tokens.items() if _is_mark(text, id, tokenizer)}
        self.special_token_ids = sorted({*marks.values(), *tokenizer.special_ids, *eos_ids})
        self._marks = re.compile("|".join(f"(?<={re.escape(m[0])}){re.escape(m[1:])}" for m in marks) or r"(?!)")

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of `text` with every marker spelled out: it is broken behind its first character."""
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        cuts = [0, *(match.start() for match in self._marks.finditer(plain)), len(plain)]
        pieces = [plain[start:end] for start, end in pairwise(cuts)]
        return [id for piece in pieces for id in self._tokenizer.encode(piece, add_special_tokens=False)]


def _is_mark(text: str, id: int, tokenizer: Vocabulary) -> bool:
    looks_like_markup = (text[:1], text[-1:]) in (("<", ">"), ("[", "]"))
    return len(text) > 1 and (looks_like_markup or id in tokenizer.special_ids)


def schema_rule(schema: Mapping[str, Any] | bool | None) -> str:
    """A schema (checked) as a term of a Lark grammar; None stands for any object."""
    checked = {"type": "object"} if schema is None else parse_schema(schema)
    return "%json " + json.dumps({**checked, "x-guidance": {"whitespace_pattern": WHITESPACE}})
