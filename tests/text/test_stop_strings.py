import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.text import StopMatcher

letters = st.text(alphabet="ab\n", max_size=30)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4).map(tuple)


def whole(text: str, stop: tuple[str, ...], include: bool, first_end: int = 1) -> tuple[str, str | None]:
    """What a reader of the whole text would do: cut at the stop string that ends first, the longest of equals."""
    for end in range(first_end, len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


def stream(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    out = []
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        out.append(emitted)
        if matched:
            return "".join(out), matched
    return "".join(out) + matcher.flush(), None


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


@given(text=letters, stop=stops, include=st.booleans(), sizes=st.lists(st.integers(0, 4)))
@settings(max_examples=500)
def test_streamed_equals_whole(text, stop, include, sizes):
    assert stream(StopMatcher(stop, include), cut(text, sizes)) == whole(text, stop, include)


@given(early=letters, late=letters, stop=stops)
@settings(max_examples=500)
def test_a_stop_completed_before_min_tokens_does_not_count(early, late, stop):
    matcher = StopMatcher(stop)
    shown, matched = matcher.push(early, allow_match=False)
    assert matched is None
    rest, matched = stream(matcher, list(late))
    assert (shown + rest, matched) == whole(early + late, stop, False, first_end=len(early) + 1)


@given(text=letters, stop=stops)
def test_nothing_is_held_longer_than_needed(text, stop):
    matcher = StopMatcher(stop)
    shown, matched = matcher.push(text)
    if matched is None:
        held = text[len(shown) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stop)


def test_u16_no_part_of_a_stop_string_is_streamed():
    matcher = StopMatcher(("DEFGHIJ",))
    assert [matcher.push(p) for p in ("ABC", "DEF", "G", "HI")] == [("ABC", None)] + [("", None)] * 3
    assert matcher.push("JKL") == ("", "DEFGHIJ")


def test_include_appends_the_stop_string_once():
    matcher = StopMatcher(("END",), include_stop_str=True)
    assert matcher.push("x E") == ("x ", None)
    assert matcher.push("NDy") == ("END", "END")
    assert matcher.flush() == ""


def test_u18_a_newline_before_min_tokens_is_text():
    matcher = StopMatcher(("\n",))
    assert matcher.push("a\n", allow_match=False) == ("a\n", None)
    assert matcher.push("b\nc") == ("b", "\n")


@pytest.mark.parametrize("stop", ["abc", [""], [3]])
def test_a_malformed_stop_is_refused(stop):
    with pytest.raises(InvalidRequestError, match="non-empty strings"):
        StopMatcher(stop)
