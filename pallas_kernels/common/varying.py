"""Which arrays differ between devices inside `jax.shard_map`: loop carries and kernel results must say so."""

import jax
from jaxtyping import Array


def vary_like(value: Array, *others) -> Array:
    """`value`, marked as different on each device of every mesh axis over which one of `others` differs.

    A loop needs this of the constants that it starts from, when its body mixes them with such arrays; `others` are
    arrays or pytrees of them. Outside `shard_map` it does nothing.
    """
    missing = tuple(sorted(_axes(others) - jax.typeof(value).manual_axis_type.varying))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def vary_together(*operands) -> tuple[Array, ...]:
    """Every operand of a kernel, marked as different where one of them is."""
    return tuple(vary_like(operand, *operands) for operand in operands)


def result_like(shape: tuple[int, ...], dtype, *operands) -> jax.ShapeDtypeStruct:
    """The result of a kernel whose operands went through `vary_together`."""
    manual = jax.typeof(operands[0]).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual)


def _axes(arrays) -> frozenset:
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(arrays)))
