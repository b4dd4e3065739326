"""Writes of single slots into a pool of 8-bit rows on TPU, whole pages at a time.

A scatter of rows, or a slice at some slot of a page, has XLA lay the pool out anew, which copies it; whole pages are
read and written where they lie.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.common.varying import vary_like


def write_pages(
    pool: Array, rows: Array, layer: Int[Array, ""], page: Int[Array, " T"], slot: Int[Array, " T"]
) -> Array:
    """The pool `[L, P, p, R]` with `rows[t]` at the page and slot of token t (`token_places`); page -1 goes nowhere.

    Tokens of one page stand beside each other, in the order of their slots. One step of a loop a page.
    """
    (tokens, width), size = rows.shape, pool.shape[2]
    first = (page >= 0) & (page != jnp.concatenate([jnp.full(1, -1, page.dtype), page[:-1]]))
    starts = jnp.nonzero(first, size=tokens, fill_value=0)[0].astype(jnp.int32)
    rows = jnp.pad(rows, ((size, size), (0, 0)))
    pages = jnp.pad(page, (size, size), constant_values=-1)

    def body(i, pool):
        token = starts[i]
        begin = token - slot[token] + size
        new = lax.dynamic_slice_in_dim(rows, begin, size)
        mine = lax.dynamic_slice_in_dim(pages, begin, size) == page[token]
        place = (layer, page[token], 0, 0)
        old = lax.dynamic_slice(pool, place, (1, 1, size, width))
        return lax.dynamic_update_slice(pool, jnp.where(mine[None, None, :, None], new[None, None], old), place)

    return lax.fori_loop(0, first.sum(), body, vary_like(pool, rows, layer, page, slot))
