"""Logical axes of parameters to axes of the mesh: one table per role; two logical axes on one mesh axis raise."""

import math
from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.heads import HeadPlan

MODEL_AXES = ("expert", "tensor")
"""Mesh axes whose devices see the same tokens: what is not an expert is split over all of them."""

VOCAB_AXES = ("stage", *MODEL_AXES)
"""Mesh axes of the vocabulary: every stage takes part in the embedding and the logits."""

Rules = Mapping[str, tuple[str, ...]]

SERVE_RULES: Rules = MappingProxyType(
    {
        "layers": ("stage",),
        "vocab": VOCAB_AXES,
        "embed": (),
        "kv_heads": ("tensor", "expert"),
        "shared_kv_heads": ("tensor",),
        "kv_replicas": ("expert",),
        "heads_in_group": (),
        "head_dim": (),
        "heads": MODEL_AXES,
        "latent": (),
        "latent_rows": MODEL_AXES,
        "ffn": MODEL_AXES,
        "gate_up": (),
        "experts": ("data", "sequence", "expert"),
        "expert_ffn": ("tensor",),
        "router": (),
        "router_rows": MODEL_AXES,
        "norm": (),
        "pages": ("data",),
        "slots": ("sequence",),
        "shared_slots": ("sequence", "expert"),
        "latent_slots": ("sequence", *MODEL_AXES),
    }
)
"""Megatron layout (arXiv 1909.08053): heads, ffn width and vocabulary over `expert` and `tensor` together, experts over
every axis but `stage` and `tensor`, which splits their width. The rows of low-rank and router products are split too,
and their few results gathered; norms and biases are replicated. Slots of KV pages are split over `sequence`, and over
the axes of the heads as well where all heads share a page's entries. Where there are fewer KV heads than devices, so
that those along `expert` would hold the same ones (`kv_plan`), they split the slots too. Layers and vocabulary lie over
`stage` too.

A new layout is another table: a layer asks `mesh_axes` where its contraction is split and sums over those axes.
"""


def mesh_axes(rules: Rules, logical: str | None) -> tuple[str, ...]:
    """The mesh axes a logical axis is split over, the slowest first. A name the table lacks raises KeyError."""
    return () if logical is None else rules[logical]


def shards(rules: Rules, logical: str, sizes: Mapping[str, int]) -> int:
    """Into how many parts a logical axis is cut on a mesh of these sizes."""
    return math.prod(sizes[axis] for axis in mesh_axes(rules, logical))


def kv_plan(heads: int, kv_heads: int, sizes: Mapping[str, int]) -> tuple[HeadPlan, str, str]:
    """How a pool of attention heads is cut on a mesh: its heads, and the logical axes of its heads and its slots.

    The plan of the weights is HeadPlan over all of `kv_heads`' devices. Where its replicas are just the devices along
    `expert`, the pool holds each KV head once and these devices share its slots.
    """
    whole = HeadPlan(heads, kv_heads, shards(SERVE_RULES, "kv_heads", sizes))
    if whole.replicas > 1 and whole.replicas == sizes["expert"]:
        return HeadPlan(heads, kv_heads, sizes["tensor"]), "shared_kv_heads", "shared_slots"
    return whole, "kv_heads", "slots"


def partition_spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """PartitionSpec of a parameter from its logical axes."""
    placed: dict[str, str | None] = {}
    parts = []
    for logical in axes:
        physical = mesh_axes(rules, logical)
        for axis in physical:
            if axis in placed:
                raise ValueError(
                    f"logical axes {placed[axis]!r} and {logical!r} of one parameter both map to mesh axis "
                    f"{axis!r}; give one of them another axis in the rules."
                )
            placed[axis] = logical
        parts.append(physical[0] if len(physical) == 1 else physical or None)
    return PartitionSpec(*parts)


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...], rules: Rules) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes, rules))
