"""Sessions in files: one JSON file a session, written whole or not at all."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trillion_infer.core.errors import ConfigError, SessionError, UnknownSessionError

VERSION = 1
SUFFIX = ".session"


@dataclass(frozen=True)
class SavedSession:
    """What a session is, its KV apart: `token_ids` are the exact ids of all its turns, `text` what they were made of.

    model: fingerprint of the model whose tokens they are. saved: seconds since 1970.
    """

    name: str
    tenant: str
    model: str
    token_ids: list[int]
    text: str | None
    saved: float


class SessionFolder:
    """Files are named by a digest of tenant and session, so that any name will do. None for `folder` keeps nothing."""

    def __init__(self, folder: Path | None):
        self._folder = folder

    def check(self) -> None:
        """Raises ConfigError for a folder that cannot be made; no effect without one."""
        try:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"sessions folder '{self._folder}' cannot be made ({error.strerror}); name a writable folder."
            ) from error

    def save(self, session: SavedSession) -> None:
        """Raises ConfigError without a folder or when it cannot be written; what was saved before stays then."""
        if self._folder is None:
            raise ConfigError("There is no folder for sessions; give sessions=FOLDER or disk_kv to save them.")
        body = json.dumps({"version": VERSION, **asdict(session)}, ensure_ascii=False).encode()
        path = self._path(session.tenant, session.name)
        partial = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(partial, "xb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise ConfigError(f"Session {session.name!r} cannot be written to {path} ({error.strerror}).") from error

    def load(self, tenant: str, name: str) -> SavedSession:
        """Raises UnknownSessionError, and SessionError for a file that is not what was saved."""
        try:
            content = self._path(tenant, name).read_bytes() if self._folder is not None else b""
        except OSError:
            content = b""
        if not content:
            raise UnknownSessionError(f"There is no saved session {name!r}; `list` gives those there are.")
        return _parse(content, name)

    def list(self) -> Iterator[SavedSession]:
        """The saved sessions of all tenants; files that are not what was saved are passed over."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")) if self._folder is not None else ():
            try:
                yield _parse(path.read_bytes(), path.name)
            except (OSError, SessionError):
                continue

    def delete(self, tenant: str, name: str) -> None:
        """No effect if there is none."""
        if self._folder is not None:
            self._path(tenant, name).unlink(missing_ok=True)

    def _path(self, tenant: str, name: str) -> Path:
        assert self._folder is not None
        digest = hashlib.sha256(json.dumps([tenant, name]).encode()).hexdigest()
        return self._folder / f"{digest[:32]}{SUFFIX}"


def _parse(content: bytes, name: str) -> SavedSession:
    digest, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise SessionError(f"The file of session {name!r} is not what was saved; delete it.")
    fields: dict[str, Any] = json.loads(body)
    version = fields.pop("version")
    if version != VERSION:
        raise SessionError(f"Session {name!r} was saved in format {version}, and this version reads {VERSION}.")
    return SavedSession(**fields)
