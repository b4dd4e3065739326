"""The target's states of the examples: computed once and kept in a file where they fit, or computed at each use."""

import hashlib
import json
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from trillion_infer.train.target import TargetStates


class Features:
    """States `[N, T, 3M + M]` of examples, auxiliary ones before the final ones, in the target's own type.

    tokens: `[N, T]`. path: the file they are kept in, N * T * 4M values, if that is at most `limit` bytes; one of the
    same target and tokens is read instead of being made. Kept or not, the values are the same but for what the
    neighbours in a batch change in the last bit. A file that holds the first of them, cut short by a crash or made of
    fewer examples, is gone on with.
    """

    def __init__(self, target: TargetStates, name: str, tokens: Int[np.ndarray, "N T"], path: Path, limit: int):
        self._target, self._tokens = target, tokens
        self._shape = (*tokens.shape, target.width)
        size = int(np.prod(self._shape)) * target.dtype.itemsize
        self._kept = self._open(path, name) if size <= limit else None

    @property
    def stored(self) -> bool:
        """Whether they are in the file."""
        return self._kept is not None

    def __call__(self, indices: Int[np.ndarray, "B"]) -> tuple[Float[Array, "B T 3M"], Float[Array, "B T M"]]:
        """States of some examples, as many as the target takes at once."""
        if self._kept is None:
            return self._target(self._tokens[indices])
        return self._split(np.asarray(self._kept[indices]))

    def _open(self, path: Path, name: str) -> np.memmap:
        mark = path.with_suffix(".json")
        about = {
            "target": name,
            "shape": list(self._shape[1:]),
            "dtype": str(self._target.dtype),
            "aux_layers": list(self._target.aux_layers),
        }
        found = json.loads(mark.read_text(encoding="utf-8")) if mark.exists() and path.exists() else {}
        done = found.get("done", 0)
        if found != {**about, "tokens": self._digest(done), "done": done}:
            done = 0
        kept = np.memmap(path, self._target.dtype, "r+" if done else "w+", shape=self._shape)
        rows = self._target.rows
        for start in range(done, len(self._tokens), rows):
            part = self._tokens[start : start + rows]
            padded = np.zeros((rows, part.shape[1]), np.int32)
            padded[: len(part)] = part
            aux, hidden = self._target(padded)
            kept[start : start + rows] = np.concatenate([aux, hidden], axis=-1)[: len(part)]
            kept.flush()
            new = mark.with_suffix(".new")
            done = start + len(part)
            new.write_text(json.dumps({**about, "tokens": self._digest(done), "done": done}), encoding="utf-8")
            new.replace(mark)
        return kept

    def _digest(self, count: int) -> str:
        """Of the first `count` examples' tokens."""
        return hashlib.sha256(self._tokens[:count].tobytes()).hexdigest()

    def _split(self, states: np.ndarray) -> tuple[jax.Array, jax.Array]:
        width = states.shape[-1] // 4 * 3
        return jax.numpy.asarray(states[..., :width]), jax.numpy.asarray(states[..., width:])
