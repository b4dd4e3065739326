"""The processes of one engine: the leader, its followers, and what happens when one of them is lost."""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from trillion_infer.core.errors import GroupError
from trillion_infer.distributed.channel import Channel, ChannelError
from trillion_infer.distributed.wire import pack, unpack

GRACE_S = 5.0
"""Seconds between the loss of a process and the end of this one, where nothing else ends it: a collective whose other
side is gone may wait for ever."""

EXIT_LOST = 3
"""Exit status of a process that lost its group."""


class Member:
    """What both kinds of process share: a loss is noted once, raised where the engine is used, and ends the process."""

    def __init__(self) -> None:
        self._lost: str | None = None
        self._raised = self._over = False
        self._noted = threading.Event()
        self._lock = threading.Lock()
        atexit.register(self._at_exit)

    @property
    def lost(self) -> str | None:
        """Why the group cannot go on; None while it can."""
        return self._lost

    def note_loss(self, why: str) -> None:
        """The group has lost a process. The calling process ends within GRACE_S."""
        with self._lock:
            if self._lost is not None or self._over:
                return
            self._lost = why
        self._noted.set()
        timer = threading.Timer(GRACE_S, self._leave)
        timer.daemon = True
        timer.start()

    def check(self) -> None:
        """Raises GroupError once a process is lost."""
        if self._lost is not None:
            self._raised = True
            raise GroupError(self._lost)

    def explain(self, wait_s: float = 2.0) -> None:
        """Raises the GroupError behind an error of the runtime, if a process is lost within `wait_s`."""
        self._noted.wait(wait_s)
        self.check()

    def end(self) -> None:
        """The group ends as it should: what the others do from now on is no loss."""
        with self._lock:
            self._over = True
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """A process whose group is lost leaves at once: jax.distributed would wait for the lost one."""
        if self._lost is not None:
            self._leave()
        self.end()

    def _leave(self) -> None:
        if not self._raised:
            print(f"error: {self._lost}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_LOST)


class Leader(Member):
    """Process 0. `send` goes to every follower."""

    leads = True

    def __init__(self, channels: dict[str, Channel]):
        super().__init__()
        self._channels = channels
        self._answers: dict[str, list[Any]] = {}
        self._answered = threading.Condition()
        for name, channel in channels.items():
            threading.Thread(target=self._listen, args=(name, channel), name=f"from {name}", daemon=True).start()

    def send(self, message: list[Any]) -> None:
        """Raises GroupError where a follower is lost."""
        self.check()
        data = pack(message)
        for name, channel in self._channels.items():
            try:
                channel.send(data)
            except ChannelError as error:
                self.note_loss(f"{name} is lost ({error}); the engine stops.")
        self.check()

    def agree(self, topic: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What `decide` makes of every process's value, this one's first; the same for all processes."""
        with self._answered:
            while len(self._answers) < len(self._channels):
                self._answered.wait(0.2)
                self.check()
            found, self._answers = self._answers, {}
        wrong = next((name for name, answer in found.items() if answer[0] != topic), None)
        if wrong is not None:
            self.note_loss(f"{wrong} answered on {found[wrong][0]!r} where {topic!r} was asked; the engine stops.")
            self.check()
        result = decide([value, *(found[name][1] for name in self._channels)])
        self.send(["agreed", topic, result])
        return result

    def require_equal(self, plan: list[list[str]]) -> None:
        """Every process plans the same engine; a GroupError names the first difference and whose it is."""
        theirs = self.agree("plan", plan, list)[1:]
        for name, other in zip(self._channels, theirs, strict=True):
            why = difference(plan, other)
            if why:
                self.note_loss(f"{name} plans another engine: {why}. Start every process alike.")
        self.check()

    def end(self) -> None:
        """Followers leave their loop."""
        if self._lost is None and not self._over:
            data = pack(["end"])
            for channel in self._channels.values():
                try:
                    channel.send(data)
                except ChannelError:
                    continue
        super().end()

    def _listen(self, name: str, channel: Channel) -> None:
        try:
            while True:
                kind, *values = unpack(channel.receive())
                if kind == "error":
                    self.note_loss(f"{name}: {values[0]}; the engine stops.")
                    return
                with self._answered:
                    self._answers[name] = values
                    self._answered.notify()
        except (ChannelError, ValueError) as error:
            self.note_loss(f"{name} is lost ({error}); the engine stops.")


class Follower(Member):
    """Any other process."""

    leads = False

    def __init__(self, name: str, channel: Channel):
        super().__init__()
        self.name, self._channel = name, channel
        self._messages: list[list[Any]] = []
        self._arrived = threading.Condition()
        threading.Thread(target=self._listen, name="from the leader", daemon=True).start()

    def receive(self) -> list[Any]:
        """The leader's next message. Raises GroupError where it is lost."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._messages or self._lost)
            if self._messages:
                return self._messages.pop(0)
        self.check()
        raise AssertionError("a follower waits for a message or a loss")

    def fail(self, why: str) -> NoReturn:
        """Tells the leader why this process cannot go on, and raises it."""
        with contextlib.suppress(ChannelError):
            self._channel.send(pack(["error", why]))
        self._stop(f"{self.name}: {why}.")

    def _stop(self, why: str) -> NoReturn:
        """Ends for this reason, whatever the leader's end may say meanwhile."""
        self.note_loss(why)
        self._raised = True
        raise GroupError(why)

    def agree(self, topic: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """As Leader.agree; the leader decides."""
        self._channel.send(pack(["answer", topic, value]))
        kind, about, result = self.receive()
        if (kind, about) != ("agreed", topic):
            self.fail(f"{kind} {about} came where an answer on {topic} was due")
        return result

    def require_equal(self, plan: list[list[str]]) -> None:
        """As Leader.require_equal: the leader's plan is compared with one's own."""
        why = difference(self.agree("plan", plan, list)[0], plan)
        if why:
            self._stop(f"{self.name} plans another engine than the leader: {why}. Start every process alike.")

    def _listen(self) -> None:
        try:
            while True:
                message = unpack(self._channel.receive())
                with self._arrived:
                    self._messages.append(message)
                    self._arrived.notify()
                if message[0] == "end":
                    return
        except (ChannelError, ValueError) as error:
            with self._arrived:
                self.note_loss(f"the leader, process 0, is lost ({error}); {self.name} stops.")
                self._arrived.notify()


Group = Leader | Follower


def difference(ours: list[list[str]], theirs: list[list[str]]) -> str:
    """The first entry in which two plans differ, as part of a sentence; "" where they are equal."""
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        if mine != other:
            return f"its {name} is {other}, the leader's is {mine}"
    return ""
