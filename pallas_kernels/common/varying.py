"""Loop carries inside `jax.shard_map`."""

import jax
from jaxtyping import Array


def vary_like(value: Array, *others) -> Array:
    """`value`, marked as different on each device of every mesh axis over which one of `others` differs.

    A loop needs this of the constants that it starts from, when its body mixes them with such arrays; `others` are
    arrays or pytrees of them. Outside `shard_map` it does nothing.
    """
    axes = set().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(others)))
    missing = tuple(sorted(axes - jax.typeof(value).manual_axis_type.varying))
    return jax.lax.pcast(value, missing, to="varying") if missing else value
