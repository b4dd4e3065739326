"""What has to be read, and where it goes: every name, shape and dtype is checked here, before anything is placed."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.weights.cast import convertible
from trillion_infer.weights.checkpoint import Checkpoint
from trillion_infer.weights.spec import ParamSpec, Source

# A table that older exporters saved beside the weights; it follows from the configuration.
ALWAYS_IGNORED = (r".*\.rotary_emb\.inv_freq",)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Region:
    """Tensor `name` fills `box`, a (start, stop, step) an axis; axes in `dropped` are not in the tensor."""

    name: str
    box: tuple[tuple[int, int, int], ...]
    dropped: tuple[int, ...]
    transform: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the transformed tensor must have."""
        kept = (b for axis, b in enumerate(self.box) if axis not in self.dropped)
        return tuple(len(range(*b)) for b in kept)


@dataclass
class LoadPlan:
    """Regions of each parameter, its dtype, and what was decided about the other tensors."""

    regions: dict[str, list[Region]] = field(default_factory=dict)
    dtypes: dict[str, np.dtype] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def plan_load(
    specs: Mapping[str, ParamSpec],
    checkpoint: Checkpoint,
    *,
    dtype: Any,
    ignore: Sequence[str] = (),
    tied: Mapping[str, str] | None = None,
) -> LoadPlan:
    """Checks `specs` against the checkpoint's index and returns what to read. Nothing is read but tied duplicates.

    `tied` maps a head's tensor name to the embedding that stands in for it when the config says
    `tie_word_embeddings`. Raises one ModelLoadError that lists every missing, unexpected and unfitting tensor.
    """
    stored = set(checkpoint.names())
    plan, wrong = LoadPlan(), []
    substitutes = _resolve_tied(checkpoint, stored, tied or {}, plan)
    missing, used = [], set(substitutes)
    for param, spec in specs.items():
        target = np.dtype(jnp.dtype(spec.dtype or dtype))
        plan.dtypes[param] = target
        regions = []
        for source in spec.sources:
            name = substitutes.get(source.name, source.name)
            used.add(name)
            if name not in stored:
                missing.append(name)
                continue
            region = region_of(source, spec.shape, name)
            wrong.extend(_misfit(region, checkpoint, target, param))
            regions.append(region)
        plan.regions[param] = regions
    extra = sorted(stored - used)
    pattern = re.compile("|".join(f"(?:{p})" for p in (*ALWAYS_IGNORED, *ignore)))
    plan.skipped = tuple(n for n in extra if pattern.fullmatch(n))
    unexpected = sorted(set(extra) - set(plan.skipped))
    _complain(checkpoint, sorted(set(missing)), unexpected, wrong)
    if plan.skipped:
        _LOG.info("%s: %d tensors are not used, e.g. %s", checkpoint.path, len(plan.skipped), plan.skipped[0])
    return plan


def _resolve_tied(checkpoint: Checkpoint, stored: set[str], tied: Mapping[str, str], plan: LoadPlan) -> dict[str, str]:
    """Which tensor each tied name is read from; errors name both facts that contradict."""
    says = _tie_flag(checkpoint.config)
    substitutes = {}
    for head, embedding in tied.items():
        if head in stored and says is True and embedding in stored and not _equal(checkpoint, head, embedding):
            raise ModelLoadError(
                f"config.json says tie_word_embeddings is true, but {checkpoint.path} holds a {head} that differs from "
                f"{embedding}; set tie_word_embeddings to false if the head is meant to be used"
            )
        if head not in stored and says is False:
            raise ModelLoadError(
                f"config.json says tie_word_embeddings is false, but {checkpoint.path} holds no {head}; "
                f"set it to true if {embedding} is meant to serve as the head, or fetch the missing weights"
            )
        if says or head not in stored:
            substitutes[head] = embedding
    plan.tied = tuple(substitutes)
    return substitutes


def _tie_flag(config: Mapping[str, Any]) -> bool | None:
    """The config's word on tying, also that of a multimodal model's text part; None when it says nothing."""
    for part in (config, config.get("text_config") or {}):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    return None


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    if checkpoint.shape(one) != checkpoint.shape(other) or checkpoint.dtype(one) != checkpoint.dtype(other):
        return False
    a, b = checkpoint.read(one), checkpoint.read(other)
    step = max(1, (1 << 24) // max(1, math.prod(a.shape[1:])))
    same = all(
        np.array_equal(a[i : i + step].view(np.uint8), b[i : i + step].view(np.uint8)) for i in range(0, len(a), step)
    )
    checkpoint.release(one)
    checkpoint.release(other)
    return same


def region_of(source: Source, shape: tuple[int, ...], name: str | None = None) -> Region:
    """Where `source` (or tensor `name` in its place) goes in a parameter of `shape`, with every axis written out."""
    if len(source.index) > len(shape):
        raise ValueError(f"index {source.index} of {source.name} has more axes than shape {shape}")
    box, dropped = [], []
    for axis, size in enumerate(shape):
        part = source.index[axis] if axis < len(source.index) else slice(None)
        if isinstance(part, slice):
            box.append(part.indices(size))
        elif 0 <= part < size:
            box.append((part, part + 1, 1))
            dropped.append(axis)
        else:
            raise ValueError(f"index {part} of {source.name} is outside axis {axis} of size {size}")
    return Region(name or source.name, tuple(box), tuple(dropped), source.transform)


def transformed_shape(region: Region, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Shape of the region's tensor after its transform, found with a stand-in that takes no memory.

    Raises ValueError or IndexError where the transform cannot take the tensor's shape.
    """
    shape = checkpoint.shape(region.name)
    stand_in = np.broadcast_to(np.zeros((), checkpoint.dtype(region.name)), shape)
    return region.transform(stand_in).shape if region.transform else shape


def _misfit(region: Region, checkpoint: Checkpoint, target: np.dtype, param: str) -> list[str]:
    """Sentences on a shape or dtype that does not fit."""
    shape, dtype = checkpoint.shape(region.name), checkpoint.dtype(region.name)
    found = []
    if not convertible(dtype, target):
        found.append(f"{region.name} has dtype {dtype}, {param} needs {target}")
    try:
        result = transformed_shape(region, checkpoint)
    except (ValueError, IndexError) as error:
        found.append(f"{region.name} has shape {shape}, which {param} cannot use ({error})")
        return found
    if result != region.shape:
        becomes = f", which becomes {result}" if result != shape else ""
        found.append(f"{region.name} has shape {shape}{becomes}; {param} needs {region.shape}")
    return found


def _complain(checkpoint: Checkpoint, missing: list[str], unexpected: list[str], wrong: list[str]) -> None:
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing: {', '.join(missing)}")
    if unexpected:
        parts.append(f"{len(unexpected)} tensors are unexpected: {', '.join(unexpected)}")
    if wrong:
        parts.append(f"{len(wrong)} tensors do not fit: {'; '.join(wrong)}")
    if parts:
        raise ModelLoadError(f"{checkpoint.path} does not fit its config. {'. '.join(parts)}.")
