"""What the scheduler decides for one step."""

from dataclasses import dataclass

from trillion_infer.cache.kv_cache import PageUpdate
from trillion_infer.config.scheduler import SchedulerConfig
from trillion_infer.core.request import Request


@dataclass(eq=False)
class Row:
    """Tokens [start, start + length) of a request are computed.

    samples: the last position yields a token; with `draft_ids`, every position may (a verification row, whose input
        is the last known token followed by the drafts: length = 1 + len(draft_ids)).
    lookahead: there are pages for the drafts that follow this row.
    """

    request: Request
    start: int
    length: int
    samples: bool
    draft_ids: tuple[int, ...] = ()
    lookahead: bool = False


@dataclass
class StepPlan:
    """One step.

    rows: those of length 1 first, `num_decode` of them, then the rest.
    admitted: requests that got their slot in this step (its sampler state must be initialised).
    preempted: requests that lost their slot and pages since the last plan.
    page_updates: changes to apply to the page tables before the step runs.
    """

    rows: list[Row]
    admitted: list[Request]
    preempted: list[Request]
    page_updates: list[PageUpdate]
    num_decode: int

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)


class Step:
    """The plan in the making, and what is left of its budgets."""

    def __init__(self, config: SchedulerConfig, most_tokens: int):
        self.tokens_left = most_tokens
        self.prefill_left = min(config.prefill_chunk if config.chunked_prefill else most_tokens, most_tokens)
        self.rows: list[Row] = []
        self.planned: set[Request] = set()
        self.admitted: list[Request] = []

    @property
    def room_for_prefill(self) -> int:
        return min(self.tokens_left, self.prefill_left)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.planned.add(row.request)
        self.tokens_left -= row.length


def lacks(request: Request) -> int:
    """Tokens to compute now; 0 when all that may be asked for is on its way."""
    output = len(request.output_ids) + request.num_in_flight
    if output >= request.max_tokens:
        return 0
    return max(0, len(request.prompt_ids) + output - request.num_computed)


def next_row(request: Request, length: int) -> Row:
    """The row of the next `length` tokens, counted as computed and its sampled token as in flight."""
    row = Row(request, request.num_computed, length, False)
    row.samples = row.start + length >= request.num_tokens
    request.num_computed += length
    request.num_in_flight += row.samples
    return row
