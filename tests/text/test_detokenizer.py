import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_infer.text import IncrementalDetokenizer

HARD_TEXTS = ["👨‍👩‍👧‍👦 done", "안녕하세요", "Příliš žluťoučký", "a\u0301é", " the  the", "日本"]


def stream(tokenizer, ids, cuts, **options):
    """The pieces that come out when `ids` are pushed in runs of the lengths `cuts`."""
    detokenizer, pieces, rest = IncrementalDetokenizer(tokenizer, **options), [], list(ids)
    for cut in cuts:
        pieces.append(detokenizer.push(rest[:cut]))
        rest = rest[cut:]
    pieces.append(detokenizer.push(rest))
    return pieces, detokenizer.finish()


ids_and_cuts = st.tuples(st.lists(st.integers(-3, 300), max_size=40), st.lists(st.integers(0, 3), max_size=40))


@pytest.mark.parametrize("kind", ["byte_tokenizer", "sentencepiece_tokenizer"])
@given(ids_and_cuts=ids_and_cuts, skip=st.booleans(), continuation=st.booleans())
@settings(max_examples=300)
def test_pieces_add_up_to_the_whole_text(request, kind, ids_and_cuts, skip, continuation):
    tokenizer, (ids, cuts) = request.getfixturevalue(kind), ids_and_cuts
    pieces, tail = stream(tokenizer, ids, cuts, skip_special_tokens=skip, continuation=continuation)
    assert "".join(pieces) + tail == tokenizer.decode(ids, skip, continuation=continuation)


@given(ids=st.lists(st.integers(0, 49151), max_size=60), cuts=st.lists(st.integers(0, 3), max_size=40))
def test_pieces_add_up_to_the_whole_text_smollm2(smollm2_tokenizer, ids, cuts):
    pieces, tail = stream(smollm2_tokenizer, ids, cuts)
    assert "".join(pieces) + tail == smollm2_tokenizer.backend.decode(ids)


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("kind", ["byte_tokenizer", "sentencepiece_tokenizer", "smollm2_tokenizer"])
def test_u28_a_valid_text_streams_whole_characters(request, kind, text):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, tail = stream(tokenizer, ids, [1] * len(ids))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert tail == ""


def test_an_incomplete_tail_comes_only_at_finish(byte_tokenizer):
    ids = byte_tokenizer.encode("a👍", add_special_tokens=False)[:-1]
    pieces, tail = stream(byte_tokenizer, ids, [1] * len(ids))
    assert "".join(pieces) == "a"
    assert tail == "\ufffd"


def test_special_tokens_are_left_out_or_kept(byte_tokenizer):
    ids = byte_tokenizer.encode("<|im_start|>the<|im_end|>", add_special_tokens=False)
    assert "".join(stream(byte_tokenizer, ids, [1] * 9)[0]) == "the"
    kept, _ = stream(byte_tokenizer, ids, [1] * 9, skip_special_tokens=False)
    assert "".join(kept) == "<|im_start|>the<|im_end|>"
