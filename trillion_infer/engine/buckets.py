"""The few shapes a step may have, so that few programs do all work and no request needs another."""

from collections.abc import Callable
from dataclasses import dataclass

SCORE_ROWS = 64
"""Prompt positions scored at a time: bounds the logits held at once."""


@dataclass(frozen=True, order=True)
class Bucket:
    """tokens: T, query tokens a data shard; sequences: S, rows a data shard. Equal: one token a sequence.

    width: positions of a sequence that yield logits; above 1 in steps that verify drafts. by_layers: sent some layers
    at a time.
    """

    tokens: int
    sequences: int
    width: int = 1
    by_layers: bool = False

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.sequences and not self.verifies

    @property
    def verifies(self) -> bool:
        return self.width > 1

    @property
    def name(self) -> str:
        if self.by_layers:
            return f"layers_{self.tokens}x{self.sequences}"
        if self.verifies:
            return f"verify_{self.tokens}x{self.sequences}"
        return f"decode_{self.sequences}" if self.is_decode else f"mixed_{self.tokens}x{self.sequences}"


@dataclass(frozen=True)
class Buckets:
    """decode: sizes of decode-only steps. mixed: shapes of steps with prefill. verify: of steps with drafts, of which
    the largest holds prefill too. layered: of steps of one request that are sent some layers at a time. All ascending.
    """

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]
    verify: tuple[Bucket, ...] = ()
    layered: tuple[Bucket, ...] = ()

    @property
    def all(self) -> tuple[Bucket, ...]:
        """Those of whole steps."""
        return self.decode + self.mixed + self.verify

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Distinct numbers of sequences in steps that verify nothing."""
        return tuple(sorted({bucket.sequences for bucket in self.decode + self.mixed + self.layered}))

    def first(self, whole_prompts: bool) -> Bucket:
        """The one that answers a short prompt and, a few tokens at a time, does all others' work too; the largest where
        a step holds whole prompts."""
        return max(self.mixed) if whole_prompts else self.mixed[0]

    def among(self, is_ready: Callable[[Bucket], bool]) -> "Buckets":
        """Those that are ready."""
        kinds = (self.decode, self.mixed, self.verify, self.layered)
        return Buckets(*(tuple(b for b in each if is_ready(b)) for each in kinds))

    def for_role(self, role: str) -> "Buckets":
        """Those that an engine of one role has use for: `prefill` takes no steps of decode alone, `decode` prefills
        only what was preempted."""
        if role == "prefill":
            return Buckets((), self.mixed, layered=self.layered)
        return Buckets(self.decode, self.mixed[-1:], self.verify)

    def choose(self, tokens: int, sequences: int, decode_only: bool, width: int = 1) -> Bucket:
        """The smallest bucket that holds the batch. width: of its rows with drafts; 1 where it verifies nothing."""
        if width > 1:
            holds = (b for b in self.verify if b.tokens >= tokens and b.sequences >= sequences and b.width >= width)
            return min(holds)
        of_decode = [b for b in self.decode if b.sequences >= sequences] if decode_only else []
        if of_decode:
            return of_decode[0]
        return min(b for b in self.mixed if b.tokens >= tokens and b.sequences >= sequences)


LAYERED_TOKENS = (64, 128)
"""Tokens of the smaller steps that are sent some layers at a time: what a turn adds, and what of the prefix fills no
page."""


def layered_buckets(most: int) -> tuple[Bucket, ...]:
    """Of steps of one request with at most `most` tokens."""
    sizes = {min(tokens, most) for tokens in (*LAYERED_TOKENS, most)}
    return tuple(Bucket(tokens, 1, by_layers=True) for tokens in sorted(sizes) if tokens > 1)


SMALLEST_PREFILL = {"cpu": 32}
"""Tokens of the smallest step with prefill by platform, elsewhere 64. A CPU pays for each token of padding; others read
their weights in that time, and each shape costs a compilation."""


MANY_WIDTH = 8
"""Positions of a row, at most, in steps that verify drafts of several rows."""


def make_buckets(max_running: int, max_batch_tokens: int, max_drafts: int = 0, smallest: int = 64) -> Buckets:
    """Decode at 1, 4, 16, … rows: reading weights dominates there, so that padding costs less than its share. Prefill
    at a small and the full number of tokens, for few and for all sequences. Few distinct row counts: each has its own
    sampler. `smallest`: tokens of the smallest prefill.

    With `max_drafts` a sequence, steps that verify come for one row at 2, 4, 8, … tokens up to one more than that, and
    for many at two a row and at no more than MANY_WIDTH: every position costs a row of logits.
    """
    rows = _ladder(1, max_running, 4)
    few = min(16, max_running)
    largest = max(max_batch_tokens, max_running + 1)
    small = {(smallest, few), (64, few), (2 * max(64, max_running), max_running), (largest, few)}
    shapes = {(t, s) for t, s in small if s < t <= largest} | {(largest, max_running)}
    mixed = tuple(Bucket(t, s) for t, s in sorted(shapes))
    verify = _verify_buckets(rows, mixed[-1], max_drafts + 1) if max_drafts else ()
    return Buckets(tuple(Bucket(n, n) for n in rows), mixed, verify)


def _verify_buckets(rows: list[int], largest: Bucket, width: int) -> tuple[Bucket, ...]:
    many = min(width, MANY_WIDTH)
    one = [Bucket(n, 1, n) for n in _ladder(2, width, 2)]
    others = [Bucket(n * each, n, many) for n in rows for each in {2, many} if n > 1]
    last = Bucket(largest.tokens, largest.sequences, width if largest.sequences == 1 else many)
    return tuple(sorted({last, *(bucket for bucket in (*one, *others) if bucket.tokens < largest.tokens)}))


def _ladder(low: int, high: int, factor: int) -> list[int]:
    """low, low*factor, … below high, then high."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return [*sizes, high]
