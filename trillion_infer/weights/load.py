"""Weights from a checkpoint's files to their shards on a mesh, in parallel, without a second copy on the host."""

import itertools
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from trillion_infer.weights.cast import copy_into
from trillion_infer.weights.checkpoint import Checkpoint
from trillion_infer.weights.gguf import GGUFCheckpoint
from trillion_infer.weights.gguf_packed import keep_blocks
from trillion_infer.weights.orbax import OrbaxCheckpoint
from trillion_infer.weights.pieces import Bounds, Piece, pieces
from trillion_infer.weights.plan import LoadPlan, Region, plan_load
from trillion_infer.weights.quant_checkpoint import QuantisedCheckpoint
from trillion_infer.weights.quant_load import Select, split_quantised
from trillion_infer.weights.quantise import quantise_specs
from trillion_infer.weights.random_init import init_params as init_params
from trillion_infer.weights.report import LoadReport as LoadReport
from trillion_infer.weights.report import Progress
from trillion_infer.weights.shards import ByteBudget, Fill, HostShard, MappedShard, Shard, StagedShard, in_files
from trillion_infer.weights.spec import HOST_MEMORY, ParamSpec

BLOCK_BYTES = 32 << 20  # largest copy at a time
MAPPED_BYTES = 128 << 20  # pages of the files that stay mapped
STAGED_BYTES = 512 << 20  # blocks on their way to devices, all threads together
WHOLE_BYTES = 1 << 20  # smaller shards are collected on the host and sent at once


