"""The host's side of sampling: from SamplingParams to rows, seeds, masks and slot histories. Numpy only."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int, UInt

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.sample.bad_words import BadWords
from trillion_infer.sample.rows import RowParams
from trillion_infer.sample.state import BIAS, OUTPUT, PROMPT, SLOT_CHUNK

SlotChunk = tuple[Int[np.ndarray, "3"], Int[np.ndarray, "3 C"]]


@dataclass(frozen=True)
class SequenceSampling:
    """How one sequence (one of a request's n completions) is sampled.

    seed: two key words; bias: token to value, -inf for bad words of one token; guarded: tokens that would end the
    sequence, masked before min_tokens.
    """

    params: SamplingParams
    seed: UInt[np.ndarray, "2"]
    bias: Mapping[int, float]
    bad_words: BadWords
    guarded: tuple[int, ...]

    @property
    def needs_slot_history(self) -> bool:
        """The slot must be entered with `slot_chunks` before the first step (and after each preemption)."""
        return bool(self.bias) or self.params.uses_penalties

    @cached_property
    def may_forbid(self) -> bool:
        """`forbidden` may name tokens."""
        return self.params.min_tokens > 0 or self.needs_last_tokens

    @property
    def needs_last_tokens(self) -> bool:
        """The mask depends on the newest tokens: the host cannot prepare a step before it knows the last one."""
        return bool(self.bad_words.longer)

    def fill(self, rows: RowParams, row: int, *, slot: int, index: int) -> None:
        """Write row `row` of numpy rows: the step chooses token number `index` (0 first) of the sequence in `slot`."""
        params = self.params
        rows.slot[row], rows.active[row], rows.index[row] = slot, True, index
        rows.top_k[row], rows.seed[row], rows.has_bias[row] = params.top_k or 0, self.seed, bool(self.bias)
        rows.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        rows.temperature[row], rows.top_p[row], rows.min_p[row] = params.temperature, params.top_p, params.min_p
        rows.repetition[row] = params.repetition_penalty
        rows.presence[row], rows.frequency[row] = params.presence_penalty, params.frequency_penalty

    def forbidden(self, output: Sequence[int]) -> list[int]:
        """Tokens the mask must exclude after this output. Without `needs_last_tokens` only its length matters."""
        tokens = self.bad_words.next_forbidden(output)
        if len(output) < self.params.min_tokens:
            tokens.extend(self.guarded)
        return tokens

    def slot_chunks(self, slot: int, prompt: Sequence[int], output: Sequence[int] = ()) -> Iterator[SlotChunk]:
        """Arguments of `init_slot` that enter this sequence, at its start or after preemption."""
        history = (prompt, output) if self.params.uses_penalties else (prompt[-1:], output[-1:])
        return slot_chunks(slot, *history, self.bias)


def sequence_sampling(
    params: SamplingParams,
    *,
    vocab_size: int,
    eos_ids: Sequence[int],
    encode: Callable[[str], Sequence[int]] | None,
    entropy: np.random.Generator,
    has_tables: bool = True,
) -> list[SequenceSampling]:
    """One for each of the request's n completions.

    `encode` (text to ids, no special tokens) is needed for bad_words only. `entropy` seeds requests that name no seed.
    Refuses ids outside the vocabulary, and what a state without tables cannot serve.
    """
    params.check_vocab(vocab_size)
    words = _bad_words(params, encode)
    _check_tokens(words, vocab_size)
    bias = {**(params.logit_bias or {}), **dict.fromkeys(sorted(words.single), -np.inf)}
    if not has_tables and (bias or params.uses_penalties):
        raise InvalidRequestError(
            "This deployment was started without penalty tables, so repetition_penalty, presence_penalty, "
            "frequency_penalty, logit_bias and bad_words must stay at their defaults.",
            param="repetition_penalty",
        )
    guarded = tuple(dict.fromkeys([*(() if params.ignore_eos else eos_ids), *(params.stop_token_ids or ())]))
    seed = params.seed if params.seed is not None else int(entropy.integers(2**63))
    return [SequenceSampling(params, sequence_seed(seed, number), bias, words, guarded) for number in range(params.n)]


def sequence_seed(seed: int, number: int) -> UInt[np.ndarray, "2"]:
    """Key words of completion `number` of a request with this 64-bit seed; the first is the same whatever n is."""
    name = hashlib.blake2b(b"%d/%d" % (seed, number), digest_size=8).digest()
    return np.frombuffer(name, "<u4").astype(np.uint32)


def slot_chunks(
    slot: int, prompt: Sequence[int], output: Sequence[int], bias: Mapping[int, float]
) -> Iterator[SlotChunk]:
    """Arguments of `init_slot`, in order: at least one pair, the first of which clears the slot."""
    ids = np.concatenate([np.asarray(part, np.int32).reshape(-1) for part in (prompt, output, [*bias])])
    kinds = np.repeat(np.array([PROMPT, OUTPUT, BIAS], np.int32), [len(prompt), len(output), len(bias)])
    values = np.zeros(len(ids), np.float32)
    values[len(ids) - len(bias) :] = [*bias.values()]
    last = output[-1] if len(output) else prompt[-1] if len(prompt) else 0
    entries = np.stack([ids, kinds, values.view(np.int32)])
    for start in range(0, max(len(ids), 1), SLOT_CHUNK):
        part = entries[:, start : start + SLOT_CHUNK]
        chunk = np.zeros((3, SLOT_CHUNK), np.int32)
        chunk[:, : part.shape[1]] = part
        yield np.array([slot, start == 0, last], np.int32), chunk


def _bad_words(params: SamplingParams, encode: Callable[[str], Sequence[int]] | None) -> BadWords:
    if not params.bad_words:
        return BadWords()
    if encode is None:
        raise InvalidRequestError(
            "bad_words needs a tokenizer and this engine has none; exclude tokens with logit_bias -100 instead.",
            param="bad_words",
        )
    return BadWords.encode(params.bad_words, encode)


def _check_tokens(words: BadWords, vocab_size: int) -> None:
    for token in [*words.single, *(token for ids in words.longer for token in ids)]:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"bad_words encodes to token {token}; the model has tokens in [0, {vocab_size}).", param="bad_words"
            )
