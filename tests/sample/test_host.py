"""SamplingParams become rows, seeds, masks and slot histories."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.sample import PACKED_FIELDS, SLOT_CHUNK, RowParams, pack, unpack
from trillion_infer.sample.bad_words import BadWords
from trillion_infer.sample.bitmask import allow_all, forbid, pack_mask, unpack_mask
from trillion_infer.sample.host import sequence_sampling, sequence_seed

from .helpers import enter_history, fresh


def encode(text):
    """A byte tokenizer in which ' a' is one token, 200."""
    return [200] if text == " a" else [*text.encode()]


def sampling(entropy=0, has_tables=True, **params):
    return sequence_sampling(
        SamplingParams(**params),
        vocab_size=256,
        eos_ids=[0],
        encode=encode,
        entropy=np.random.default_rng(entropy),
        has_tables=has_tables,
    )


def test_rows_survive_the_trip():
    rows = RowParams.padding(5)
    rng = np.random.default_rng(0)
    for name in ("slot", "index", "top_k", "logprobs"):
        getattr(rows, name)[:] = rng.integers(-1, 2**31, 5)
    for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency"):
        getattr(rows, name)[:] = rng.normal(size=5)
    rows.seed[:] = rng.integers(0, 2**32, (5, 2))
    rows.active[:] = rows.has_bias[:] = [True, False, True, True, False]
    packed = pack(rows)
    assert packed.dtype == np.int32
    assert packed.shape == (PACKED_FIELDS, 5)
    back = unpack(jnp.asarray(packed))
    for name in vars(rows):
        assert np.array_equal(getattr(back, name), getattr(rows, name)), name


def test_fill_writes_every_parameter():
    (one,) = sampling(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, logprobs=2, repetition_penalty=1.5,
        presence_penalty=0.75, frequency_penalty=-0.5, logit_bias={5: 2.0}, seed=3,
    )  # fmt: skip
    rows = RowParams.padding(2)
    one.fill(rows, 1, slot=7, index=9)
    got = {name: value[1].tolist() for name, value in vars(rows).items()}
    assert got == {
        "slot": 7, "active": True, "index": 9, "top_k": 3, "seed": one.seed.tolist(), "logprobs": 2, "has_bias": True,
        "temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "repetition": 1.5, "presence": 0.75, "frequency": -0.5,
    }  # fmt: skip
    assert not rows.active[0]


def test_completions_have_different_seeds_and_the_first_does_not_depend_on_n():
    seeds = {tuple(one.seed.tolist()) for one in sampling(n=8, seed=1)}
    assert len(seeds) == 8
    assert np.array_equal(sampling(n=8, seed=1)[0].seed, sampling(seed=1)[0].seed)


def test_seeds_do_not_change_between_releases():
    assert sequence_seed(42, 0).tolist() == [2361768270, 6955711]
    assert sequence_seed(-1, 0).tolist() != sequence_seed(1, 0).tolist()


def test_unseeded_requests_follow_the_engine_seed():
    assert np.array_equal(sampling(entropy=4)[0].seed, sampling(entropy=4)[0].seed)
    assert not np.array_equal(sampling(entropy=4)[0].seed, sampling(entropy=5)[0].seed)


def test_bad_words_count_with_and_without_a_space():
    words = BadWords.encode(["a", "xy"], encode)
    assert words.single == {97, 200}
    assert set(words.longer) == {(120, 121), (32, 120, 121)}
    assert words.next_forbidden([120]) == [121]
    assert words.next_forbidden([32, 120]) == [121, 121]
    assert words.next_forbidden([120, 120, 33]) == []
    assert words.next_forbidden([]) == []


def test_bad_words_of_one_token_are_a_bias_and_beat_a_wish_for_them():
    (one,) = sampling(bad_words=["a"], logit_bias={97: 100.0, 5: 1.0})
    assert one.bias == {97: -np.inf, 5: 1.0, 200: -np.inf}
    assert not one.needs_last_tokens
    assert sampling(bad_words=["xy"])[0].needs_last_tokens


def test_ends_are_masked_until_min_tokens():  # U18
    (one,) = sampling(min_tokens=2, stop_token_ids=[9])
    assert [one.forbidden([1] * length) for length in range(4)] == [[0, 9], [0, 9], [], []]
    (one,) = sampling(min_tokens=2, ignore_eos=True)
    assert one.forbidden([]) == []


def test_plain_requests_need_nothing_entered():
    (one,) = sampling(temperature=0.5, top_k=3)
    assert not one.needs_slot_history
    assert len(list(one.slot_chunks(0, list(range(2000)), [5]))) == 1


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"stop_token_ids": [261]}, ["stop_token_ids", "261", "[0, 256)"]),  # U15
        ({"logit_bias": {256: 1}}, ["logit_bias", "256"]),
        ({"bad_words": ["b"], "has_tables": False}, ["without penalty tables", "bad_words"]),
        ({"presence_penalty": 1, "has_tables": False}, ["without penalty tables"]),
    ],
)
def test_what_cannot_be_served_is_refused(params, words):
    with pytest.raises(InvalidRequestError) as caught:
        sampling(**params)
    assert all(word in str(caught.value) for word in words), caught.value


def test_bad_words_without_tokens_or_tokenizer_are_refused():
    with pytest.raises(InvalidRequestError, match="no token"):
        BadWords.encode(["x"], lambda text: [])
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        sequence_sampling(
            SamplingParams(bad_words=["x"]), vocab_size=9, eos_ids=[], encode=None, entropy=np.random.default_rng()
        )
    with pytest.raises(InvalidRequestError, match=r"token 120; .*\[0, 9\)"):
        sequence_sampling(
            SamplingParams(bad_words=["x"]), vocab_size=9, eos_ids=[], encode=encode, entropy=np.random.default_rng()
        )


tokens = st.lists(st.integers(0, 15), max_size=2 * SLOT_CHUNK)


@settings(deadline=None, max_examples=20)
@given(prompt=tokens, output=tokens, bias=st.dictionaries(st.integers(0, 15), st.floats(-9, 9, width=32)))
def test_a_slot_holds_the_counts_of_its_history(prompt, output, bias):
    state = enter_history(fresh(), 1, [1, 2], [3], {4: 5.0})
    state = enter_history(state, 1, prompt, output, bias)
    assert np.asarray(state.counts)[1].tolist() == np.bincount(output, minlength=16).tolist()
    assert set(np.flatnonzero(np.asarray(state.prompt_mask)[1])) == set(prompt)
    assert np.asarray(state.bias)[1].tolist() == [bias.get(token, 0.0) for token in range(16)]
    assert int(state.last_token[1]) == [0, *prompt, *output][-1]
    assert np.asarray(state.counts)[0].sum() == 0


@given(st.integers(1, 100).flatmap(lambda v: st.lists(st.lists(st.booleans(), min_size=v, max_size=v), min_size=1)))
def test_masks_pack_and_unpack(allowed):
    allowed = np.array(allowed)
    assert np.array_equal(unpack_mask(pack_mask(allowed), allowed.shape[1]), allowed)


def test_forbid_clears_only_these_tokens():
    mask = allow_all(2, 70)
    forbid(mask[1], [0, 31, 32, 69])
    got = unpack_mask(mask, 70)
    assert got[0].all()
    assert np.flatnonzero(~got[1]).tolist() == [0, 31, 32, 69]
