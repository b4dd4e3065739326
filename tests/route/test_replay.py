"""Joining a broken stream with its second generation, for every way of cutting either."""

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.route.replay import ReplayDivergedError, StreamRecord
from trillion_infer.route.sse import event_json, make_event, split_events

Piece = tuple  # (choice, field, text)


@st.composite
def generations(draw):
    """Texts by choice and field, and two ways of cutting them into events."""
    texts = draw(
        st.dictionaries(
            st.tuples(st.integers(0, 1), st.sampled_from(["reasoning_content", "content", "arguments"])),
            st.text("ab", min_size=1, max_size=12),
            min_size=1,
        )
    )
    return texts, draw(cuttings(texts)), draw(cuttings(texts))


@st.composite
def cuttings(draw, texts):
    pieces = []
    for (choice, field), text in sorted(texts.items(), key=lambda item: (item[0][0], -len(item[0][1]))):
        ends = [
            0,
            *sorted(draw(st.sets(st.integers(1, len(text) - 1)) if len(text) > 1 else st.just(set()))),
            len(text),
        ]
        pieces += [(choice, field, text[a:b]) for a, b in pairwise(ends)]
    return pieces


def chat_events(pieces: list[Piece], name: str) -> list[dict]:
    events, opened = [], set()
    for choice in sorted({piece[0] for piece in pieces}):
        events.append(chunk(name, choice, {"role": "assistant"}))
        for _, field, text in (piece for piece in pieces if piece[0] == choice):
            if field == "arguments":
                call = {"index": 0, "function": {"arguments": text}}
                if choice not in opened:
                    call |= {"id": f"call-{name}", "type": "function", "function": {"name": "f", "arguments": text}}
                opened.add(choice)
                events.append(chunk(name, choice, {"tool_calls": [call]}))
            else:
                events.append(chunk(name, choice, {field: text}))
        events.append(chunk(name, choice, {}, "stop"))
    return events


def chunk(name: str, choice: int, delta: dict, reason: str | None = None) -> dict:
    return {"id": name, "created": len(name), "choices": [{"index": choice, "delta": delta, "finish_reason": reason}]}


def assemble(events: list[dict]) -> dict:
    """What a client makes of the deltas; every value that is sent once must come once."""
    whole: dict = {}
    for event in events:
        whole.setdefault("id", []).append(event["id"])
        for choice in event["choices"]:
            index = choice["index"]
            for field, value in choice["delta"].items():
                if field == "tool_calls":
                    for call in value:
                        for key in ("id", "type"):
                            if key in call:
                                whole.setdefault((index, key), []).append(call[key].partition("-")[0])
                        for key, text in call["function"].items():
                            whole.setdefault((index, key), []).append(text)
                else:
                    whole.setdefault((index, field), []).append(value)
            if choice["finish_reason"]:
                whole.setdefault((index, "finish"), []).append(choice["finish_reason"])
    ids = set(whole.pop("id", []))
    return {"ids": ids} | {key: "".join(values) for key, values in whole.items()}


@given(generations(), st.data())
def test_a_stream_broken_anywhere_and_replayed_is_the_clean_stream(generation, data):
    _, one, two = generation
    first, second = chat_events(one, "one"), chat_events(two, "two!")
    cut = data.draw(st.integers(1, len(first) - 1))
    again = data.draw(st.integers(0, len(second)))
    record = StreamRecord()
    got = [record.add(event) for event in first[:cut]]
    for replayed in (second[:again], chat_events(one, "third"), second):
        record.rewind()
        got += [news for event in replayed if (news := record.add(event)) is not None]
    record.check_end()
    assert assemble(got) == assemble(first)


@given(st.text("ab", min_size=1, max_size=8), st.text("ab", max_size=8))
def test_a_replay_adds_only_what_continues_the_sent_text(sent, other):
    record = StreamRecord()
    record.add(chunk("one", 0, {"content": sent}))
    record.rewind()
    if other.startswith(sent):
        news = record.add(chunk("two", 0, {"content": other}))
        assert (news["choices"][0]["delta"]["content"] if news else "") == other[len(sent) :]
    else:
        with pytest.raises(ReplayDivergedError):
            _ = [record.add(chunk("two", 0, {"content": other})), record.add(chunk("two", 0, {}, "stop"))]


@given(st.lists(st.text(max_size=20), max_size=8), st.data())
def test_events_come_out_whole_however_the_bytes_are_cut(texts, data):
    ends = [data.draw(st.sampled_from(["\n", "\r\n", "\r"])) for _ in texts]
    events = [f"data: {json.dumps({'t': t})}{end}{end}".encode() for t, end in zip(texts, ends, strict=True)]
    stream = b"".join(events)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    spans = zip([0, *cuts], [*cuts, len(stream)], strict=True)

    async def pieces():
        for a, b in spans:
            yield stream[a:b]

    async def collect():
        return [event async for event in split_events(pieces())]

    got = asyncio.run(collect())
    assert b"".join(got) == stream
    assert [(event_json(event) or {}).get("t") for event in got] == texts


def test_an_event_keeps_text_outside_ascii():
    value = {"choices": [{"text": "héllo ☃ 𝄞"}]}
    assert event_json(make_event(value)) == value
