"""Latent paged attention by the native CPU kernels, which are imported (and built) only when asked for."""

from typing import Any

from jaxtyping import Array

from pallas_kernels.quantised_matmul.native import refusal_of_platform


def refusal(q_latent: Array, pool: Array) -> str | None:
    """Why the native kernels cannot run these arguments here; None where they can."""
    if reason := refusal_of_platform(q_latent, pool):
        return reason
    from pallas_kernels.cpu_native.attention import refuse_dtypes

    try:
        refuse_dtypes(q_latent, pool)
    except NotImplementedError as error:
        return f"{error}."
    return None


def latent_paged_attention(*args: Array, **options: Any) -> tuple[Array, ...]:
    """As the contract of the op says."""
    from pallas_kernels.cpu_native.attention import latent_paged_attention as native_attention

    return native_attention(*args, **options)
