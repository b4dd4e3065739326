"""What is to be known of an engine's pools, to move their pages."""

from typing import TYPE_CHECKING

from sharding.rules import kv_plan
from trillion_infer.cache.parts import layer_parts
from trillion_infer.config.model import AttentionSpec, cache_key
from trillion_infer.transfer.convert import VectorFormat
from trillion_infer.transfer.pages import PoolSide

if TYPE_CHECKING:
    from trillion_infer.engine.build import Blueprint


def pool_side(blueprint: "Blueprint") -> PoolSide:
    """The pools of an engine's cache groups, and of its drafters, in the order of `Engine.all_pools`."""
    target = blueprint.family.config
    owners = [(target, layout.key.name, layout) for layout in blueprint.layouts]
    groups = list(range(len(owners)))
    for draft in blueprint.drafts:
        checkpoint = draft.source.checkpoint
        name = f"{draft.name}-{'' if checkpoint is None else checkpoint.fingerprint().hex()[:12]}"
        owners += [(draft.model.config, f"{name}-{layout.key.name}", layout) for layout in draft.layouts]
        groups += [draft.group] * len(draft.layouts)
    plans, formats = [], []
    for config, _, layout in owners:
        mixer = next(layer.mixer for layer in config.layers if cache_key(layer.mixer) == layout.key)
        if isinstance(mixer, AttentionSpec):
            plans.append(kv_plan(mixer.heads, mixer.kv_heads, blueprint.mesh.shape)[0])
            formats.append(VectorFormat(layout.dtype, (layout.dim,)))
        else:
            plans.append(None)
            formats.append(VectorFormat(layout.dtype, (mixer.kv_rank, layout.dim - mixer.kv_rank)))
    _, names, layouts = zip(*owners, strict=True)
    most = {"most": 1} if blueprint.drafts else {}  # a drafter's layers are not the target's
    parts = layer_parts(target, blueprint.layouts, **most)
    return PoolSide(blueprint.mesh, names, layouts, tuple(plans), tuple(formats), tuple(groups), parts)
