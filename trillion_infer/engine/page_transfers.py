"""Prompts on their way through a prefill engine, and the pages they have sent ahead to a decode engine."""

import time
from collections import deque
from dataclasses import dataclass, field

import jax
from jaxtyping import Array

from trillion_infer.core.outputs import HandoffMarks
from trillion_infer.core.request import Request
from trillion_infer.transfer.pages import PageMover


@dataclass(eq=False)
class Piece:
    """At most 16 pages of one pool on their way.

    first: block of the first page. targets: the pages they go to. read: what was read, on the prefill mesh; data: the
    same on the decode mesh, once it is on its way. begun: when `read` was last seen not to be there.
    """

    pool: int
    first: int
    targets: list[int]
    read: Array
    begun: float
    data: Array | None = None
    is_read: bool = False

    def has_arrived(self, mover: PageMover, now: float) -> bool:
        """The data lies on the decode mesh, so that putting it in place waits for nothing but the decode mesh."""
        if not self.is_read:
            self.is_read = self.read.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
            if not self.is_read:
                self.begun = now
                return False
        if self.data is None:
            self.data = mover.send(self.read)
        return self.data.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self) -> None:
        """Waits until it is read; where it is, until it has arrived."""
        if not self.is_read:
            jax.block_until_ready(self.read)
            self.is_read, self.begun = True, time.monotonic()
        elif self.data is not None:
            jax.block_until_ready(self.data)


@dataclass(eq=False)
class PromptJob:
    """A prompt that prefill engine `source` computes as `twin`, and whose pages are reserved in decode engine `target`.

    found: leading blocks which the decode pool had. sent: blocks of groups that see everything which are on their way
    or there, those included. landed: the same of each pool, of those that are there.
    """

    request: Request
    twin: Request
    source: int
    target: int
    found: int
    landed: list[int]
    sent: int = 0
    is_computed: bool = False
    pieces: deque[Piece] = field(default_factory=deque)
    marks: HandoffMarks = field(default_factory=HandoffMarks)
    _until: float = 0.0

    def count(self, piece: Piece, size: int, now: float) -> None:
        """A piece of `size` bytes is in place. Time in which several were on their way counts once."""
        self.landed[piece.pool] = piece.first + len(piece.targets)
        self.marks.bytes += size
        self.marks.transfer_s += now - max(piece.begun, self._until)
        self._until = now
