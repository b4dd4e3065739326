"""Accepting, rolling back, drafts and ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.constrain import GrammarCompiler
from trillion_infer.core.sampling_params import StructuredOutput

SPECS = [
    StructuredOutput(json_object=True),
    StructuredOutput(regex=r"(ab|a)*c?"),
    StructuredOutput(choice=("one", "two", "twofold")),
    StructuredOutput(json_schema={"type": "array", "items": {"type": "integer"}, "maxItems": 3}),
]


def mask_of(state, vocab_size):
    out = np.zeros(-(-vocab_size // 32), np.uint32)
    state.mask(out)
    return out


def ids_of(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(data=st.data())
def test_rolling_back_restores_every_mask(compiler, byte_tokenizer, spec, data):
    state, masks = compiler.compile(spec), []
    for _ in range(data.draw(st.integers(0, 12))):
        masks.append(mask_of(state, byte_tokenizer.vocab_size))
        assert state.accept([data.draw(st.sampled_from(ids_of(masks[-1])))]) == 1
        if state.is_complete:
            break
    back = data.draw(st.integers(0, len(masks)))
    state.rollback(back)
    if back:
        assert np.array_equal(mask_of(state, byte_tokenizer.vocab_size), masks[-back])


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(data=st.data())
def test_the_mask_is_exactly_what_accept_takes(compiler, byte_tokenizer, spec, data):
    state = compiler.compile(spec)
    for _ in range(data.draw(st.integers(0, 8))):
        state.accept([data.draw(st.sampled_from(ids_of(mask_of(state, byte_tokenizer.vocab_size))))])
    allowed = set(ids_of(mask_of(state, byte_tokenizer.vocab_size)))
    for id in data.draw(st.lists(st.integers(0, byte_tokenizer.vocab_size - 1), max_size=20)):
        if state.accept([id]):
            assert id in allowed
            state.rollback(1)
        else:
            assert id not in allowed or state.is_complete


@given(draft=st.lists(st.integers(0, 270), max_size=6), lead=st.sampled_from(["", "a", "ab", "abc"]))
def test_draft_masks_equal_the_masks_of_one_token_at_a_time(compiler, byte_tokenizer, draft, lead):
    state = compiler.compile(SPECS[1])
    state.accept(byte_tokenizer.encode(lead))
    before = mask_of(state, byte_tokenizer.vocab_size)
    out = np.zeros((len(draft) + 1, len(before)), np.uint32)
    taken = state.draft_masks(draft, out)
    assert np.array_equal(mask_of(state, byte_tokenizer.vocab_size), before)
    for row in range(taken + 1):
        assert np.array_equal(mask_of(state, byte_tokenizer.vocab_size), out[row])
        if row < len(draft):
            assert state.accept([draft[row]]) == (row < taken)
    for row in range(taken + 1, len(draft) + 1):
        assert set(ids_of(out[row])) == byte_tokenizer.eos_ids


def test_t01_a_forbidden_token_changes_nothing(compiler, byte_tokenizer):
    state = compiler.compile(StructuredOutput(choice=("ab",)))
    assert state.accept(byte_tokenizer.encode("a") + byte_tokenizer.encode("x") + byte_tokenizer.encode("b")) == 1
    assert state.error is None
    assert state.accept(byte_tokenizer.encode("b")) == 1
    assert state.is_complete


def test_u20_completeness_is_known_before_the_end_is_drawn(compiler, byte_tokenizer):
    state = compiler.compile(StructuredOutput(choice=("ab",)))
    state.accept(byte_tokenizer.encode("a"))
    assert not state.may_end
    state.accept(byte_tokenizer.encode("b"))
    assert state.is_complete
    assert set(ids_of(mask_of(state, byte_tokenizer.vocab_size))) == byte_tokenizer.eos_ids


@pytest.mark.parametrize("which", [0, 1])
def test_every_end_of_sequence_token_ends_and_can_be_rolled_back(compiler, byte_tokenizer, which):
    state = compiler.compile(StructuredOutput(regex="a*"))
    end = sorted(byte_tokenizer.eos_ids)[which]
    assert state.accept([*byte_tokenizer.encode("a"), end]) == 2
    assert state.is_complete
    assert state.accept(byte_tokenizer.encode("a")) == 0
    state.rollback(1)
    assert not state.is_complete
    assert state.accept(byte_tokenizer.encode("a")) == 1
    with pytest.raises(ValueError, match="2 were accepted"):
        state.rollback(3)


def test_an_end_is_refused_while_the_text_is_incomplete(compiler, byte_tokenizer):
    state = compiler.compile(StructuredOutput(regex="ab"))
    assert state.accept(sorted(byte_tokenizer.eos_ids)[:1]) == 0
    assert not state.is_complete


def test_forced_tokens_are_what_must_come(compiler, byte_tokenizer):
    state = compiler.compile(
        StructuredOutput(json_schema={"type": "object", "properties": {"abcdef": {}}, "required": ["abcdef"]})
    )
    forced = state.forced_tokens()
    state.accept(forced)
    lead = byte_tokenizer.decode(forced)
    assert lead == "" or '{"abcdef":'.startswith(lead.rstrip())
    done = compiler.compile(StructuredOutput(choice=("a",)))
    done.accept(byte_tokenizer.encode("a"))
    assert done.forced_tokens() == []


def test_forks_go_their_own_ways(compiler, byte_tokenizer):
    state = compiler.compile(StructuredOutput(choice=("ab", "ac")))
    state.accept(byte_tokenizer.encode("a"))
    twin = state.fork()
    assert twin.accept(byte_tokenizer.encode("b")) == 1
    assert state.accept(byte_tokenizer.encode("c")) == 1
    twin.rollback(2)
    assert twin.accept(byte_tokenizer.encode("ac")) == 2


def test_the_cache_of_grammars_keeps_them_apart(compiler, byte_tokenizer):
    for number in range(5):
        state = compiler.compile(StructuredOutput(choice=(f"v{number}",)))
        assert state.accept(byte_tokenizer.encode(f"v{number}")) == len(byte_tokenizer.encode(f"v{number}"))


def test_smollm2_masks_json(smollm2_tokenizer):
    compiler = GrammarCompiler(smollm2_tokenizer)
    state = compiler.compile(StructuredOutput(json_schema={"type": "object", "properties": {"a": {"type": "string"}}}))
    ids = smollm2_tokenizer.encode('{"a": "příklad 안녕 👍"}', add_special_tokens=False)
    for id in ids:
        assert id in ids_of(mask_of(state, smollm2_tokenizer.vocab_size))
        assert state.accept([id]) == 1
    assert set(ids_of(mask_of(state, smollm2_tokenizer.vocab_size))) == smollm2_tokenizer.eos_ids
