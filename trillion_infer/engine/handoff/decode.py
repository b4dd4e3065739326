"""The decoding half of a worker: requests with reserved pages, and the pages on their way to them."""

import time
from dataclasses import dataclass

import jax

from trillion_infer.cache.group import HeldPages
from trillion_infer.core.errors import HandoffError, InvalidRequestError
from trillion_infer.core.outputs import HandoffMarks
from trillion_infer.core.request import Request, Status
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.events import TokenEvent
from trillion_infer.engine.handoff.prefill import without_last
from trillion_infer.engine.handoff.staging import PageStager
from trillion_infer.engine.timeline import Timeline
from trillion_infer.transfer.handoff.decode_side import DecodeSide
from trillion_infer.transfer.handoff.identity import Identity
from trillion_infer.transfer.handoff.limits import HandoffLimits
from trillion_infer.transfer.handoff.messages import Ask, Offer
from trillion_infer.transfer.transports.base import Fetch, TransferError, Transport


@dataclass
class _Transfer:
    """An offer on its way. `fetches[i]` brings `offer.pieces[i]`; dtypes: of the sender's pools."""

    request_id: str
    offer: Offer
    dtypes: tuple[str, ...]
    fetches: list[Fetch]
    began: float


@dataclass(frozen=True)
class _Reserved:
    """A request with pages for all of its prompt on one data shard, which had the first `hit` tokens already."""

    request: Request
    shard: int
    hit: int


