"""Sizes and draws of the benchmark's prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.benchmark.records import ENGINE, Record, ratios, record
from trillion_infer.benchmark.workloads import SEPARATE, WORKLOADS, Sizes, draw, parse_workloads
from trillion_infer.core.errors import ConfigError

VOCAB = 49152


def prompts_of(work):
    return [work.decode, work.prefill, work.startup, *work.offline]


def test_the_standard_sizes_are_the_documented_ones():
    work = draw(Sizes(), VOCAB, 0)
    assert (len(work.decode), len(work.prefill), len(work.offline)) == (32, 1024, 32)
    assert all(16 <= len(prompt) <= 512 for prompt in work.offline)
    assert (work.sizes.decode_out, work.sizes.offline_out) == (128, 64)


def test_draws_have_equal_lengths_and_no_common_first_page():
    draws = [draw(Sizes(), VOCAB, number) for number in range(4)]
    lengths = [list(map(len, prompts_of(work))) for work in draws]
    assert all(each == lengths[0] for each in lengths)
    starts = [tuple(prompt[:8]) for work in draws for prompt in prompts_of(work)]
    assert len(set(starts)) == len(starts)


def test_a_draw_is_the_same_every_time():
    assert draw(Sizes(), VOCAB, 3) == draw(Sizes(), VOCAB, 3)


@given(vocab=st.integers(2, 1000), scale=st.floats(1e-3, 2.0))
def test_ids_lie_in_the_vocabulary_and_no_prompt_is_empty(vocab, scale):
    for prompt in prompts_of(draw(Sizes().scaled(scale), vocab, 1)):
        assert prompt
        assert all(0 <= token < vocab for token in prompt)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), 1e9])
def test_a_scale_that_makes_no_sense_is_refused(scale):
    with pytest.raises(ConfigError, match="must be above 0"):
        Sizes().scaled(scale)


def test_names_are_run_in_a_fixed_order():
    assert parse_workloads("offline, decode") == ("decode", "offline")
    assert parse_workloads("all") == tuple(name for name in WORKLOADS if name not in SEPARATE)


@pytest.mark.parametrize(("text", "says"), [("decod", "unknown"), ("", "unknown")])
def test_other_workloads_are_refused_with_the_names_there_are(text, says):
    with pytest.raises(ConfigError, match=says) as refused:
        parse_workloads(text)
    assert all(name in str(refused.value) for name in WORKLOADS)


def test_the_baseline_gets_the_work_that_is_measured():
    work = draw(Sizes(), VOCAB, 0)
    given_ = work.for_baseline(("decode", "offline"), 16)
    assert given_ == {
        "decode": {"prompt_ids": work.decode, "out": 128},
        "offline": {"prompts": work.offline, "out": 64, "running": 16},
    }


def test_a_ratio_is_ours_over_theirs_where_both_have_the_metric():
    found = [
        record(ENGINE, "decode_tok_s", 60.0, "float32", "m"),
        record(ENGINE, "startup_cold_s", 9.0, "float32", "m"),
        record("transformers", "decode_tok_s", 40.0, "float32", "m"),
    ]
    assert list(ratios(found)) == [
        Record("trillion_infer/transformers", "decode_tok_s", 1.5, "ratio", "float32", "m"),
    ]
