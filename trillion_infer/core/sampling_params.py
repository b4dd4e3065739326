"""What a request asks of the sampler. Names and meanings follow vLLM's SamplingParams."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trillion_infer.core.errors import InvalidRequestError

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy: logits / 1e-5 already overflow the useful range of float32."""

MAX_LOGPROBS = 20
"""Most alternatives that `logprobs` and `prompt_logprobs` may ask for per position."""

MAX_SEED = 2**63 - 1
INT32_MAX = 2**31 - 1


def _refuse(field: str, given: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} is {given!r}; it must be {allowed}.", param=field)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class StructuredOutput:
    """One constraint on the text; exactly one field is set.

    `json_schema` is a schema (dict or JSON text), `json_object` any JSON object, `regex` a regular expression,
    `choice` a list of strings, `grammar` a Lark grammar.
    """

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        given = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_output sets {given or 'nothing'}; set exactly one of json_schema, json_object, regex, "
                "choice, grammar.",
                param="structured_output",
            )


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request.

    n: completions per prompt.
    temperature: 0 (or less than GREEDY_EPSILON) takes the likeliest token; logits are divided by it otherwise.
    top_k: keep the k likeliest tokens; 0, -1 and None keep all.
    top_p: keep the smallest set of likeliest tokens whose probability reaches top_p, in (0, 1].
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    seed: the tokens depend only on the prompt, these parameters and the seed, never on the batch.
    stop, stop_token_ids: end before this text, or at this token; include_stop_str_in_output keeps the text.
    min_tokens: before that many tokens nothing can end the request (stops and end-of-sequence are ignored).
    max_tokens: None means until the end of the context.
    logprobs: alternatives to report per generated token (0: the chosen one only); prompt_logprobs likewise
        for the prompt. Raw: before penalties and temperature.
    repetition_penalty: > 0, on tokens of prompt and output (1 changes nothing); presence_penalty and
        frequency_penalty: in [-2, 2], on output tokens only.
    logit_bias: token id -> value added, in [-100, 100].
    bad_words: texts that must not be produced.
    ignore_eos: end-of-sequence ids do not end the request; stop_token_ids still do.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_lists()
        self._check_flags()

    def _normalise(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        put("stop_token_ids", tuple(self.stop_token_ids or ()))
        bad = self.bad_words
        put("bad_words", (bad,) if isinstance(bad, str) else tuple(bad or ()))
        if self.top_k is None or self.top_k == -1:
            put("top_k", 0)
        if self.logit_bias is not None:
            put("logit_bias", _checked_bias(self.logit_bias) or None)

    def _check_ranges(self) -> None:
        for field, low, high, allowed in (
            ("temperature", 0.0, math.inf, "a finite number, 0 or more"),
            ("min_p", 0.0, 1.0, "a number in [0, 1]"),
            ("presence_penalty", -2.0, 2.0, "a number in [-2, 2]"),
            ("frequency_penalty", -2.0, 2.0, "a number in [-2, 2]"),
        ):
            value = getattr(self, field)
            if not _is_number(value) or not low <= value <= high:
                raise _refuse(field, value, allowed)
        for field, high, allowed in (
            ("top_p", 1.0, "a number in (0, 1]"),
            ("repetition_penalty", math.inf, "a finite number above 0"),
        ):
            value = getattr(self, field)
            if not _is_number(value) or not 0.0 < value <= high:
                raise _refuse(field, value, allowed)
        for field, low, high, allowed in (
            ("n", 1, 128, "a whole number from 1 to 128"),
            ("top_k", 0, INT32_MAX, "-1 or 0 (off) or a whole number of 1 or more"),
            ("min_tokens", 0, INT32_MAX, "a whole number, 0 or more"),
        ):
            value = getattr(self, field)
            if not _is_int(value) or not low <= value <= high:
                raise _refuse(field, value, allowed)
        for field, low, high, allowed in (
            ("max_tokens", 1, INT32_MAX, "None (to the end of the context) or a whole number of 1 or more"),
            ("logprobs", 0, MAX_LOGPROBS, f"None or a whole number from 0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs", 0, MAX_LOGPROBS, f"None or a whole number from 0 to {MAX_LOGPROBS}"),
            ("seed", -MAX_SEED, MAX_SEED, "None or a 64-bit whole number"),
        ):
            value = getattr(self, field)
            if value is not None and (not _is_int(value) or not low <= value <= high):
                raise _refuse(field, value, allowed)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}; "
                "lower one or raise the other.",
                param="min_tokens",
            )

    def _check_lists(self) -> None:
        for field in ("stop", "bad_words"):
            for text in getattr(self, field):
                if not isinstance(text, str) or not text:
                    raise _refuse(field, text, "a non-empty string, or a list of them")
        for token in self.stop_token_ids or ():
            if not _is_int(token) or token < 0:
                raise _refuse("stop_token_ids", token, "a list of token ids, whole numbers of 0 or more")

    def _check_flags(self) -> None:
        for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, field), bool):
                raise _refuse(field, getattr(self, field), "True or False")
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            raise _refuse("structured_output", self.structured_output, "a StructuredOutput")

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken: no randomness is used."""
        return self.temperature < GREEDY_EPSILON or self.top_k == 1

    @property
    def uses_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids that the model's vocabulary does not have (a device would clamp them silently)."""
        for token in self.stop_token_ids or ():
            if token >= vocab_size:
                raise _refuse("stop_token_ids", token, f"token ids in [0, {vocab_size})")
        for token in self.logit_bias or ():
            if token >= vocab_size:
                raise _refuse("logit_bias", token, f"keyed by token ids in [0, {vocab_size})")


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    """Bias with integer keys (JSON makes them strings) and finite values in [-100, 100]."""
    checked = {}
    for key, value in bias.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise _refuse("logit_bias", key, "keyed by token ids") from None
        if token < 0:
            raise _refuse("logit_bias", token, "keyed by token ids of 0 or more")
        if not _is_number(value) or not -100 <= value <= 100:
            raise _refuse(f"logit_bias[{token}]", value, "a number in [-100, 100]")
        checked[token] = float(value)
    return checked
