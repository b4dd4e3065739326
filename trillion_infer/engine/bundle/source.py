"""Programs out of a bundle, and into one."""

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from trillion_infer.engine.bundle import executables, identity, store
from trillion_infer.engine.bundle.executables import NotBundled
from trillion_infer.engine.bundle.store import BundleError, StoredBundle, StoredProgram
from trillion_infer.engine.programs import Program

_LOG = logging.getLogger(__name__)

CACHE_BYTES = 1 << 30
"""Most bytes of bundles kept in the user's cache folder."""


class BundleSource:
    """The bundle of one deployment below `root`, if there is one that fits; safe to use from several threads.

    reasons: why programs had to be compiled, in sentences without a full stop.
    """

    def __init__(self, root: Path, facts: Mapping[str, Any], bounded: bool):
        self.root, self.facts, self.folder = root, facts, root / identity.key(facts)
        self.reasons: list[str] = []
        self.bounded = bounded
        self._stored: StoredBundle | None = None
        self._read: dict[str, bytes] = {}
        try:
            stored = store.read(self.folder)
            if dict(stored.identity) != dict(facts):
                raise BundleError("its manifest is another deployment's")
            self._stored = stored
            if bounded:
                os.utime(self.folder)
        except FileNotFoundError:
            self.reasons.append(self._missing())
        except (BundleError, OSError) as error:
            self.reasons.append(f"the bundle {self.folder} is refused: {error}")

    @property
    def pages(self) -> tuple[int, ...] | None:
        """Pages of each pool (a data shard) that the programs were compiled for."""
        return None if self._stored is None else self._stored.pages

    @property
    def temp_bytes(self) -> int:
        """Temporaries of the hungriest program, 0 without a bundle."""
        programs = self._stored.programs.values() if self._stored else ()
        return max((program.temp_bytes for program in programs), default=0)

    def drop(self, reason: str) -> None:
        """Loads nothing from here on."""
        self._stored = None
        self.reasons.append(reason)

    def is_whole(self, names: Collection[str]) -> bool:
        """Whether all of these programs are there and undamaged; what was read for that is kept until it is loaded."""
        stored = self._stored
        if stored is None or not set(names) <= stored.programs.keys():
            return False
        try:
            self._read = {name: stored.payload(name) for name in names}
        except BundleError:
            return False
        return True

    def tell(self, reason: str) -> None:
        """Logs why something is compiled: of a folder that somebody named it is a warning."""
        _LOG.log(logging.INFO if self.bounded else logging.WARNING, "Compiling: %s.", reason)

    def load(self, name: str, args: tuple[Any, ...], donated: tuple[int, ...], mesh: Mesh) -> Program | None:
        """The program for these abstract arguments; None, with a reason, where the bundle has not got it whole."""
        stored = self._stored
        if stored is None:
            return None
        start = time.perf_counter()
        program = stored.programs.get(name)
        try:
            if program is None:
                raise BundleError("it is not in the bundle")
            if program.inputs != executables.describe_arguments(args):
                raise BundleError("it was compiled for other arguments")
            payload = self._read.pop(name, None) or stored.payload(name)
            run = executables.unpack(payload, program.description, args, donated, mesh)
        except (BundleError, NotBundled) as error:
            self.reasons.append(f"{name} is compiled: {error}")
            self.tell(self.reasons[-1])
            return None
        seconds = time.perf_counter() - start
        return Program(name, run, seconds, program.temp_bytes, program.flops, program.bytes, loaded=True)

    def save(self, programs: Iterable[tuple[Program, tuple[Any, ...]]], pages: tuple[int, ...]) -> int:
        """Writes a bundle of these programs, each with its abstract arguments; the bytes it takes.

        Programs that have no written form are left out with a reason. Raises OSError.
        """
        entries: dict[str, tuple[StoredProgram, bytes]] = {}
        for program, args in programs:
            try:
                entries[program.name] = self._kept(program) or _entry(program, args)
            except (NotBundled, BundleError) as error:
                self.reasons.append(f"{program.name} cannot be bundled: {error}")
        store.write(self.folder, self.facts, pages, entries)
        if self.bounded:
            store.prune(self.root, CACHE_BYTES, self.folder.name)
        return sum(len(payload) for _, payload in entries.values())

    def _kept(self, program: Program) -> tuple[StoredProgram, bytes] | None:
        """A program from this bundle as it was: what was loaded once does not always serialise again."""
        if not program.loaded or self._stored is None:
            return None
        return self._stored.programs[program.name], self._stored.payload(program.name)

    def _missing(self) -> str:
        """Says how the bundle that differs least differs, as far as that helps."""
        closest: list[str] | None = None
        for manifest in [] if self.bounded else self.root.glob(f"*/{store.MANIFEST}"):
            try:
                found = list(identity.differences(self.facts, store.read(manifest.parent).identity))
            except (BundleError, OSError):
                continue
            if closest is None or len(found) < len(closest):
                closest = found
        if closest is None:
            return f"{self.root} holds no bundle for this model on this machine"
        return f"{self.root} holds no bundle that fits; the closest one differs in {', '.join(closest)}"


def _entry(program: Program, args: tuple[Any, ...]) -> tuple[StoredProgram, bytes]:
    payload, description = executables.pack(program.run)  # pyright: ignore[reportArgumentType]
    stored = StoredProgram(
        file=f"{program.name}.xla",
        size=len(payload),
        sha256=store.sha256(payload),
        inputs=executables.describe_arguments(args),
        description=description,
        temp_bytes=program.temp_bytes,
        flops=program.flops,
        bytes=program.bytes,
        seconds=round(program.seconds, 3),
    )
    return stored, payload


def open_bundle(root: str, shapes: Mapping[str, Any], mesh: Mesh, bounded: bool) -> BundleSource:
    """Looks below `root` for programs of these shapes (Programs.facts) on this mesh.

    bounded: the folder is a cache, whose oldest bundles make room for new ones.
    """
    return BundleSource(Path(root), {**shapes, **identity.surroundings(mesh)}, bounded)
