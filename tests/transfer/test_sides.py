"""Rules of the two sides of a hand-off, one by one."""

from dataclasses import replace

import pytest

from trillion_infer.core.errors import ConfigError, InvalidRequestError
from trillion_infer.transfer.handoff.decode_side import DecodeSide
from trillion_infer.transfer.handoff.limits import HandoffLimits
from trillion_infer.transfer.handoff.messages import Abort, Ack, Ask, Beat, Offer, Piece, Refused, Renew, Resend
from trillion_infer.transfer.handoff.prefill_side import PrefillSide, prompt_digest

LIMITS = HandoffLimits(lease_s=10.0, beat_s=1.0, silence_s=4.0, deadline_s=60.0, max_attempts=3)
PIECE = Piece(0, 0, 1, b"12345678", 1, 64)


class Computer:
    """A PrefillBackend that only notes what it is told."""

    def __init__(self):
        self.started: list[str] = []
        self.dropped: list[str] = []
        self.queued = 0
        self.error: Exception | None = None

    def start(self, ask):
        if self.error is not None:
            raise self.error
        self.started.append(ask.key)

    def drop(self, key):
        self.dropped.append(key)

    def again(self, key, pieces):
        return tuple(replace(piece, ticket=piece.ticket + 100) for piece in pieces)

    def queued_tokens(self):
        return self.queued


class Reserver:
    """A DecodeBackend that only notes what it is told."""

    def __init__(self):
        self.fetched: list[Offer] = []
        self.ended: list[tuple] = []

    def fetch(self, request_id, peer, offer):
        self.fetched.append(offer)

    def ready(self, request_id, cached):
        self.ended.append((request_id, "ready"))

    def give_up(self, request_id, kind, reason):
        self.ended.append((request_id, kind))


def ask_of(key: str, budget_s: float = 60.0) -> Ask:
    return Ask(key, (1, 2, 3), 4, 0, "", "", 0, budget_s)


def prefill_side() -> tuple[PrefillSide, Computer]:
    backend = Computer()
    side = PrefillSide(LIMITS, backend)
    side.connected("d", "e1", 0.0)
    side.outbox.clear()
    return side, backend


def decode_side(*peers: str) -> tuple[DecodeSide, Reserver]:
    backend = Reserver()
    side = DecodeSide("me", LIMITS, backend)
    for peer in peers:
        side.connected(peer, "e1", 0.0)
    return side, backend


def last_ask(side: DecodeSide) -> tuple[str, Ask]:
    return next((peer, message) for peer, message in reversed(side.outbox) if isinstance(message, Ask))


def offer_of(ask: Ask, part: int = 0, last: bool = True, **changes) -> Offer:
    return replace(Offer(ask.key, 0, part, last, prompt_digest(ask), 0, (PIECE,)), **changes)


def test_every_expired_lease_is_reaped_whatever_its_place_p05():
    side, backend = prefill_side()
    for key in ("renewed", "b", "c"):
        side.receive("d", "e1", ask_of(key), 0.0)
    side.receive("d", "e1", Renew(("renewed",)), 9.0)
    side.tick(10.5)
    assert backend.dropped == ["b", "c"]
    assert [m.key for _, m in side.outbox if isinstance(m, Refused)] == ["b", "c"]


def test_no_renewal_outlives_the_asker_s_deadline():
    side, backend = prefill_side()
    side.receive("d", "e1", ask_of("a", budget_s=12.0), 0.0)
    side.receive("d", "e1", Renew(("a",)), 11.0)
    side.tick(12.0)
    assert backend.dropped == ["a"]


def test_a_restarted_asker_frees_what_it_was_held_before_p02():
    side, backend = prefill_side()
    side.receive("d", "e1", ask_of("a"), 0.0)
    side.connected("d", "e2", 1.0)
    assert backend.dropped == ["a"]
    side.receive("d", "e1", ask_of("late"), 1.0)
    assert backend.started == ["a"]
    assert side.counts["stale_messages"] == 1


def test_an_abort_frees_at_once_and_its_late_ask_starts_nothing_p03():
    side, backend = prefill_side()
    side.receive("d", "e1", ask_of("a"), 0.0)
    side.receive("d", "e1", Abort("a"), 0.1)
    side.receive("d", "e1", Abort("never came"), 0.1)
    side.receive("d", "e1", ask_of("a"), 0.2)
    side.receive("d", "e1", ask_of("never came"), 0.2)
    assert (backend.started, backend.dropped, side.num_jobs) == (["a"], ["a"], 0)


