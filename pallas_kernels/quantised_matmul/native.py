"""Whether the native CPU kernels can run: they are imported, and built, only when that is asked."""

import jax
from jaxtyping import Array


def refusal_of_platform(*operands) -> str | None:
    """Why no native kernel can run on these arrays here; None where one can."""
    if jax.default_backend() != "cpu":
        return f"the default platform is {jax.default_backend()}."
    if any(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(operands)):
        return "native kernels do not run inside shard_map."
    from pallas_kernels.cpu_native.load import native

    return None if native().isas else f"{native().reason}."


def refusal_of_dtypes(*arrays: Array) -> str | None:
    """Why arrays of these dtypes cannot be multiplied natively; None where they can."""
    wrong = [array.dtype.name for array in arrays if array.dtype.name not in ("float32", "bfloat16")]
    return f"native products take float32 or bfloat16, got {wrong[0]}." if wrong else None
