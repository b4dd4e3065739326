"""One sequence of tokens on its way through the engine."""

import enum
from dataclasses import dataclass, field
from typing import Any

from trillion_infer.core.outputs import RequestMetrics
from trillion_infer.core.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a request stands. FINISHED_* are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOP = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORT = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self not in (Status.WAITING, Status.RUNNING)


@dataclass(eq=False)
class Request:
    """State of one sequence (one of the n of a prompt).

    The caller fills the first block. `schedule/` owns `status`, `slot`, `num_computed`, `num_cached_tokens`
    and takes `draft_ids`;
    `cache/` owns `block_names`; the engine appends to `output_ids`.

    Token i of prompt_ids + output_ids sits at position i. Tokens [0, num_computed) have their KV in pages, or are
    being computed by a step already sent to the device. `num_in_flight` sampled tokens are on the device and not
    yet known to the host: positions are counted as if they were known.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    eos_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    session_id: str = ""
    """The session whose next turn this is, "" for none."""
    seed: int = 0
    needs_known_tokens: bool = False
    """The next step depends on the value of the last token (grammar, multi-token bad words): never run ahead."""
    sampling: Any = None
    """sample.SequenceSampling: seeds, biases and masks of this sequence."""
    grammar: Any = None
    """constrain.GrammarState of a structured request: masks its tokens, and accepts them as they become known."""
    peers: tuple[str, ...] = ()
    """Hand-off addresses of the prefill workers to ask for its KV, the first one first."""
    next_id: int = -1
    """The token after the prompt, where it is known and only the prompt's KV is wanted; -1: the one that is sampled."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    output_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    slot: int = -1
    num_computed: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0
    draft_ids: tuple[int, ...] = ()
    """Proposed continuation for the next step; the drafter fills it, the scheduler takes what fits and clears it."""
    block_names: list[bytes] = field(default_factory=list)
    stop_reason: int | str | None = None

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens the sequence has, those still on the device included."""
        return self.num_known + self.num_in_flight

    @property
    def num_output(self) -> int:
        return len(self.output_ids) + self.num_in_flight

    def token(self, position: int) -> int:
        """The known token at a position; -1 when it is still on the device only."""
        prompt = len(self.prompt_ids)
        if position < prompt:
            return self.prompt_ids[position]
        index = position - prompt
        return self.output_ids[index] if index < len(self.output_ids) else -1

    def known_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids
