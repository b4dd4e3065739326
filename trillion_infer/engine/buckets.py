"""The few shapes a step may have, so that every program is compiled before the first request."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """tokens: T, query tokens a data shard; sequences: S, rows a data shard. Equal: one token a sequence."""

    tokens: int
    sequences: int

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.sequences

    @property
    def name(self) -> str:
        return f"decode_{self.sequences}" if self.is_decode else f"mixed_{self.tokens}x{self.sequences}"


@dataclass(frozen=True)
class Buckets:
    """decode: sizes of decode-only steps. mixed: shapes of steps with prefill. Both ascending."""

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]

    @property
    def all(self) -> tuple[Bucket, ...]:
        return self.decode + self.mixed

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Distinct numbers of sequences."""
        return tuple(sorted({bucket.sequences for bucket in self.all}))

    def choose(self, tokens: int, sequences: int, decode_only: bool) -> Bucket:
        """The smallest bucket that holds the batch."""
        if decode_only:
            return next(b for b in self.decode if b.sequences >= sequences)
        return min(b for b in self.mixed if b.tokens >= tokens and b.sequences >= sequences)


def make_buckets(max_running: int, max_batch_tokens: int) -> Buckets:
    """Decode at 1, 8, 64, … rows: reading weights dominates there, so padding is nearly free. Prefill at a small and
    the full number of tokens, for few and for all sequences. Few distinct row counts: each has its own sampler."""
    rows = _ladder(1, max_running, 8)
    few = min(8, max_running)
    tokens = _ladder(min(64, max_batch_tokens), max_batch_tokens, 8)
    shapes = {(t, s) for t in tokens for s in (few, max_running) if t > s}
    shapes.add((max(max_batch_tokens, max_running + 1), max_running))
    return Buckets(tuple(Bucket(n, n) for n in rows), tuple(Bucket(t, s) for t, s in sorted(shapes)))


def _ladder(low: int, high: int, factor: int) -> list[int]:
    """low, low*factor, … below high, then high."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return [*sizes, high]
