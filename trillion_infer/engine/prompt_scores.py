"""Log-probabilities of prompt tokens, gathered chunk by chunk as the prompt is computed."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from trillion_infer.core.outputs import Logprob
from trillion_infer.core.request import Request
from trillion_infer.engine.buckets import SCORE_ROWS, Bucket
from trillion_infer.engine.programs import Programs
from trillion_infer.schedule.plan import Row


@dataclass(frozen=True)
class ScoreBlock:
    """Scores on their way: of prompt tokens [first, first + count), from one call of the score program."""

    request: Request
    first: int
    count: int
    arrays: Any


class PromptScores:
    """Scores by request: entry i is about prompt token i; entry 0 is None, since nothing precedes it."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._scores: dict[Request, list[dict[int, Logprob] | None]] = {}

    def wants(self, row: Row) -> bool:
        """The row computes positions whose next prompt token must be scored, and that has not been done before."""
        request = row.request
        if request.params.prompt_logprobs is None or request.output_ids:
            return False
        return row.start + 1 < len(request.prompt_ids)

    def _known(self, request: Request) -> list[dict[int, Logprob] | None]:
        return self._scores.setdefault(request, [None])

    def send(
        self, params: Any, bucket: Bucket, hidden: jax.Array, rows: list[Row], places: list[int]
    ) -> list[ScoreBlock]:
        """Scores the prompt tokens that follow each position of the rows that want it."""
        blocks, program = [], self._programs.score(bucket)
        at, shard = 0, 0
        for row, place in zip(rows, places, strict=True):
            if place // bucket.sequences != shard:
                at, shard = 0, place // bucket.sequences
            if self.wants(row):
                prompt = row.request.prompt_ids
                stop = min(row.start + row.length + 1, len(prompt))
                for first in range(row.start + 1, stop, SCORE_ROWS):
                    count = min(SCORE_ROWS, stop - first)
                    targets = np.zeros(SCORE_ROWS, np.int32)
                    targets[:count] = prompt[first : first + count]
                    start = np.int32(shard * bucket.tokens + at + first - row.start - 1)
                    arrays = program.run(params, hidden, start, targets)
                    blocks.append(ScoreBlock(row.request, first, count, arrays))
            at += row.length
        return blocks

    def receive(self, blocks: list[ScoreBlock]) -> None:
        """Enters scores that have arrived. A chunk computed again after preemption is not entered twice."""
        for block in blocks:
            if block.request.status.is_finished:
                continue
            known = self._known(block.request)
            logprob, rank, ids, values = (np.asarray(array) for array in block.arrays)
            wanted = block.request.params.prompt_logprobs or 0
            for i in range(block.count):
                if block.first + i != len(known):
                    continue
                token = block.request.prompt_ids[block.first + i]
                entry = {token: Logprob(float(logprob[i]), int(rank[i]))}
                for place in range(wanted):
                    entry.setdefault(int(ids[i, place]), Logprob(float(values[i, place]), place + 1))
                known.append(entry)

    def pop(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        """The scores, complete once the first token is known; None for a request that did not ask."""
        return None if request.params.prompt_logprobs is None else self._scores.pop(request, [None])

    def forget(self, request: Request) -> None:
        self._scores.pop(request, None)
