"""The speculator asks all drafters, drafts what pays, and turns itself off where nothing does."""

import pytest

from trillion_infer.core.errors import ConfigError
from trillion_infer.speculate import Draft, Drafter, DraftRequest, Speculator, StepCost
from trillion_infer.speculate.grammar import GrammarDrafter
from trillion_infer.speculate.ngram import NgramDrafter


class Fixed(Drafter):
    """Always the same draft; remembers whether it was asked and whom it released."""

    name = "fixed"

    def __init__(self, confidence):
        self.confidence, self.asked, self.released = confidence, 0, []

    def propose(self, requests, k):
        self.asked += 1
        return [Draft((1,) * k, (self.confidence,) * k, self.name) for _ in requests]

    def release(self, request):
        self.released.append(request.request_id)


def free():
    cost = StepCost([1, 8, 64])
    cost.record(1, 1.0)
    return cost


def dear():
    cost = StepCost([4, 8, 16, 32])
    for tokens in (4, 8, 16, 32):
        cost.record(tokens, float(tokens))
    return cost


def test_the_most_promising_draft_is_taken():
    request = DraftRequest("r", [5, 6, 7, 5, 6], forced=lambda k: [9])
    both = [NgramDrafter(), GrammarDrafter()]
    assert Speculator(both, free(), 1).propose([request], 1, [8])[0].drafter == "grammar"
    assert Speculator(both, free(), 4).propose([request], 1, [8])[0].drafter == "ngram"


def test_limits_are_kept():
    requests = [DraftRequest(name, [1]) for name in "abc"]
    drafts = Speculator([Fixed(0.9)], free(), 5).propose(requests, 3, [0, 2, 9])
    assert [len(draft.tokens) for draft in drafts] == [0, 2, 5]


def test_where_no_draft_could_pay_nobody_is_asked():
    drafter = Fixed(0.9)
    requests = [DraftRequest(name, [1]) for name in "abcd"]
    assert Speculator([drafter], dear()).propose(requests, 4, [8] * 4) == [Draft()] * 4
    assert drafter.asked == 0


def test_before_any_step_was_measured_nothing_is_drafted():
    assert Speculator([Fixed(0.9)], StepCost([1, 8])).propose([DraftRequest("r", [1])], 1, [8]) == [Draft()]


def test_drafts_that_never_stand_stop_and_are_tried_again_later():
    cost = StepCost([1, 8])
    cost.record(1, 1.0)
    cost.record(8, 1.2)
    speculator, request = Speculator([Fixed(0.8)], cost), DraftRequest("r", [1])
    steps = []
    for _ in range(120):
        (draft,) = speculator.propose([request], 1, [8])
        steps.append(len(draft.tokens))
        speculator.record(request, draft, 1)
    assert steps[0] > 0
    assert steps.count(0) > 90
    assert any(steps[40:])
    figures = speculator.stats.by_drafter["fixed"]
    assert figures.accepted == 0
    assert figures.drafted == sum(steps)


def test_release_reaches_every_drafter():
    drafter = Fixed(0.5)
    Speculator([drafter], free()).release(DraftRequest("r", []))
    assert drafter.released == ["r"]


@pytest.mark.parametrize("length", [0, 17])
def test_a_draft_length_out_of_range_is_refused(length):
    with pytest.raises(ConfigError, match=f"is {length}; it must be from 1 to 16"):
        Speculator([], free(), length)