def load_params(
    specs: Mapping[str, ParamSpec],
    checkpoint: Checkpoint,
    shardings: Mapping[str, Sharding],
    *,
    dtype: Any,
    ignore: Sequence[str] = (),
    tied: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    keep_quantised: bool | Select = False,
    quantize: str | None = None,
    staged: bool | None = None,
    mapped: Path | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """Reads every parameter of `specs` into arrays with `shardings`.

    Each process reads only what its own shards need. Host memory beyond the arrays stays below about `STAGED_BYTES`
    and, for formats that are decoded, one tensor a thread. `dtype` is the engine's, for specs without one;
    `ignore` are regular expressions of tensors that are skipped with a notice; `tied` maps a head's tensor to the
    embedding that may stand in for it. `progress(bytes_done, bytes_total)` is called from the calling thread.
    `keep_quantised` returns weights that the checkpoint holds quantised (all, or those it selects) as
    `QuantisedTensor`s where their layout allows (see `split_quantised`, and `keep_blocks` for GGUF); otherwise they are
    decoded.
    `quantize` names a recipe of `rounding.py` by which the weights of products are rounded while they stream.
    `mapped`: a folder for files in which parameters in host memory lie, mapped, instead of in memory itself.
    `staged` forces filling on the device block by block, or not; None does so except on CPU devices.
    A checkpoint in final layout is restored as it was written; `ignore`, `tied`, `threads` and `keep_quantised` have
    been dealt with then. Raises ModelLoadError before anything is placed when names, shapes or dtypes do not fit.
    """
    begun = time.perf_counter()
    if isinstance(checkpoint, OrbaxCheckpoint) and not quantize:
        params, report = checkpoint.restore(specs, shardings, dtype, progress)
        return (params if mapped is None else in_files(params, mapped)), report
    kept = None
    if quantize:
        kept = quantise_specs(specs, shardings, checkpoint, quantize)
        tied = kept.tied_parts(tied or {})
    elif keep_quantised and isinstance(checkpoint, QuantisedCheckpoint):
        select = keep_quantised if callable(keep_quantised) else lambda spec: True
        kept = split_quantised(specs, shardings, checkpoint, select)
    elif keep_quantised and isinstance(checkpoint, GGUFCheckpoint):
        kept = keep_blocks(specs, shardings, checkpoint)
        tied = kept.tied_parts(tied or {})
    if kept is not None:
        parts, report = load_params(
            kept.specs,
            kept.checkpoint,
            kept.shardings,
            dtype=dtype,
            ignore=ignore,
            tied=tied,
            progress=progress,
            threads=threads,
            staged=staged,
            mapped=mapped,
        )
        return kept.join(parts), report
    plan = plan_load(specs, checkpoint, dtype=dtype, ignore=ignore, tied=tied)
    budget = ByteBudget(STAGED_BYTES)
    whole = {
        name: jax.ShapeDtypeStruct(s.shape, plan.dtypes[name], sharding=shardings[name]) for name, s in specs.items()
    }
    blank = _blank({name: w for name, w in whole.items() if (_worth_staging(w) if staged is None else staged)})
    params = {name: _Parameter(w, blank.pop(name, None), budget, mapped) for name, w in whole.items()}
    jobs = list(_jobs(plan, checkpoint, params))
    total = sum(job.bytes for job in jobs)
    _run(jobs, progress or (lambda done, total: None), total, threads or min(32, os.cpu_count() or 1))
    arrays = {name: param.array() for name, param in params.items()}
    jax.block_until_ready(arrays)
    return arrays, LoadReport(total, time.perf_counter() - begun, tied=plan.tied, skipped=plan.skipped)


def _worth_staging(whole: jax.ShapeDtypeStruct) -> bool:
    """True for parameters whose shards are too large to collect on the host before they are sent."""
    on_host = next(iter(whole.sharding.device_set)).platform == "cpu"
    on_host = on_host or whole.sharding.memory_kind == HOST_MEMORY
    return not on_host and math.prod(whole.sharding.shard_shape(whole.shape)) * whole.dtype.itemsize > WHOLE_BYTES


def _blank(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, dict[jax.Device, jax.Array]]:
    """Zeros on the devices, by one program for all parameters: each one's array on each device."""
    if not wanted:
        return {}
    make = jax.jit(
        lambda: {name: jnp.zeros(w.shape, w.dtype) for name, w in wanted.items()},
        out_shardings={name: w.sharding for name, w in wanted.items()},
    )
    return {name: {s.device: s.data for s in array.addressable_shards} for name, array in make().items()}


class _Parameter:
    """One parameter while it is being filled: in `blank` arrays on the devices, or without them on the host."""

    def __init__(
        self,
        whole: jax.ShapeDtypeStruct,
        blank: dict[jax.Device, jax.Array] | None,
        budget: ByteBudget,
        mapped: Path | None = None,
    ):
        self._whole = whole
        self.dtype = np.dtype(whole.dtype)
        by_bounds: dict[Bounds, list[jax.Device]] = {}
        for device, index in whole.sharding.addressable_devices_indices_map(whole.shape).items():
            assert index is not None
            bounds = tuple(s.indices(n)[:2] for s, n in zip(index, whole.shape, strict=True))
            by_bounds.setdefault(bounds, []).append(device)
        self._shards: dict[Bounds, _Filling] = {}
        for bounds, devices in by_bounds.items():
            places = [SingleDeviceSharding(d, memory_kind=whole.sharding.memory_kind) for d in devices]
            if mapped is not None and whole.sharding.memory_kind == HOST_MEMORY:
                shard = MappedShard([high - low for low, high in bounds], self.dtype, places, mapped)
            elif blank is None:
                shard = HostShard([high - low for low, high in bounds], self.dtype, places)
            else:
                shard = StagedShard([blank.pop(d) for d in devices], places, budget)
            self._shards[bounds] = _Filling(bounds, shard)
        self._cuts = [sorted({bounds[axis] for bounds in self._shards}) for axis in range(len(whole.shape))]

    def touched_by(self, region: Region) -> Iterator["_Filling"]:
        """This process's shards that a region reaches into (with a step it may still miss them)."""
        reach = [
            [(low, high) for low, high in cuts if low < stop and start < high]
            for cuts, (start, stop, _) in zip(self._cuts, region.box, strict=True)
        ]
        return (self._shards[bounds] for bounds in itertools.product(*reach) if bounds in self._shards)

    def array(self) -> jax.Array:
        """The whole, as a global array."""
        local = [a for shard in self._shards.values() for a in shard.arrays()]
        return jax.make_array_from_single_device_arrays(self._whole.shape, self._whole.sharding, local)


class _Filling:
    """A shard with the number of pieces it still waits for; it is placed as soon as the last one is in."""

    def __init__(self, bounds: Bounds, shard: Shard):
        self.bounds = bounds
        self._shard = shard
        self._waiting, self._lock = 0, threading.Lock()
        self._arrays: list[jax.Array] | None = None

    def expect(self) -> None:
        """One more piece will come."""
        self._waiting += 1

    def write(self, piece: Piece, fill: Fill) -> None:
        """Has `fill` write one expected piece, given a view with the axes of the tensor."""
        self._shard.write(piece.target, lambda block: fill(piece.squeeze(block)))
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._arrays = self._shard.finish()

    def arrays(self) -> list[jax.Array]:
        """The shard on each of its devices."""
        assert not self._waiting
        return self._shard.finish() if self._arrays is None else self._arrays


class _MappedPages:
    """Lets go of mapped file pages after every `MAPPED_BYTES` of them, so that they do not pile up in memory."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._names: set[str] = set()
        self._bytes, self._lock = 0, threading.Lock()

    def touched(self, name: str, size: int) -> None:
        """Part of tensor `name` has been read."""
        with self._lock:
            self._names.add(name)
            self._bytes += size
            if self._bytes < MAPPED_BYTES:
                return
            names, self._names, self._bytes = self._names, set(), 0
        for each in names:
            self._checkpoint.release(each)


@dataclass(frozen=True)
class _DecodeJob:
    """Whole rows of a tensor, decoded where they belong."""

    checkpoint: Checkpoint
    pages: "_MappedPages"
    name: str
    shard: _Filling
    piece: Piece
    bytes: int

    def __call__(self) -> int:
        self.shard.write(self.piece, lambda out: self.checkpoint.decode(self.name, self.piece.source[0], out))
        self.pages.touched(self.name, self.bytes)
        return self.bytes


@dataclass(frozen=True)
class _Job:
    """One reading of a tensor and everything that is cut from it."""

    checkpoint: Checkpoint
    pages: "_MappedPages"
    name: str
    dtype: np.dtype
    cuts: list[tuple[Region, _Filling, Piece]]
    bytes: int

    def __call__(self) -> int:
        tensor = self.checkpoint.read(self.name, self.dtype)
        for region, shard, piece in self.cuts:
            values = region.transform(tensor) if region.transform else tensor
            shard.write(piece, partial(copy_into, source=values[piece.source]))
        self.pages.touched(self.name, self.bytes)
        return self.bytes


def _jobs(plan: LoadPlan, checkpoint: Checkpoint, params: Mapping[str, _Parameter]) -> Iterable[_Job | _DecodeJob]:
    """Work in the order of the files: a job a piece, but one for all pieces that need a decoded tensor whole."""
    pages = _MappedPages(checkpoint)
    users: dict[str, list[tuple[str, Region]]] = {}
    for param, regions in plan.regions.items():
        for region in regions:
            users.setdefault(region.name, []).append((param, region))
    for name in sorted(users, key={n: i for i, n in enumerate(checkpoint.names())}.__getitem__):
        per_value = checkpoint.nbytes(name) / max(1, math.prod(checkpoint.shape(name)))
        together: dict[np.dtype, list[tuple[Region, _Filling, Piece]]] = {}
        for param, region in users[name]:
            target = params[param]
            limit = max(1, BLOCK_BYTES // target.dtype.itemsize)
            for shard in target.touched_by(region):
                for piece in pieces(region, shard.bounds, limit):
                    shard.expect()
                    cut, size = (region, shard, piece), int(piece.size * per_value)
                    if not checkpoint.decoded(name):
                        yield _Job(checkpoint, pages, name, target.dtype, [cut], size)
                    elif region.transform is None and _whole_rows(piece, region.shape):
                        yield _DecodeJob(checkpoint, pages, name, shard, piece, size)
                    else:
                        together.setdefault(target.dtype, []).append(cut)
        for dtype, cuts in together.items():
            yield _Job(checkpoint, pages, name, dtype, cuts, checkpoint.nbytes(name))


def _whole_rows(piece: Piece, shape: tuple[int, ...]) -> bool:
    rows = zip(piece.source[1:], shape[1:], strict=True)
    return len(shape) > 1 and all(s == slice(0, n) for s, n in rows)


def _run(jobs: Sequence[_Job | _DecodeJob], progress: Progress, total: int, threads: int) -> None:
    """Runs all jobs; the first failure, or an interrupt, cancels those not begun and is raised."""
    done = 0
    progress(done, total)
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        waiting: set[Future[int]] = {pool.submit(job) for job in jobs}
        try:
            while waiting:
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                done += sum(f.result() for f in finished)
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
