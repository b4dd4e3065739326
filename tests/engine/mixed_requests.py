"""Hundreds of mixed requests: shared prefixes, greedy and seeded sampling, some aborted on their way."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.engine.helpers import tokens_of
from tests.engine.test_equalities import prompts_of
from trillion_infer import SamplingParams
from trillion_infer.core.outputs import RequestOutput

COUNT = 300


@dataclass(frozen=True)
class MixedRequests:
    """expected: the tokens that one engine answers with when nothing is aborted."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[list[int]]

    def aborting(self, abort: Callable[[int], object]) -> Callable[[int], None]:
        """A function of a step's number that aborts every 17th request, one in three steps."""
        left = list(range(0, len(self.prompts), 17))

        def leave(step: int) -> None:
            if step % 3 == 0 and left:
                abort(left.pop(0 if step % 2 else -1))

        return leave

    def check(self, outputs: Sequence[RequestOutput]) -> None:
        """Every request that was not aborted has the tokens of one engine, and usage is exact (p17)."""
        kept = [i for i, output in enumerate(outputs) if output.outputs[0].finish_reason != "abort"]
        assert len(kept) > 0.8 * len(outputs)
        found = {i: outputs[i].outputs[0].token_ids for i in kept}
        wrong = {i: (ids, self.expected[i], self.params[i]) for i, ids in found.items() if ids != self.expected[i]}
        assert not wrong, wrong
        assert all(output.num_cached_tokens < len(output.prompt_token_ids) for output in outputs)


def mixed_requests(llm, count: int = COUNT) -> MixedRequests:
    """The requests, and what `llm` answers."""
    rng, vocab = random.Random(2), min(llm.model_config.vocab, 5000)
    stems = prompts_of(5, [40, 24, 17], vocab)
    prompts = [
        rng.choice(stems)[: rng.randrange(1, 40)] + prompts_of(i, [rng.randrange(1, 20)], vocab)[0]
        for i in range(count)
    ]
    params = [
        SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=rng.randrange(1, 10), ignore_eos=True)
        for i in range(count)
    ]
    return MixedRequests(prompts, params, tokens_of(llm.generate(prompts, params)))
