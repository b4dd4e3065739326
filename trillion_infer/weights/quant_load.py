"""Keeping weights quantised in device memory: each such parameter is loaded as two, its packed items and its scales."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from pallas_kernels.quantised_matmul.formats import Format, QuantisedTensor, abstract
from trillion_infer.weights.checkpoint import Checkpoint
from trillion_infer.weights.plan import region_of, transformed_shape
from trillion_infer.weights.quant_checkpoint import BLOCK_SCALE, PACKED, SCALE, QuantisedCheckpoint
from trillion_infer.weights.quant_config import ignored
from trillion_infer.weights.quant_formats import StoredFormat
from trillion_infer.weights.spec import ParamSpec, Source

Select = Callable[[ParamSpec], bool]
"""Which parameters may stay packed."""


def routed_experts(spec: ParamSpec) -> bool:
    """Selects the weights of routed experts: nearly all bytes of a large mixture, and the op that reads them packed."""
    return "experts" in spec.axes


def first_axes(sharding: Sharding, count: int) -> Sharding:
    """The same split for an array that has only the first `count` axes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:count]), memory_kind=sharding.memory_kind)


@dataclass(frozen=True)
class KeptQuantised:
    """Specs and shardings of everything to load, with kept parameters in two parts, and how to join them again."""

    specs: dict[str, ParamSpec]
    shardings: dict[str, Sharding]
    checkpoint: Checkpoint
    formats: dict[str, tuple[Format, int]]  # of each kept parameter: name, and elements that share a scale

    def join(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parts (arrays, or abstract shapes) to `QuantisedTensor`s; other parameters as they are."""
        out = {n: p for n, p in params.items() if not n.endswith((PACKED, SCALE))}
        for name, (format, group) in self.formats.items():
            parts = params[name + PACKED], params[name + SCALE]
            out[name] = QuantisedTensor(*parts, format=format, group=group)
        return out

    def tied_parts(self, tied: Mapping[str, str]) -> dict[str, str]:
        """`tied` of `load_params`, where a head that is loaded in two parts is tied part by part."""
        read = {source.name for spec in self.specs.values() for source in spec.sources}
        split = [head for head in tied if head + PACKED in read]
        parts = {head + part: tied[head] + part for head in split for part in (PACKED, SCALE)}
        return {head: embedding for head, embedding in tied.items() if head not in split} | parts


def split_quantised(
    specs: Mapping[str, ParamSpec],
    shardings: Mapping[str, Sharding],
    checkpoint: QuantisedCheckpoint,
    select: Select = lambda spec: True,
) -> KeptQuantised:
    """Splits every selected parameter that can stay packed: all its sources are stored in the format, and the shards
    and the sources' transforms leave rows of packed items whole. Scales are repeated where a shard would cut a group.
    The other parameters are decoded to the engine's dtype while loading.
    """
    out_specs, out_shardings, formats = {}, {}, {}
    parts, whole = set(), set()
    for name, spec in specs.items():
        split = _split(spec, shardings[name], checkpoint) if select(spec) else None
        if split is None:
            out_specs[name], out_shardings[name] = spec, shardings[name]
            whole.update(s.name for s in spec.sources)
            continue
        packed, scale, group = split
        formats[name] = checkpoint.format.name, group
        for suffix, part in ((PACKED, packed), (SCALE, scale)):
            out_specs[name + suffix], out_shardings[name + suffix] = part, shardings[name]
            parts.update(s.name for s in part.sources)
    both = sorted(whole & {n.partition("#")[0] for n in parts})
    if both:
        raise ValueError(f"{', '.join(both)} cannot be both packed and decoded: several parameters read them")
    return KeptQuantised(out_specs, out_shardings, checkpoint.keeping(parts), formats)


def abstract_kept(
    specs: Mapping[str, ParamSpec], shardings: Mapping[str, Sharding], checkpoint: QuantisedCheckpoint, select: Select
) -> dict[str, QuantisedTensor]:
    """Shapes and shardings of the parameters that `load_params` keeps packed."""
    kept = split_quantised(specs, shardings, checkpoint, select)
    parts = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=kept.shardings[name])
        for name, spec in kept.specs.items()
        if name.endswith((PACKED, SCALE))
    }
    return kept.join(parts)


def abstract_described(
    specs: Mapping[str, ParamSpec],
    shardings: Mapping[str, Sharding],
    format: StoredFormat,
    plain: Sequence[str],
    select: Select,
) -> dict[str, QuantisedTensor]:
    """What `abstract_kept` gives for the checkpoint of a `quantization_config` (see `read_quantisation`) that is not
    here: its quantised weights are taken to be every matrix that the config does not name plain, as the model has
    them, with int4 scales in bfloat16."""
    described = {}
    for name, spec in specs.items():
        modules = [s.name.removesuffix(".weight") for s in spec.sources]
        if not modules or not select(spec) or any(m.endswith("bias") or ignored(m, plain) for m in modules):
            continue
        sharding = shardings[name]
        per_row = format.name == "fp8" and not _aligned(spec, sharding, format.group)
        group = _row_group(spec, sharding, format) if format.name != "fp8" or per_row else format.group
        if group % format.per_item:
            continue
        weight = abstract(spec.shape, format.name, group=group, scale_dtype=_SCALE_DTYPES[format.name])
        if per_row:
            rows = jax.ShapeDtypeStruct((*spec.shape[:-1], -(-spec.shape[-1] // group)), weight.scale.dtype)
            weight = dataclasses.replace(weight, scale=rows)
        described[name] = jax.tree.map(
            lambda leaf, at=sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), weight
        )
    return described


_SCALE_DTYPES = {"int4": jnp.bfloat16, "fp8": jnp.float32, "mxfp4": jnp.uint8}


def _split(
    spec: ParamSpec, sharding: Sharding, checkpoint: QuantisedCheckpoint
) -> tuple[ParamSpec, ParamSpec, int] | None:
    """Specs of packed items and scales, and the group's size; None when the parameter has to be decoded."""
    format = checkpoint.format
    if not spec.sources or len(spec.shape) < 2 or not all(checkpoint.is_quantised(s.name) for s in spec.sources):
        return None
    if format.name == "fp8" and _blocks_whole(spec, sharding, format.group, checkpoint):
        rows, width = spec.shape[-2:]
        blocks = (*spec.shape[:-2], -(-rows // format.group), -(-width // format.group))
        sources = tuple(Source(s.name + BLOCK_SCALE, s.index[: len(spec.shape) - 2]) for s in spec.sources)
        scale = dataclasses.replace(spec, shape=blocks, dtype="float32", sources=sources)
        return _part(spec, checkpoint, PACKED, 1), scale, format.group
    group = _row_group(spec, sharding, format)
    if group % format.per_item:
        return None
    packed = _part(spec, checkpoint, PACKED, format.per_item)
    scale = _part(spec, checkpoint, SCALE, group)
    return (packed, scale, group) if _fits(packed, checkpoint) and _fits(scale, checkpoint) else None


def _row_group(spec: ParamSpec, sharding: Sharding, format: StoredFormat) -> int:
    """Elements of a row that share a scale: no shard and no source ends inside such a group."""
    return math.gcd(format.group, sharding.shard_shape(spec.shape)[-1], *_edges(spec))


def _edges(spec: ParamSpec) -> list[int]:
    """Where the sources' regions begin and end along the last axis."""
    return [edge for s in spec.sources for edge in region_of(s, spec.shape).box[-1][:2]]


def _blocks_whole(spec: ParamSpec, sharding: Sharding, block: int, checkpoint: QuantisedCheckpoint) -> bool:
    """True when every source is a whole matrix, as stored, and no shard cuts a block."""
    if not _aligned(spec, sharding, block):
        return False
    return all(s.transform is None and checkpoint.shape(s.name) == spec.shape[-2:] for s in spec.sources)


def _aligned(spec: ParamSpec, sharding: Sharding, block: int) -> bool:
    shard = sharding.shard_shape(spec.shape)
    return all(shard[a] == spec.shape[a] or shard[a] % block == 0 for a in (-2, -1))


def _part(spec: ParamSpec, checkpoint: QuantisedCheckpoint, suffix: str, unit: int) -> ParamSpec:
    """The spec of packed items or of scales, one of which stands for `unit` elements of a row."""
    repeats = checkpoint.format.group // unit if suffix == SCALE else 1
    axis, sources = checkpoint.format.in_axis, []
    for s in spec.sources:
        index, transform = s.index, s.transform
        if len(index) == len(spec.shape):
            start, stop, _ = region_of(s, spec.shape).box[-1]
            index = (*index[:-1], slice(start // unit, stop // unit))
        if repeats > 1:
            transform = partial(_finer, repeats, axis, -(-checkpoint.shape(s.name)[axis] // unit), transform)
        sources.append(Source(s.name + suffix, index, transform))
    shape, dtype = (*spec.shape[:-1], spec.shape[-1] // unit), checkpoint.dtype(sources[0].name)
    return dataclasses.replace(spec, shape=shape, dtype=dtype.name, sources=tuple(sources))


def _finer(repeats: int, axis: int, count: int, transform: Any, scales: np.ndarray) -> np.ndarray:
    """Scales of `count` finer groups (the last coarse group may be partial), then the weight's own transform."""
    scales = np.repeat(scales, repeats, axis=axis)
    scales = scales[..., :count] if axis == -1 else scales[..., :count, :]
    return scales if transform is None else transform(scales)


def _fits(part: ParamSpec, checkpoint: QuantisedCheckpoint) -> bool:
    """True when the sources' transforms, which were written for the decoded weight, take its parts as well."""
    for source in part.sources:
        region = region_of(source, part.shape)
        try:
            if transformed_shape(region, checkpoint) != region.shape:
                return False
        except (ValueError, IndexError):
            return False
    return True