@pytest.mark.parametrize(
    ("drained", "queued", "error", "kind"),
    [
        (True, 0, None, "busy"),
        (False, LIMITS.max_queued_tokens + 1, None, "busy"),
        (False, 0, InvalidRequestError("too long"), "bad"),
    ],
)
def test_what_cannot_be_started_is_refused(drained, queued, error, kind):
    side, backend = prefill_side()
    side.accepts, backend.queued, backend.error = not drained, queued, error
    side.receive("d", "e1", ask_of("a"), 0.0)
    assert [m.kind for _, m in side.outbox if isinstance(m, Refused)] == [kind]
    assert side.num_jobs == 0


def test_a_resend_offers_the_leased_pages_again_under_new_tickets():
    side, _ = prefill_side()
    side.receive("d", "e1", ask_of("a"), 0.0)
    side.offer("a", (PIECE,), True, 0, 1.0)
    side.receive("d", "e1", Resend("a", 1), 2.0)
    side.receive("d", "e1", Resend("a", 1), 2.0)
    offers = [m for _, m in side.outbox if isinstance(m, Offer)]
    assert [(o.round, o.pieces[0].ticket) for o in offers] == [(0, 1), (1, 101), (1, 101)]


def test_the_worker_with_the_shortest_queue_is_asked():
    side, _ = decode_side("p", "q")
    side.receive("p", "e1", Beat(900, True), 0.0)
    side.receive("q", "e1", Beat(10, True), 0.0)
    side.ask("r", ask_of(""), (), 0.0)
    assert last_ask(side)[0] == "q"


def test_the_router_s_choice_goes_before_the_queue():
    side, _ = decode_side("p", "q")
    side.receive("p", "e1", Beat(900, True), 0.0)
    side.ask("r", ask_of(""), ("p",), 0.0)
    assert last_ask(side)[0] == "p"


def test_a_restarted_worker_is_asked_again_under_a_new_key_p02():
    side, backend = decode_side("p")
    side.ask("r", ask_of(""), (), 0.0)
    old = last_ask(side)[1]
    side.connected("p", "e2", 1.0)
    side.tick(3.0)
    new = last_ask(side)[1]
    assert new.key != old.key
    side.receive("p", "e1", offer_of(old), 3.0)
    side.receive("p", "e2", offer_of(old), 3.0)
    assert backend.fetched == []
    side.receive("p", "e2", offer_of(new), 3.0)
    side.fetched(new.key, 0, 0, None, 3.1)
    assert backend.ended == [("r", "ready")]
    assert ("p", Ack(new.key)) in side.outbox


def test_an_offer_for_another_prompt_is_not_fetched_p01():
    side, backend = decode_side("p")
    side.ask("r", ask_of(""), (), 0.0)
    side.receive("p", "e1", offer_of(last_ask(side)[1], prompt=b"another"), 0.1)
    assert backend.fetched == []
    assert side.counts["digest_failures"] == 1


def test_nothing_is_ready_before_every_part_is_there():
    side, backend = decode_side("p")
    side.ask("r", ask_of(""), (), 0.0)
    ask = last_ask(side)[1]
    side.receive("p", "e1", offer_of(ask, 1, True), 0.1)
    side.fetched(ask.key, 0, 1, None, 0.2)
    assert backend.ended == []
    side.receive("p", "e1", offer_of(ask, 0, False), 0.3)
    side.receive("p", "e1", offer_of(ask, 0, False), 0.3)
    side.fetched(ask.key, 0, 0, None, 0.4)
    assert backend.ended == [("r", "ready")]
    assert len(backend.fetched) == 2


def test_every_request_ends_by_its_deadline_p07():
    side, backend = decode_side("p")
    side.ask("r", ask_of("", budget_s=5.0), (), 0.0)
    side.receive("p", "e1", Beat(0, True), 4.9)
    side.tick(5.0)
    assert backend.ended == [("r", "failed")]
    assert any(isinstance(message, Abort) for _, message in side.outbox)


def test_without_any_prefill_worker_the_policy_is_applied_soon():
    side, backend = decode_side()
    side.ask("r", ask_of(""), (), 0.0)
    side.tick(LIMITS.silence_s)
    assert backend.ended == [("r", "failed")]


def test_a_refused_request_is_refused_to_its_client_p14():
    side, backend = decode_side("p")
    side.ask("r", ask_of(""), (), 0.0)
    side.receive("p", "e1", Refused(last_ask(side)[1].key, "bad", "too long"), 0.1)
    assert backend.ended == [("r", "bad")]


def test_busy_workers_are_asked_again_and_cost_no_attempt():
    side, backend = decode_side("p")
    side.ask("r", ask_of(""), (), 0.0)
    for second in range(1, 20):
        side.receive("p", "e1", Refused(last_ask(side)[1].key, "busy", "full"), float(second))
        side.tick(second + 1.0)
    assert backend.ended == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_transfer_failure": "pray"}, "recompute, fail"),
        ({"lease_s": 0.0}, "above 0"),
        ({"beat_s": 30.0}, "must be the smallest"),
    ],
)
def test_limits_that_contradict_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        HandoffLimits(**options)
