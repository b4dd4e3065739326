"""Conversations by name: their exact tokens, and their KV kept while they are alive."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trillion_infer.core.errors import InvalidRequestError, SessionError, UnknownSessionError
from trillion_infer.core.request import Request
from trillion_infer.generation.session_files import SavedSession, SessionFolder
from trillion_infer.text.tokenizer import Tokenizer

MAX_NAME = 256


class KVKeeper(Protocol):
    """What an engine does for sessions. Names are those of KV blocks."""

    def pin(self, names: Sequence[bytes], count: int = 1) -> None:
        """Evict these after all others; `count` -1 takes it back."""

    def demote(self, names: Sequence[bytes]) -> None:
        """Copy these to the tiers beyond the device, and evict them before others."""

    def persist(self, names: Sequence[bytes]) -> None:
        """Copy these to a tier that outlives the process, if there is one."""

    def discard(self, names: Sequence[bytes]) -> None:
        """Delete these in every tier."""

    def delete_tenant(self, salt: str) -> None:
        """Delete what a tenant left in every tier."""

    def block_names(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Names of the whole blocks of a sequence."""
        ...


@dataclass(frozen=True)
class SessionInfo:
    """One line of `list`. idle_s: seconds since its last turn, None for one that is saved only."""

    name: str
    num_tokens: int
    is_live: bool
    is_saved: bool
    is_pinned: bool
    idle_s: float | None


@dataclass(eq=False)
class _Session:
    """A session in memory. `names`: its blocks; `busy`: the request that computes its next turn."""

    name: str
    salt: str
    token_ids: list[int] = field(default_factory=list)
    text: str | None = ""
    names: list[bytes] = field(default_factory=list)
    is_pinned: bool = False
    last_used: float = 0.0
    busy: Request | None = None


