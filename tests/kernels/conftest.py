import importlib
import json
from collections.abc import Callable
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.report import Row
from pallas_kernels.common.slot_shard import SlotShard


@pytest.fixture
def compiled_row(pytestconfig) -> Callable[[str, str, str, str], Row]:
    """compiled_row(op, target, name of a shape, batch): what the kernel report says; kept in the folder of --rows."""

    def make(op: str, *case: str) -> Row:
        row = importlib.import_module(f"pallas_kernels.{op}.report").REPORT.row(*case)
        if folder := pytestconfig.getoption("--rows"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{'_'.join(row.key)}.json").write_text(json.dumps([asdict(row)]))
        return row

    return make


@pytest.fixture
def over_shards() -> Callable:
    """A function that runs an attention op on every shard of a pool split along its slots, and merges the outputs.

    `over_shards(op, args, pools, count)`: `op(*args, slots)` returns (out, lse, *pools); `pools` says which of
    `args` those are and which of their axes has the slots. Gives the output merged in float64, the pools joined, and
    the (out, lse) of each shard.
    """

    def run(op, args, pools, count):
        compiled, parts, written = jax.jit(op), [], []
        for index in range(count):
            shard = list(args)
            for i, axis in pools.items():
                shard[i] = np.split(np.asarray(args[i]), count, axis=axis)[index]
            out, lse, *rest = compiled(*map(jnp.asarray, shard), SlotShard(jnp.int32(index), count))
            assert out.dtype == lse.dtype == jnp.float32
            parts.append((np.asarray(out, np.float64), np.asarray(lse, np.float64)))
            written.append([np.asarray(pool) for pool in rest])
        joined = [np.concatenate(p, axis) for p, axis in zip(zip(*written, strict=True), pools.values(), strict=True)]
        return _merge(parts), joined, parts

    return run


def _merge(parts):
    outs, lses = (np.stack(part) for part in zip(*parts, strict=True))
    top = lses.max(0)
    weights = np.exp(lses - np.where(np.isfinite(top), top, 0))
    total = weights.sum(0)
    return (outs * weights[..., None]).sum(0) / np.where(total > 0, total, 1)[..., None]
