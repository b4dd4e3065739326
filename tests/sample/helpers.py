"""Rows and steps for the tests."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from trillion_infer.sample import RowParams, SamplerState, pack, sample, unpack
from trillion_infer.sample.host import slot_chunks
from trillion_infer.sample.state import init_slot

ROWS, SMALL = 8, 16
step = jax.jit(sample)
enter = jax.jit(init_slot)


def rows_of(num_rows, **fields):
    """Active rows, row r in slot r with seed (r, 7); each field one value or one per row."""
    rows = RowParams.padding(num_rows)
    rows.slot[:] = np.arange(num_rows)
    rows.active[:] = True
    rows.seed[:] = np.stack([np.arange(num_rows), np.full(num_rows, 7)], axis=1)
    for name, value in fields.items():
        getattr(rows, name)[:] = value
    return rows


def on_device(rows):
    return unpack(jnp.asarray(pack(rows)))


def fresh(vocab=SMALL):
    return SamplerState.create(ROWS, vocab)


def run(logits, rows, state=None, mask=None):
    """One step: (Sampled as numpy, new state). Small batches are padded, so that few programs are compiled."""
    logits = np.asarray(logits, np.float32)
    num_rows, vocab = max(ROWS, len(logits)), max(SMALL, logits.shape[1])
    padded = np.full((num_rows, vocab), -np.inf, np.float32)
    padded[: len(logits), : logits.shape[1]] = logits
    bits = np.full((num_rows, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    if mask is not None:
        bits[: len(mask)] = mask
    whole = RowParams.padding(num_rows)
    for name, value in vars(rows).items():
        getattr(whole, name)[: len(logits)] = value
    state = SamplerState.create(num_rows, vocab) if state is None else state
    out, state = step(padded, state, on_device(whole), bits, has_mask=jnp.asarray(mask is not None))
    return jax.tree.map(lambda field: np.asarray(field)[: len(logits)], out), state


def enter_history(state, slot, prompt=(), output=(), bias=None):
    for header, chunk in slot_chunks(slot, prompt, output, bias or {}):
        state = enter(state, header, chunk)
    return state


def draws(logits, count, **fields):
    """`count` independent draws from one row of logits."""
    logits = np.broadcast_to(np.asarray(logits, np.float32), (count, len(logits)))
    rows = rows_of(count, **fields)
    return run(logits, rows)[0].token


def chi_square(tokens, probabilities):
    """p-value of the tokens under the distribution; tokens of probability 0 give 0."""
    seen = np.bincount(tokens, minlength=len(probabilities))
    if seen[probabilities == 0].any():
        return 0.0
    possible = probabilities > 0
    if possible.sum() == 1:
        return 1.0
    return stats.chisquare(seen[possible], probabilities[possible] * len(tokens)).pvalue
