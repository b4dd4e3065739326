"""Text of scripted tokens: stop strings, partial characters, min_tokens, concurrency, aborts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer import SamplingParams
from trillion_infer.testing.byte_tokenizer import EOS, byte_tokenizer
from trillion_infer.testing.scripted import follow, scripted_generator

pytestmark = pytest.mark.smoke

TOKENIZER = byte_tokenizer()


def run(script, prompt="ABC", **params):
    """(pieces in order, final output) of one request."""
    generator = scripted_generator(script, TOKENIZER)
    generator.add("r", prompt, SamplingParams(temperature=0, **{"max_tokens": 64, **params}))
    pieces = []
    while not generator.output("r").finished:
        pieces += [delta.text for delta in generator.step()]
    generator.engine.drain()
    generator.engine.check_integrity()
    return pieces, generator.take("r")


def test_text_that_may_begin_a_stop_string_is_held_back_u16():
    pieces, output = run([*b"DEFGHIJKL", EOS], stop="DEFGHIJ")
    assert "".join(pieces) == output.outputs[0].text == ""
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "DEFGHIJ")


def test_stop_string_is_appended_once_when_asked_for_u16():
    pieces, output = run([*b"xyDEFG", EOS], stop=["DEF"], include_stop_str_in_output=True)
    assert "".join(pieces) == output.outputs[0].text == "xyDEF"


def test_a_held_prefix_that_comes_to_nothing_is_shown():
    pieces, output = run([*b"xDEx", EOS], stop=["DEF"])
    assert "".join(pieces) == output.outputs[0].text == "xDEx"


def test_nothing_ends_a_request_before_min_tokens_u18():
    script = [10, 65, 10, 66, 10, 67, 10]
    _, output = run(script, stop=["\n"], min_tokens=4)
    assert output.outputs[0].token_ids == script[:5]
    assert output.outputs[0].text == "\nA\nB"


def test_end_of_sequence_is_masked_before_min_tokens_u18():
    _, output = run([65, EOS, EOS, EOS, EOS], min_tokens=3)
    assert EOS not in output.outputs[0].token_ids[:3]
    assert output.outputs[0].token_ids[3] == EOS


@given(st.text(min_size=1, max_size=12))
def test_pieces_never_end_in_half_a_character_and_add_up_u28(text):
    """Every byte is a token: characters are cut at every place."""
    data = text.encode("utf-8", "surrogatepass") if text.isprintable() else text.encode("utf-8", "ignore")
    pieces, output = run([*data, EOS], ignore_eos=False)
    whole = data.decode("utf-8", "replace")
    assert "".join(pieces) == output.outputs[0].text == whole
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in whole


def test_an_incomplete_character_is_flushed_only_at_the_end_u28():
    pieces, output = run([*"é".encode()[:1], EOS])
    assert pieces == ["", "\ufffd"]
    assert output.outputs[0].text == "\ufffd"


def test_sixteen_streams_each_get_all_their_tokens_in_order_u29_u30():
    """The script tells requests apart by the length of their prompts."""
    generator = scripted_generator(lambda index, prompt_len: 97 + (index + prompt_len) % 26, TOKENIZER, max_running=5)
    expected = {}
    for i in range(16):
        generator.add(str(i), "x" * (i + 1), SamplingParams(temperature=0, max_tokens=20 + i))
        expected[str(i)] = "".join(chr(97 + (index + i + 1) % 26) for index in range(20 + i))
    pieces = dict.fromkeys(expected, "")
    while generator.has_work:
        for delta in generator.step():
            pieces[delta.request_id] += delta.text
    assert pieces == expected
    assert {i: generator.output(i).outputs[0].text for i in expected} == expected


def test_eos_of_any_source_ends_and_ignore_eos_ignores_them_all_u35():
    tokenizer = byte_tokenizer()
    generator = scripted_generator([65, EOS, 66, 66], tokenizer)
    assert EOS in generator.reader.eos_ids
    _, stopped = run([65, EOS, 66])
    _, ignored = run([65, EOS, 66, 67, 68], ignore_eos=True, max_tokens=4, stop_token_ids=[67])
    assert stopped.outputs[0].token_ids == [65, EOS]
    assert ignored.outputs[0].token_ids == [65, EOS, 66, 67]
    assert ignored.outputs[0].stop_reason == 67


def test_an_aborted_request_is_gone_at_once_and_its_pages_are_home_u45():
    generator = scripted_generator([65], TOKENIZER)
    generator.add("a", "hello", SamplingParams(max_tokens=1000))
    for _ in range(5):
        generator.step()
    deltas = generator.abort("a")
    assert [delta.finish_reason for delta in deltas] == ["abort"]
    assert generator.abort("a") == [] == generator.abort("unknown")
    generator.add("b", "x", SamplingParams(max_tokens=3))
    while generator.has_work:
        generator.step()
    assert generator.take("b").outputs[0].text == "AAA"
    generator.engine.check_integrity()


def test_a_full_pool_preempts_and_raises_nothing_u48():
    """Answers turn out longer than expected, so that pages run out."""
    script = follow([97 + i % 26 for i in range(60)] + [EOS])
    generator = scripted_generator(script, TOKENIZER, num_pages=6, max_model_len=96, expected_output=1)
    for i in range(5):
        generator.add(str(i), "x" * (10 + i), SamplingParams(max_tokens=None))
    while generator.has_work:
        generator.step()
    texts = {i: generator.take(str(i)).outputs[0].text for i in range(5)}
    assert set(texts.values()) == {"".join(chr(97 + i % 26) for i in range(60))}
    assert generator.engine.stats()["preemptions"] > 0
    generator.engine.check_integrity()
