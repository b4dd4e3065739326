"""Log-probabilities are of the raw logits, and always finite."""

import json

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trillion_infer.sample import LOGPROB_FLOOR, score
from trillion_infer.sample.bitmask import pack_mask

from . import oracle
from .helpers import rows_of, run


@settings(deadline=None, max_examples=30)
@given(logits=hnp.arrays(np.float32, (2, 30), elements=st.integers(-400, 400)), target=st.integers(0, 29))
def test_score_is_log_softmax_with_ranks(logits, target):
    logits = logits / np.float32(10)
    logprob, rank, ids, values = map(np.asarray, score(jnp.asarray(logits), jnp.array([target, 0])))
    want = np.log(oracle.softmax(logits[0].astype(np.float64)))
    np.testing.assert_allclose(logprob[0], want[target], atol=1e-4)
    assert rank[0] == 1 + (logits[0] > logits[0, target]).sum()
    assert ids[0].tolist() == np.argsort(-logits[0], kind="stable")[:20].tolist()
    np.testing.assert_allclose(values[0], want[ids[0]], atol=1e-4)


def test_logprobs_ignore_mask_penalties_and_temperature():  # U24
    logits = np.array([[3.0, 2.0, 1.0, 0.0]])
    rows = rows_of(1, temperature=0.5, top_k=1, repetition=2.0, logprobs=3)
    out, _ = run(logits, rows, mask=pack_mask(np.array([[False, False, True, True]])))
    assert out.token[0] == 2
    want = np.log(oracle.softmax(logits[0]))
    np.testing.assert_allclose(out.logprob[0], want[2], atol=1e-6)
    assert out.rank[0] == 3
    np.testing.assert_allclose(out.top_logprobs[0, :4], want, atol=1e-6)


def test_every_figure_survives_strict_json():  # U24
    logits = np.array([[0.0, -np.inf, -np.inf, 90.0]])
    out, _ = run(logits, rows_of(1, temperature=1.0, top_k=1, logprobs=5))
    json.dumps([out.logprob.tolist(), out.top_logprobs.tolist()], allow_nan=False)
    assert out.top_logprobs[0, -1] == LOGPROB_FLOOR
    assert out.top_ids[0, 16] == -1


def test_nobody_asks_nobody_pays():
    out, _ = run(np.zeros((1, 16)), rows_of(1))
    assert out.top_ids[0].tolist() == [-1] * 20
