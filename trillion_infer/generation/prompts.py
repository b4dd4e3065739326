"""Prompts, as users give them, to checked token ids and requests."""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.outputs import RequestMetrics
from trillion_infer.core.request import Request
from trillion_infer.core.sampling_params import SamplingParams, StructuredOutput
from trillion_infer.sample.host import sequence_sampling
from trillion_infer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trillion_infer.constrain import GrammarCompiler, GrammarState

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""


class PromptReader:
    """Turns prompts into requests, refusing on the host what a device would clamp silently."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        max_model_len: int,
        seed: int = 0,
        penalties: bool = True,
    ):
        self.tokenizer = tokenizer
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.eos_ids = eos_ids | (tokenizer.eos_ids if tokenizer else frozenset())
        self._entropy = np.random.default_rng(abs(seed))
        self._penalties = penalties
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()

    def read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of a prompt, checked. Raises InvalidRequestError."""
        prompt = _unwrap(prompt) if isinstance(prompt, Mapping) else prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "The prompt is text but no tokenizer is loaded; give token ids.", param="prompt"
                )
            text, ids = prompt, self.tokenizer.encode(prompt)
        else:
            text, ids = None, self._check_ids(prompt)  # pyright: ignore[reportArgumentType]
        if not ids:
            raise InvalidRequestError(
                "The prompt is empty after tokenisation; give at least one token.", param="prompt"
            )
        return text, ids

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        checked = []
        for token in ids:
            if isinstance(token, np.integer):
                token = int(token)
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"prompt_token_ids holds {token!r}; token ids are whole numbers in [0, {self.vocab_size}).",
                    param="prompt_token_ids",
                )
            checked.append(token)
        return checked

    def requests(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        session_id: str = "",
    ) -> list[Request]:
        """One request for each of the `n` completions. Raises InvalidRequestError when it can never fit the context."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling parameters are {params!r}; give a SamplingParams.")
        room = self.max_model_len - len(ids)
        if room < 1 or (params.max_tokens or 1) > room:
            wanted = "any" if params.max_tokens is None else str(params.max_tokens)
            raise InvalidRequestError(
                f"The prompt has {len(ids)} tokens and {wanted} new tokens are requested (max_tokens), but the context "
                f"holds {self.max_model_len} in all (max_model_len). Shorten the prompt or ask for "
                f"{'fewer tokens' if room < 1 else f'at most {room} tokens'}.",
                param="prompt" if room < 1 else "max_tokens",
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop strings need text output, and no tokenizer is loaded.", param="stop")
        encode = None if self.tokenizer is None else self._encode_plain
        samplings = sequence_sampling(
            params,
            vocab_size=self.vocab_size,
            eos_ids=tuple(self.eos_ids),
            encode=encode,
            entropy=self._entropy,
            has_tables=self._penalties,
        )
        grammars = [self.grammar(params.structured_output) for _ in samplings]
        now = time.monotonic()
        return [
            Request(
                request_id if params.n == 1 else f"{request_id}-{number}",
                list(ids),
                dataclasses.replace(params, n=1) if params.n > 1 else params,
                max_tokens=room if params.max_tokens is None else params.max_tokens,
                eos_ids=self.eos_ids,
                priority=priority,
                cache_salt=cache_salt,
                session_id=session_id,
                needs_known_tokens=sampling.needs_last_tokens or grammar is not None,
                sampling=sampling,
                grammar=grammar,
                metrics=RequestMetrics(arrival_time=now),
            )
            for number, (sampling, grammar) in enumerate(zip(samplings, grammars, strict=True))
        ]

    def grammar(self, spec: StructuredOutput | None) -> "GrammarState | None":
        """A fresh state of the grammar. The first one reads the whole vocabulary."""
        if spec is None:
            return None
        if self.tokenizer is None:
            raise InvalidRequestError(
                "structured_output needs text output, and no tokenizer is loaded.", param="structured_output"
            )
        with self._grammars_lock:
            if self._grammars is None:
                from trillion_infer.constrain import GrammarCompiler

                self._grammars = GrammarCompiler(self.tokenizer)
            return self._grammars.compile(spec)

    def _encode_plain(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens=False)


def _unwrap(prompt: Mapping[str, Any]) -> Any:
    unknown = set(prompt) - {"prompt", "prompt_token_ids"}
    if unknown or len(prompt) != 1:
        raise InvalidRequestError(
            f"a prompt mapping has keys {sorted(prompt)}; give exactly one of prompt and prompt_token_ids.",
            param="prompt",
        )
    return next(iter(prompt.values()))
