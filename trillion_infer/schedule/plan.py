"""What the scheduler decides for one step."""

from dataclasses import dataclass

from trillion_infer.cache.kv_cache import PageUpdate
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
