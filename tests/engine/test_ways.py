"""Of two ways to bring a prefix back the one that was faster is taken, and the other tried again now and then."""

import pytest

from trillion_infer.engine.ways import RETRY_SECONDS, Ways

PARTS = 4


class Machine:
    """Takes `share` of reading and computing one after the other, by layers and in whole blocks."""

    def __init__(self, layers: float, whole: float):
        self.now, self.shares = 0.0, {True: layers, False: whole}
        self.ways = Ways(lambda: self.now)

    def run(self, tier: str = "host", read: float = 0.05, compute: float = 0.2) -> bool:
        by_layers = self.ways.by_layers(tier, read, compute, PARTS)
        self.ways.begin("request", tier, by_layers, read + compute)
        self.now += self.shares[by_layers] * (read + compute)
        self.ways.end("request")
        return by_layers


@pytest.mark.parametrize("is_faster", [False, True])
def test_both_are_tried_and_then_the_faster_is_taken(is_faster):
    machine = Machine(0.8 if is_faster else 1.5, 1.1)
    assert {machine.run(), machine.run()} == {False, True}
    assert [machine.run() for _ in range(20)] == [is_faster] * 20


def test_what_was_slower_is_tried_again_after_a_while():
    machine = Machine(1.5, 1.0)
    taken = [machine.run() for _ in range(10)]
    assert taken[2:] == [False] * 8
    machine.now += RETRY_SECONDS
    machine.shares[True] = 0.1
    assert [machine.run() for _ in range(5)] == [True, False, True, True, True], "the other was not tried either"


def test_tiers_are_told_apart():
    machine = Machine(1.5, 1.0)
    for _ in range(3):
        machine.run("host")
    assert not machine.run("host")
    assert machine.run("disk"), "nothing is known of this one"


def test_what_cannot_save_more_than_its_calls_is_not_tried():
    assert not Machine(0.1, 1.0).run(read=0.05, compute=0.002)
    assert not Machine(0.1, 1.0).run(read=0.001, compute=0.5)


def test_what_did_not_end_is_not_measured():
    machine = Machine(0.5, 1.0)
    assert machine.ways.by_layers("host", 0.05, 0.2, PARTS)
    machine.ways.begin("request", "host", True, 0.25)
    machine.ways.forget("request")
    machine.ways.end("request")
    assert machine.run(), "still unknown"
