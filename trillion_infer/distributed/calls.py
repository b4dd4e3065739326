"""Calls of compiled programs, written down by one process and repeated by others.

Arrays on the devices are known by number: those an engine starts with, then every result in the order of the calls.
What the host gives to a call travels with it. So a step is a few hundred bytes, whatever the model.
"""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Send = Callable[[list[Any]], None]
Run = Callable[..., Any]


class Recorder:
    """Tells followers of every call before it is made. One thread, the engine's, owns it."""

    def __init__(self, send: Send, mesh: Mesh):
        self._send, self._mesh = send, mesh
        self._numbers: dict[int, tuple[int, weakref.ref]] = {}
        self._next = 0
        self._dropped: list[int] = []

    def know(self, tree: Any) -> None:
        """The arrays of `tree` are there on every side; both give them the same numbers."""
        for leaf in jax.tree.leaves(tree):
            self._name(leaf)

    def wrap(self, name: str, run: Run) -> Run:
        """`run`, repeated by the followers as program `name`."""

        def recorded(*args: Any) -> Any:
            leaves = jax.tree.leaves(args)
            values = [self._number(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves]
            dropped, self._dropped = self._dropped, []
            self._send(["call", name, dropped, values])
            result = run(*args)
            self.know(result)
            return result

        return recorded

    def place(self, value: np.ndarray, sharding: NamedSharding) -> jax.Array:
        """The array on the devices of every process."""
        self._send(["place", value, [list(p) if isinstance(p, tuple) else p for p in sharding.spec]])
        placed = place(value, sharding)
        self._name(placed)
        return placed

    def share(self, value: jax.Array) -> jax.Array:
        """`value`, which lies on a device of this process, as the one row of an array `[devices, …]` over the mesh
        that is not zero: a program that sums the rows has it everywhere, and it travels between the devices."""
        self._send(["share", list(value.shape), value.dtype.name])
        shared = _rows(value.shape, value.dtype, self._mesh, value)
        self._name(shared)
        return shared

    def compare(self, step: int, array: jax.Array) -> None:
        """Has every follower compare a digest of this array's values with its own."""
        self._send(["compare", step, self._number(array), digest(array)])

    def _name(self, array: jax.Array) -> None:
        number, key = self._next, id(array)
        self._next += 1
        self._numbers[key] = (number, weakref.ref(array, lambda _: self._forget(key, number)))

    def _number(self, array: jax.Array) -> int:
        known = self._numbers.get(id(array))
        if known is None:
            raise RuntimeError(f"an array {array.shape} is passed that the followers do not have.")
        return known[0]

    def _forget(self, key: int, number: int) -> None:
        if self._numbers.get(key, (None,))[0] == number:
            del self._numbers[key]
        self._dropped.append(number)


class Replayer:
    """Repeats the calls that a Recorder tells of. `find`: the compiled program of a name."""

    def __init__(self, find: Callable[[str], Any], mesh: Mesh):
        self._find, self._mesh = find, mesh
        self._arrays: dict[int, jax.Array] = {}
        self._next = 0

    def know(self, tree: Any) -> None:
        """As Recorder.know."""
        for leaf in jax.tree.leaves(tree):
            self._arrays[self._next] = leaf
            self._next += 1

    def obey(self, message: Sequence[Any]) -> str | None:
        """Does what a message says; a sentence where a comparison fails."""
        kind, *values = message
        if kind == "call":
            self._call(*values)
        elif kind == "place":
            value, spec = values
            parts = (tuple(p) if isinstance(p, list) else p for p in spec)
            self.know(place(value, NamedSharding(self._mesh, PartitionSpec(*parts))))
        elif kind == "share":
            shape, dtype = values
            self.know(_rows(tuple(shape), jnp.dtype(dtype), self._mesh))
        elif kind == "compare":
            step, number, theirs = values
            if digest(self._arrays[number]) != theirs:
                return f"the tokens of step {step} differ from the leader's"
        else:
            raise ValueError(f"message {kind!r} is unknown.")
        return None

    def _call(self, name: str, dropped: list[int], values: list[Any]) -> None:
        for number in dropped:
            self._arrays.pop(number, None)
        program = self._find(name)
        leaves = [self._arrays[value] if isinstance(value, int) else value for value in values]
        args, _ = jax.tree.unflatten(program.in_tree, leaves)
        self.know(program(*args))


def place(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array of which each process fills its own shards from the whole `value`."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def row_sharding(mesh: Mesh) -> NamedSharding:
    """A row on each device of a mesh."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def local_devices(mesh: Mesh) -> list[jax.Device]:
    """The devices of a mesh that are this process's."""
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def _rows(shape: tuple[int, ...], dtype: Any, mesh: Mesh, value: jax.Array | None = None) -> jax.Array:
    """`[devices, *shape]`, a row on each device: `value` on this process's first, if it is given, zeros elsewhere."""
    devices = local_devices(mesh)
    rows = [jnp.zeros((1, *shape), dtype, device=device) for device in devices]
    if value is not None:
        rows[0] = jax.device_put(value, devices[0])[None]
    return jax.make_array_from_single_device_arrays((mesh.size, *shape), row_sharding(mesh), rows)


def digest(array: jax.Array) -> bytes:
    """SHA-256 of a replicated array's values."""
    return hashlib.sha256(np.ascontiguousarray(np.asarray(array)).tobytes()).digest()
