"""The hand-off protocol under thousands of schedules of faults; and the simulator finds each kind of bug."""

import pytest

from trillion_infer.testing.handoff_simulator import DecodeWorker, Faults, World
from trillion_infer.transfer.handoff.decode_side import DecodeSide
from trillion_infer.transfer.handoff.prefill_side import PrefillSide

SCHEDULES = 10_000


def problems(seeds, **parts) -> list[str]:
    return [f"seed {seed}: {problem}" for seed in seeds for problem in World(seed, **parts).run().problems]


@pytest.mark.parametrize("share", range(4))
def test_no_page_token_or_request_is_lost_doubled_or_stale(share):
    found = problems(range(share, SCHEDULES, 4))
    assert not found, found[:5]


def test_a_schedule_is_the_same_every_time():
    first, second = World(77).run(), World(77).run()
    assert [(c.tokens, c.outcome) for c in first.clients] == [(c.tokens, c.outcome) for c in second.clients]
    assert first.now == second.now


def test_every_ending_is_seen():
    ends = {client.outcome for seed in range(200) for client in World(seed).run().clients}
    assert ends == {"done", "failed", "aborted"}


class KeepsAcknowledgedPages(PrefillSide):
    """Lost page: an acknowledged lease is forgotten without giving its pages back."""

    def _end(self, key: str) -> None:
        self._ended[key] = None
        self._jobs.pop(key, None)


class ReapsTheFirstOnly(PrefillSide):
    """Lost page (P05): the reaper stops at a renewed lease at the head of its list."""

    def tick(self, now: float) -> None:
        for key, job in list(self._jobs.items()):
            if now < min(job.lease, job.end):
                break
            self.failed(key, "gone", "expired")


class ReusesOfferedPages(PrefillSide):
    """Stale KV (P01): pages are given to another prompt while their offer stands."""

    def offer(self, key, pieces, last, cached, now):
        super().offer(key, pieces, last, cached, now)
        worker = self.backend
        if last and worker.world.random.random() < 0.3:
            for page in worker.held.get(key, []):
                worker.memory[page] = 12345


class BelievesAnything(DecodeWorker):
    """Stale KV: digests are not compared."""

    def verified(self, data, piece) -> bool:
        return True


class KeepsAborted(DecodeWorker):
    """Lost page: the reservation of a request whose client left stays."""

    def abort(self, client) -> None:
        self.waiting = [each for each in self.waiting if each is not client]
        self.side.abort(client.name)


class SendsTwice(DecodeWorker):
    """Doubled token: a replay begins at the first token and skips nothing."""

    def sends(self, client, index) -> bool:
        return True


class AcceptsAgain(DecodeSide):
    """Doubled token: a part that comes twice counts twice, and its request starts twice."""

    def fetched(self, key, round, part, error, now):
        request_id = self._by_key.get(key) or self._seen.get(key, "")
        self._seen[key] = request_id
        if request_id in self._questions:
            super().fetched(key, round, part, error, now)
        elif error is None and request_id in self.backend.running:
            self.backend.ready(request_id, 0)

    def _offered(self, peer, offer, now):
        super()._offered(peer, offer, now)
        if offer.last:
            self.backend.fetch(self._by_key.get(offer.key, ""), peer, offer)

    @property
    def _seen(self) -> dict:
        return self.__dict__.setdefault("seen", {})


class WaitsForEver(DecodeSide):
    """No end: neither silence nor the deadline is looked at."""

    def tick(self, now: float) -> None:
        return


class ForgetsFailures(DecodeSide):
    """No end (P07): a transfer that failed is forgotten, and so is the deadline."""

    def fetched(self, key, round, part, error, now):
        if error is None:
            super().fetched(key, round, part, error, now)

    def tick(self, now: float) -> None:
        for question in self._questions.values():
            question.deadline = now + 100.0
        super().tick(now)


class ReservesHalf(DecodeWorker):
    """Two requests each hold half of what they need (P08)."""

    def admit(self) -> None:
        room, self.free = self.free, self.free * 2
        super().admit()
        self.free -= room
        if self.free < 0:
            self.world.problems.append(f"{self.name} promised pages it has not got")


class StartsTwice(PrefillSide):
    """Lost page: a duplicate of an Ask takes pages a second time."""

    def _ask(self, peer, ask, now):
        self._jobs.pop(ask.key, None)
        super()._ask(peer, ask, now)


BUGS = {
    KeepsAcknowledgedPages: "prefill_side",
    ReapsTheFirstOnly: "prefill_side",
    ReusesOfferedPages: "prefill_side",
    BelievesAnything: "decode_worker",
    KeepsAborted: "decode_worker",
    SendsTwice: "decode_worker",
    AcceptsAgain: "decode_side",
    WaitsForEver: "decode_side",
    ForgetsFailures: "decode_side",
    ReservesHalf: "decode_worker",
    StartsTwice: "prefill_side",
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_seeded_bug_is_found(bug):
    parts = {BUGS[bug]: bug}
    if bug is ReusesOfferedPages:
        parts["decode_worker"] = BelievesAnything
    assert any(World(seed, **parts).run().problems for seed in range(1000)), bug.__doc__


def test_freed_pages_are_not_believed_p01():
    """Pages that go back to the pool too early are recomputed or refused, never read as another prompt's."""
    stale = [p for p in problems(range(500), prefill_side=ReusesOfferedPages) if "stale" in p]
    assert not stale, stale[:5]


def test_without_faults_nothing_fails_p08():
    faults = Faults()
    worlds = [World(seed, faults).run() for seed in range(200)]
    assert not [problem for world in worlds for problem in world.problems]
    assert {client.outcome for world in worlds for client in world.clients} == {"done", "aborted"}
