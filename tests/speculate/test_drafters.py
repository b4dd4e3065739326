"""Drafters find what followed before, keep tenants apart, and stay within their bounds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_infer.core.errors import ConfigError
from trillion_infer.speculate import Draft, DrafterSpec, DraftRequest, host_drafters, parse_speculate
from trillion_infer.speculate.grammar import GrammarDrafter
from trillion_infer.speculate.ngram import NgramDrafter, NgramIndex
from trillion_infer.speculate.suffix import SuffixDrafter, TenantTexts
from trillion_infer.speculate.suffix_tree import SuffixFeed, SuffixTree

few = st.lists(st.integers(0, 3), max_size=40)
drafters = pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])


def once(drafter, tokens, k=4, **fields):
    return drafter.propose([DraftRequest("r", tokens, **fields)], k)[0]


@drafters
def test_a_repeated_passage_is_copied(make):
    assert once(make(), [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3]).tokens == (4, 5, 6, 7)


@drafters
def test_nothing_repeated_nothing_proposed(make):
    drafter = make()
    assert once(drafter, list(range(50))) == Draft()
    assert drafter.propose([DraftRequest("s", [])], 4) == [Draft()]
    assert drafter.propose([DraftRequest("t", [1, 2, 1, 2])], 0) == [Draft()]


@drafters
@settings(deadline=None)
@given(text=few, k=st.integers(0, 6))
def test_growing_step_by_step_proposes_what_a_fresh_start_does(make, text, k):
    grown, tokens = make(), []
    for token in text:
        tokens.append(token)
        stepwise = once(grown, tokens, k)
    if text:
        assert stepwise == once(make(), text, k)
        assert len(stepwise.tokens) == len(stepwise.confidence) <= k


@drafters
def test_a_released_request_is_forgotten_or_belongs_to_its_tenant(make):
    drafter = make()
    first = DraftRequest("r", [1, 2, 3, 4, 5, 6])
    drafter.propose([first], 4)
    drafter.release(first)
    assert once(drafter, [7, 8, 9]) == Draft(), "the id may be used again"


@drafters
def test_a_long_prompt_is_entered_over_several_steps(make):
    drafter = make(per_step=10)
    tokens = [*range(25), 3, 4]
    for _ in range(4):
        draft = once(drafter, tokens)
    assert draft.tokens == (5, 6, 7, 8)


@given(text=few.filter(len), size=st.integers(1, 3), most=st.integers(1, 50))
def test_an_ngram_index_knows_where_the_end_occurred_before(text, size, most):
    index = NgramIndex(size)
    assert index.extend(text, 1000)
    ends = [end for end in range(size - 1, len(text) - 1) if text[end - size + 1 : end + 1] == text[-size:]]
    assert list(index.earlier(len(text) - 1, most)) == (ends[::-1][:most] if len(text) >= size else [])


SOURCE = [*range(10, 40)]


@pytest.mark.parametrize(
    ("written", "follows"),
    [
        ([10, 11, 12, 90], (14, 15, 16)),  # 13 was replaced
        ([10, 11, 12, 90, 13], (14, 15, 16)),  # 90 was put in between
        ([10, 11, 12, 90, 91, 13, 14], (15, 16, 17)),
        ([10, 11, 12, 13, 17], (18, 19, 20)),  # three were left out
        ([10, 11, 12, 90, 14, 15, 91], (17, 18, 19)),
    ],
)
def test_a_copy_goes_on_behind_a_fault(written, follows):
    assert once(NgramDrafter(), [*SOURCE, 70, 71, *written], k=3).tokens == follows


def test_a_place_that_agreed_longer_is_preferred_to_a_newer_one():
    text = [1, 2, 3, 4, 5, 6, 7, 0, 4, 5, 9, 9, 0, 2, 3, 4, 5]
    assert once(NgramDrafter(), text, k=2).tokens == (6, 7)


def test_ngram_follows_a_loop_beyond_the_end():
    assert once(NgramDrafter(), [5, 6, 5, 6], k=5).tokens == (5, 6, 5, 6, 5)


def occurrences(texts, path):
    return sum(text[at : at + len(path)] == path for text in texts for at in range(len(text) - len(path) + 1))


@settings(deadline=None)
@given(texts=st.lists(few, max_size=3), path=st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_suffix_tree_knows_exactly_the_paths_that_occur(texts, path):
    tree = SuffixTree(depth=5)
    for text in texts:
        feed = SuffixFeed(tree)
        for token in text:
            feed.append(token)
    found = tree.follow(path)
    if len(path) <= 5:
        assert (found is not None) == (occurrences(texts, path) > 0), (texts, path)
        if found is not None and found.at < len(found.text):
            assert occurrences(texts, [*path, found.text[found.at]]) > 0


@settings(deadline=None)
@given(text=few, shortest=st.integers(1, 3))
def test_the_longest_match_is_the_longest_suffix_that_went_on(text, shortest):
    tree = SuffixTree(depth=6)
    feed = SuffixFeed(tree)
    for token in text:
        feed.append(token)
    found = tree.longest_match(text, shortest)
    ends = [n for n in range(shortest, 6) if n <= len(text) and occurrences([text[:-1]], text[len(text) - n :])]
    assert (found[1] if found else 0) == max(ends, default=0)


def test_suffix_prefers_what_followed_most_often():
    text = [1, 2, 3, 8, 1, 2, 4, 8, 1, 2, 3, 9, 1, 2]
    draft = once(SuffixDrafter(), text, k=1)
    assert draft.tokens == (3,)
    assert 0 < draft.confidence[0] < 2 / 3


def test_suffix_learns_from_earlier_requests_of_the_tenant_only():
    drafter = SuffixDrafter()
    earlier = DraftRequest("a", [10, 11, 12, 13, 14, 15], tenant="blue")
    drafter.propose([earlier], 4)
    drafter.release(earlier)
    prompt = [1, 2, 10, 11, 12]
    assert drafter.propose([DraftRequest("b", prompt, tenant="blue")], 3)[0].tokens == (13, 14, 15)
    assert drafter.propose([DraftRequest("c", prompt, tenant="red")], 3)[0].tokens == ()


def test_a_tenants_memory_is_bounded_and_keeps_the_newest():
    texts = TenantTexts(depth=8, max_size=2000)
    for number in range(100):
        texts.add([number * 100 + place for place in range(50)] * 2)
        texts.absorb(1000)
        assert texts.size <= 2500
    newest, older = texts.trees
    assert newest.follow([9900, 9901]) or older.follow([9900, 9901])
    assert not newest.follow([0, 1])
    assert not older.follow([0, 1])


def test_the_least_recent_tenant_is_forgotten():
    drafter = SuffixDrafter(max_tenants=2)
    for name in ("a", "b", "c"):
        request = DraftRequest(name, [10, 11, 12, 13], tenant=name)
        drafter.propose([request], 1)
        drafter.release(request)
    got = {name: once(drafter, [10, 11], k=2, tenant=name).tokens for name in ("c",)}
    assert got == {"c": (12, 13)}
    assert drafter.propose([DraftRequest("x", [10, 11], tenant="a")], 2)[0].tokens == ()


def test_grammar_drafts_what_is_forced():
    assert once(GrammarDrafter(), [1], k=2, forced=lambda k: [7, 8, 9]) == Draft((7, 8), (1.0, 1.0), "grammar")
    assert once(GrammarDrafter(), [1]) == Draft()


def test_speculate_flag_is_parsed():
    assert parse_speculate(None) == parse_speculate("") == ()
    specs = parse_speculate("ngram, suffix,draft:/a/b:c,eagle3:org/head,mtp,grammar")
    assert specs == (
        DrafterSpec("ngram"),
        DrafterSpec("suffix"),
        DrafterSpec("draft", "/a/b:c"),
        DrafterSpec("eagle3", "org/head"),
        DrafterSpec("mtp"),
        DrafterSpec("grammar"),
    )
    assert [drafter.name for drafter in host_drafters(specs)] == ["ngram", "suffix", "grammar"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("medusa", ["'medusa'", "ngram, suffix, grammar, mtp, draft:PATH, eagle3:PATH"]),
        ("ngram,,suffix", ["''"]),
        ("draft", ["draft:PATH"]),
        ("eagle3:", ["eagle3:PATH"]),
        ("ngram:3", ["'3'", "takes none"]),
        ("ngram,suffix,ngram", ["ngram 2 times"]),
    ],
)
def test_a_bad_speculate_flag_is_refused(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_speculate(text)
    assert all(word in str(caught.value) for word in [*words, repr(text)]), caught.value
