"""What is to be known of an engine's pools, to move their pages."""

from typing import TYPE_CHECKING

from sharding.rules import kv_plan
from trillion_infer.config.model import AttentionSpec, cache_key
from trillion_infer.transfer.convert import VectorFormat
from trillion_infer.transfer.pages import PoolSide

if TYPE_CHECKING:
    from trillion_infer.engine.build import Blueprint


def pool_side(blueprint: "Blueprint") -> PoolSide:
    """The pools of an engine's cache groups, and of its drafters, in the order of `Engine.all_pools`."""
    target = blueprint.family.config
    owners = [(target, layout, group, layout.key.name) for group, layout in enumerate(blueprint.layouts)]
    for draft in blueprint.drafts:
        checkpoint = draft.source.checkpoint
        name = f"{draft.name}-{'' if checkpoint is None else checkpoint.fingerprint().hex()[:12]}"
        owners += [(draft.model.config, each, draft.group, f"{name}-{each.key.name}") for each in draft.layouts]
    plans, formats = [], []
    for config, layout, *_ in owners:
        mixer = next(layer.mixer for layer in config.layers if cache_key(layer.mixer) == layout.key)
        if isinstance(mixer, AttentionSpec):
            plans.append(kv_plan(mixer.heads, mixer.kv_heads, blueprint.mesh.shape)[0])
            formats.append(VectorFormat(layout.dtype, (layout.dim,)))
        else:
            plans.append(None)
            formats.append(VectorFormat(layout.dtype, (mixer.kv_rank, layout.dim - mixer.kv_rank)))
    layouts, groups, names = (tuple(each[place] for each in owners) for place in (1, 2, 3))
    return PoolSide(blueprint.mesh, names, layouts, tuple(plans), tuple(formats), groups)