class DecodeJobs:
    """Implements DecodeBackend. Requests reserve all the pages of their prompt before anybody is asked for them."""

    def __init__(
        self, engine: Engine, stager: PageStager, transport: Transport, limits: HandoffLimits, timeline: Timeline
    ):
        self._engine, self._stager, self._transport = engine, stager, transport
        self._limits, self._timeline = limits, timeline
        self._reserved: dict[str, _Reserved] = {}
        self._transfers: list[_Transfer] = []
        self.identities: dict[str, Identity] = {}
        self.events: list[TokenEvent] = []
        self.bytes_received = self.pages_received = self.pages_found = self.handoffs = self.recomputed = 0

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    def reserve(self, request: Request, side: DecodeSide, now: float) -> bool:
        """Reserves pages and asks for them; False, without effect, while there is no room."""
        wanted, page = without_last(request.prompt_ids), self._engine.page_size
        found = self._find_room(request, len(wanted))
        if found is None:
            return False
        shard, hit = found
        request.num_cached_tokens = hit
        request.metrics.first_scheduled_time = request.metrics.first_scheduled_time or now
        if len(wanted) - hit < page:
            self._engine.activate(request, hit, shard)
            return True
        request.metrics.handoff = HandoffMarks(reserved=now)
        self._reserved[request.request_id] = _Reserved(request, shard, hit)
        self.pages_found += hit // page
        have, last, limit = hit // page, request.prompt_ids[-1], self._limits.deadline_s
        ask = Ask("", wanted, last, have, request.cache_salt, request.adapter, request.priority, limit)
        side.ask(request.request_id, ask, request.peers, now)
        return True

    def _find_room(self, request: Request, num_tokens: int) -> tuple[int, int] | None:
        """The data shard that reserved pages, and the tokens that it had: of those with room the one with most of a
        session's KV, then that with the fewest requests."""
        schedulers = self._engine.schedulers

        def rank(shard: int) -> tuple[int, int]:
            hit = schedulers[shard].cache.match(request) if request.session_id and len(schedulers) > 1 else 0
            reserved = sum(each.shard == shard for each in self._reserved.values())
            return -hit, reserved + schedulers[shard].num_running + schedulers[shard].num_waiting

        for shard in sorted(range(len(schedulers)), key=rank):
            hit = schedulers[shard].reserve(request, num_tokens, by_growth=True)
            if hit is not None:
                return shard, hit
        return None

    def withdraw(self, request_id: str) -> Request | None:
        """Gives the reservation of a request back, if it has one."""
        reserved = self._reserved.pop(request_id, None)
        if reserved is None:
            return None
        self._engine.schedulers[reserved.shard].unreserve(reserved.request)
        return reserved.request

    # DecodeBackend

    def fetch(self, request_id: str, peer: str, offer: Offer) -> None:
        identity = self.identities[peer]
        arrivals = [self._stager.arrival(spec) for spec in identity.pools]
        fetches = [
            self._transport.fetch(identity.data, piece.ticket, [arrivals[piece.pool]], self._limits.silence_s)
            for piece in offer.pieces
        ]
        now = time.monotonic()
        marks = self._reserved[request_id].request.metrics.handoff
        if marks is not None and offer.last:
            marks.offered = now
        self._transfers.append(_Transfer(request_id, offer, tuple(spec.dtype for spec in identity.pools), fetches, now))

    def poll(self, side: DecodeSide, now: float) -> None:
        """Verifies and puts in place what has arrived."""
        for transfer in list(self._transfers):
            error = None
            try:
                arrays = [fetch.poll() for fetch in transfer.fetches]
                if any(array is None for array in arrays):
                    continue
                if side.wants(transfer.offer.key, transfer.offer.round):
                    error = self._fill(transfer, [array[0] for array in arrays if array is not None], side)
            except TransferError as failure:
                error = str(failure)
            self._transfers.remove(transfer)
            side.fetched(transfer.offer.key, transfer.offer.round, transfer.offer.part, error, now)

    def _fill(self, transfer: _Transfer, arrays: list[jax.Array], side: DecodeSide) -> str | None:
        """Writes verified pages into the reserved ones; what is wrong with them, if anything is."""
        for piece, data in zip(transfer.offer.pieces, arrays, strict=True):
            if self._stager.digest(data) != piece.digest:
                side.counts["digest_failures"] += 1
                return f"pages {piece.first} to {piece.first + piece.count - 1} do not match their digest"
        reserved = self._reserved[transfer.request_id]
        if self._engine.tiering is not None:
            self._engine.tiering.save_evicted(self._engine.all_pools)
        cache, pools = self._engine.schedulers[reserved.shard].cache, list(self._engine.all_pools)
        held = cache.held(reserved.request)
        for piece, data in zip(transfer.offer.pieces, arrays, strict=True):
            number, pool = piece.pool, pools[piece.pool]
            group = self._stager.groups[number]
            start, end = cache.first_page(group, reserved.shard), pool.shape[1]
            pages = _targets(held[group], piece.first, piece.count, start, end)
            pools[number] = self._stager.fill(pool, number, pages, data, transfer.dtypes[number])
        self._engine.replace_pools(tuple(pools))
        self._count(transfer, reserved.request)
        return None

    def _count(self, transfer: _Transfer, request: Request) -> None:
        now, size = time.monotonic(), sum(piece.size for piece in transfer.offer.pieces)
        self.bytes_received += size
        self.pages_received += sum(piece.count for piece in transfer.offer.pieces)
        marks = request.metrics.handoff
        if marks is not None:
            marks.bytes += size
            marks.transfer_s += now - transfer.began
        self._timeline.add("transfer", request.request_id, transfer.began, now, bytes=size, part=transfer.offer.part)

    def ready(self, request_id: str, cached: int) -> None:
        reserved = self._reserved.pop(request_id)
        request = reserved.request
        wanted = len(request.prompt_ids) - 1
        request.num_cached_tokens = min(max(reserved.hit, cached), wanted)
        self.handoffs += 1
        marks = request.metrics.handoff
        if marks is not None:
            marks.arrived = time.monotonic()
            if marks.reserved is not None:
                self._timeline.add("waiting for prefill", request_id, marks.reserved, marks.arrived)
        self._engine.activate(request, wanted, reserved.shard)

    def give_up(self, request_id: str, kind: str, reason: str) -> None:
        """The policy: recompute here, or an error. A request that is refused fails alone in any case."""
        request = self.withdraw(request_id)
        assert request is not None, f"request {request_id} has no reservation"
        if kind == "bad":
            self._fail(request, InvalidRequestError(f"the prefill worker refuses this request: {reason}"))
        elif self._limits.on_transfer_failure == "fail":
            self._fail(request, HandoffError(f"no prefill worker could hand this request over: {reason}."))
        else:
            self.recomputed += 1
            request.metrics.handoff = None
            self._engine.add(request)

    def _fail(self, request: Request, error: Exception) -> None:
        request.status = Status.FINISHED_ERROR
        self.events.append(TokenEvent(request, [], finished=Status.FINISHED_ERROR, error=error))


def _targets(held: HeldPages, first: int, count: int, start: int, end: int) -> list[int]:
    """Pages of blocks first .. first + count - 1 in a pool in which those of their shard begin at `start`; `end` for
    those that the request does not hold."""
    pages = (held.page(block) for block in range(first, first + count))
    return [end if page is None else start + page for page in pages]