class Sessions:
    """Sessions of one engine. A session's blocks are pinned from each turn until `keep_alive` seconds after it, then
    demoted; its tokens are kept until it is deleted. Tenants do not see each other's.

    One thread, the engine's, owns it; only `extend` may be called from others.
    """

    def __init__(
        self,
        keeper: KVKeeper,
        tokenizer: Tokenizer | None,
        model: str,
        folder: Path | None = None,
        keep_alive: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._keeper, self._tokenizer, self._model = keeper, tokenizer, model
        self._files = SessionFolder(folder)
        self._keep_alive, self._clock = keep_alive, clock
        self._live: dict[tuple[str, str], _Session] = {}
        self._next_expiry = float("inf")

    # Turns

    def extend(self, name: str, salt: str, text: str | None, token_ids: list[int]) -> list[int]:
        """The ids of a session's next prompt: where the text goes on from that of its turns, so do the ids.

        Tokenising the whole text anew may cut it otherwise than the model did. Raises InvalidRequestError for a bad
        name or a session whose turn is not over.
        """
        check_name(name)
        session = self._live.get((salt, name))
        if session is None:
            return token_ids
        if session.busy is not None:
            raise InvalidRequestError(
                f"Session {name!r} is computing a turn; wait for it or use another session.", param="session_id"
            )
        if not text or not session.text or not text.startswith(session.text) or self._tokenizer is None:
            return token_ids
        rest = text[len(session.text) :]
        return session.token_ids + (self._tokenizer.encode(rest, add_special_tokens=False) if rest else [])

    def begin(self, request: Request) -> None:
        """A turn was queued."""
        key = (request.cache_salt, request.session_id)
        session = self._live.get(key)
        if session is None:
            session = self._live[key] = _Session(request.session_id, request.cache_salt)
        session.busy = request

    def end(self, request: Request, text: str | None) -> None:
        """A turn is over; `text` is the prompt's, None for one of token ids."""
        session = self._live.get((request.cache_salt, request.session_id))
        if session is None or session.busy is not request:
            return
        session.busy = None
        session.token_ids = request.known_ids()
        session.text = None
        if text is not None and self._tokenizer is not None:
            answer = self._tokenizer.decode(request.output_ids, skip_special_tokens=False, continuation=True)
            session.text = text + answer
        self._keep(session, list(request.block_names))

    def tick(self) -> None:
        """Demotes sessions that have been idle for `keep_alive` seconds; costs nothing before one is due."""
        now = self._clock()
        if now < self._next_expiry:
            return
        self._next_expiry = float("inf")
        for session in self._live.values():
            if session.is_pinned and session.busy is None:
                due = session.last_used + self._keep_alive
                if now >= due:
                    self._unpin(session)
                    self._keeper.demote(session.names)
                else:
                    self._next_expiry = min(self._next_expiry, due)

    # By name

    def save(self, name: str, tenant: str = "") -> SessionInfo:
        """Writes a session's tokens to a file, and its KV to a tier that outlives the process, if there is one.

        Raises UnknownSessionError, and ConfigError where nothing can be saved.
        """
        session = self._idle(name, tenant)
        self._files.save(SavedSession(name, tenant, self._model, session.token_ids, session.text, time.time()))
        self._keeper.persist(session.names)
        return self._info(session, is_saved=True)

    def load(self, name: str, tenant: str = "") -> SessionInfo:
        """Brings a saved session back, in this process or another, on whatever mesh: its next turn extends its ids.

        Raises UnknownSessionError, and SessionError for a session of another model or a damaged file.
        """
        if (tenant, name) in self._live:
            self._idle(name, tenant)
        saved = self._files.load(tenant, name)
        if saved.model != self._model:
            raise SessionError(
                f"Session {name!r} is of model {saved.model[:12]}…, and this is model {self._model[:12]}…; load it "
                "with the model that it was saved with."
            )
        session = self._live.setdefault((tenant, name), _Session(name, tenant))
        session.token_ids, session.text = list(saved.token_ids), saved.text
        self._keep(session, self._keeper.block_names(session.token_ids, tenant))
        return self._info(session, is_saved=True)

    def resume(self, name: str, tenant: str = "") -> str:
        """The text of a session's turns, to which the next prompt is added; loads a saved one, "" for a new one.

        Raises SessionError for a session of another model, a damaged file, and one of token ids without text.
        """
        check_name(name)
        if (tenant, name) not in self._live:
            try:
                self.load(name, tenant)
            except UnknownSessionError:
                return ""
        text = self._find(name, tenant).text
        if text is None:
            raise SessionError(f"Session {name!r} was given token ids, and has no text to go on from.")
        return text

    def list(self, tenant: str = "") -> list[SessionInfo]:
        """Live sessions, then those that are saved only."""
        saved = {each.name: each for each in self._files.list() if each.tenant == tenant}
        live = [session for (salt, _), session in self._live.items() if salt == tenant]
        found = [self._info(session, session.name in saved) for session in live]
        names = {session.name for session in live}
        return found + [
            SessionInfo(each.name, len(each.token_ids), False, True, False, None)
            for each in saved.values()
            if each.name not in names
        ]

    def history(self, name: str, tenant: str = "") -> Sequence[int]:
        """The exact token ids of a live session's turns."""
        return tuple(self._find(name, tenant).token_ids)

    def delete(self, name: str, tenant: str = "") -> None:
        """Forgets a session, its file, and its blocks in every tier but those that other live sessions have, too.

        Raises UnknownSessionError if it is neither live nor saved. A damaged file does not tell its blocks: it goes and
        they stay until they are evicted.
        """
        names: list[bytes] = []
        if (tenant, name) in self._live:
            session = self._idle(name, tenant)
            self._unpin(session)
            names = session.names
            del self._live[tenant, name]
        else:
            try:
                names = self._keeper.block_names(self._files.load(tenant, name).token_ids, tenant)
            except UnknownSessionError:
                raise
            except SessionError:
                names = []
        self._files.delete(tenant, name)
        others = {each for session in self._live.values() for each in session.names}
        self._keeper.discard([each for each in names if each not in others])

    def delete_tenant(self, tenant: str) -> None:
        """Deletes everything that a tenant left: sessions, their files, and blocks in every tier.

        Raises InvalidRequestError while a session of it computes a turn, and for a part of a tenant.
        """
        if "/" in tenant:
            raise InvalidRequestError(
                f"{tenant!r} names a part of a tenant; what is before the slash can be deleted, as a whole.",
                param="tenant",
            )
        for salt, name in [key for key in self._live if key[0].partition("/")[0] == tenant]:
            session = self._idle(name, salt)
            self._unpin(session)
            self._files.delete(salt, name)
            del self._live[salt, name]
        for saved in [each for each in self._files.list() if each.tenant.partition("/")[0] == tenant]:
            self._files.delete(saved.tenant, saved.name)
        self._keeper.delete_tenant(tenant)

    # Internals

    def _keep(self, session: _Session, names: Sequence[bytes]) -> None:
        self._unpin(session)
        session.names, session.last_used = [*names], self._clock()
        self._keeper.pin(names)
        session.is_pinned = True
        self._next_expiry = min(self._next_expiry, session.last_used + self._keep_alive)

    def _unpin(self, session: _Session) -> None:
        if session.is_pinned:
            self._keeper.pin(session.names, -1)
            session.is_pinned = False

    def _find(self, name: str, tenant: str) -> _Session:
        session = self._live.get((tenant, name))
        if session is None:
            raise UnknownSessionError(f"There is no live session {name!r}; `list` gives those there are.")
        return session

    def _idle(self, name: str, tenant: str) -> _Session:
        session = self._find(name, tenant)
        if session.busy is not None:
            raise InvalidRequestError(f"Session {name!r} is computing a turn; wait for it.", param="session_id")
        return session

    def _info(self, session: _Session, is_saved: bool) -> SessionInfo:
        idle = self._clock() - session.last_used
        return SessionInfo(session.name, len(session.token_ids), True, is_saved, session.is_pinned, idle)


def check_name(name: object) -> None:
    """Raises InvalidRequestError unless it is a text of 1 to MAX_NAME characters."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidRequestError(
            f"session_id is {str(name)[:40]!r}; it must be a text of 1 to {MAX_NAME} characters.", param="session_id"
        )
