"""What a step costs a device at least: floating point operations on weights, and bytes of weights read.

Counted from the model, since the compilers count the body of a loop over layers once and a kernel not at all (XLA for
GPUs that are not here counts nothing). Attention over earlier tokens depends on their number and is left out.
"""

import math

import jax

from trillion_infer.config.model import MoESpec
from trillion_infer.engine.buckets import Bucket
from trillion_infer.engine.build import Blueprint


def step_cost(blueprint: Blueprint, bucket: Bucket) -> tuple[float, float]:
    """Operations and bytes of a full step of this shape on one device; routing is taken as even."""
    sizes, config = blueprint.mesh.shape, blueprint.family.config
    splits_tokens = not bucket.is_decode and bucket.tokens % sizes["sequence"] == 0
    own_tokens = bucket.tokens / (sizes["sequence"] if splits_tokens else 1)
    all_tokens, rows = bucket.tokens * sizes["data"], bucket.sequences * bucket.width
    mixture = next((layer.ffn for layer in config.layers if isinstance(layer.ffn, MoESpec)), None)
    flops = held_bytes = 0.0
    weights = blueprint.abstract_params
    for name, spec in blueprint.specs.items():
        leaves = jax.tree.leaves(weights[name])
        shards = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves]
        size = sum(n * leaf.dtype.itemsize for n, leaf in zip(shards, leaves, strict=True))
        elements = math.prod(spec.shape) * shards[0] / math.prod(leaves[0].shape)
        if name.startswith("embed."):
            held_bytes += min(1.0, own_tokens / spec.shape[0]) * size
            flops += 2.0 * rows * elements if config.tied else 0.0
            continue
        uses, touched = own_tokens, 1.0
        if name.startswith("head."):
            uses = rows
        elif "experts" in spec.axes and mixture is not None:
            share = mixture.top_k / mixture.experts
            uses, touched = all_tokens * share, 1.0 - (1.0 - share) ** all_tokens
        held_bytes += touched * size
        flops += 2.0 * uses * elements if len(spec.shape) > 2 or name.startswith("head.") else 0.0
    return flops, held_bytes
