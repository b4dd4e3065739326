"""Logical axes of parameters to axes of the mesh: one table per role; two logical axes on one mesh axis raise."""

from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules = Mapping[str, str | None]

SERVE_RULES: Rules = MappingProxyType(
    {
        "layers": None,
        "vocab": "tensor",
        "embed": None,
        "kv_heads": "tensor",
        "heads_in_group": None,
        "head_dim": None,
        "heads": "tensor",
        "latent": None,
        "ffn": "tensor",
        "gate_up": None,
        "experts": "expert",
        "expert_ffn": "tensor",
        "router": None,
        "norm": None,
    }
)
"""Megatron layout (arXiv 1909.08053): heads and ffn width over `tensor`, experts over `expert`, the rest replicated.

A new layout is another table: a layer asks `mesh_axis` where its contraction is split and sums over that axis.
"""


def mesh_axis(rules: Rules, logical: str | None) -> str | None:
    """The mesh axis a logical axis is split over; None: not split. A name the table lacks raises KeyError."""
    return None if logical is None else rules[logical]


def partition_spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """PartitionSpec of a parameter from its logical axes."""
    placed: dict[str, str | None] = {}
    parts = []
    for logical in axes:
        physical = mesh_axis(rules, logical)
        if physical is not None:
            if physical in placed:
                raise ValueError(
                    f"logical axes {placed[physical]!r} and {logical!r} of one parameter both map to mesh axis "
                    f"{physical!r}; give one of them another axis in the rules."
                )
            placed[physical] = logical
        parts.append(physical)
    return PartitionSpec(*parts)


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...], rules: Rules) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes, rules))
