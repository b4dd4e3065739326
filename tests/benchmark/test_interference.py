"""The interference workload against a server whose model is a script, and what it makes of the marks."""

import asyncio

import numpy as np
import pytest

from tests.route.conftest import Served
from trillion_infer.benchmark.interference import Interference, _gaps, _run, compare
from trillion_infer.benchmark.serving import MODEL
from trillion_infer.benchmark.stream_client import Streamed
from trillion_infer.core.errors import TrillionInferError
from trillion_infer.serve.app import create_app
from trillion_infer.serve.options import ServerOptions
from trillion_infer.testing.byte_tokenizer import byte_tokenizer
from trillion_infer.testing.scripted import scripted_generator


@pytest.fixture
def url():
    served = Served(create_app(scripted_generator([65, 66, 67], byte_tokenizer()), ServerOptions(MODEL)))
    yield served.url
    served.stop()


def test_streams_and_prompts_are_counted(url):
    work = Interference([[1, 2, 3]] * 2, [[4] * 300, [5] * 300], stream_out=40, prompt_out=2)
    figures = asyncio.run(_run(url, work))
    assert 0 < figures["token_p50_ms"] <= figures["token_p90_ms"] <= figures["token_max_ms"]
    assert figures["total_tok_s"] > 0
    assert figures["prompt_p50_s"] > 0


def test_a_request_that_fails_is_no_figure(url):
    work = Interference([[1, 2, 3]], [[4] * 5000], stream_out=4)
    with pytest.raises(TrillionInferError, match="0 of 2 tokens"):
        asyncio.run(_run(url, work))


def test_gaps_count_while_prompts_are_under_way():
    streams = [Streamed(0.0, times=[1.0, 2.0, 4.0, 4.5]), Streamed(0.0, times=[0.5, 9.0])]
    assert sorted(np.asarray(_gaps(streams, 2.5, 4.25)).tolist()) == [500.0, 2000.0, 8500.0]


def test_ratios_say_how_much_lower_and_how_much_is_left():
    found = {
        "unchunked": {"token_p90_ms": 90.0, "total_tok_s": 100.0},
        "chunked": {"token_p90_ms": 45.0, "total_tok_s": 80.0},
        "apart": {"token_p90_ms": 15.0, "total_tok_s": 90.0},
    }
    assert compare(found) == {
        "p90_below_unchunked": 6.0,
        "p90_below_chunked": 3.0,
        "throughput_of_unchunked": 0.9,
        "throughput_of_chunked": 1.125,
    }
