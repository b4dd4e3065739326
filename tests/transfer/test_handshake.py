"""Peers that cannot work together are refused with both named; frames that are not the peer's are not read."""

import socket
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.core.errors import ConfigError
from trillion_infer.transfer.handoff.identity import Identity, PoolSpec
from trillion_infer.transfer.handoff.links import Links
from trillion_infer.transfer.handoff.messages import (
    Abort,
    Ask,
    Beat,
    MessageCodec,
    Offer,
    Piece,
    ProtocolError,
    Refused,
    Renew,
    Resend,
)
from trillion_infer.transfer.handoff.wire import Channel, WireError

POOL = PoolSpec("full", (3, 16, 2, 2, 8), "float32")
ONE = Identity("prefill-1", "ab" * 32, (POOL,), "e1", "jax", "127.0.0.1:1")
TWO = replace(ONE, name="decode-2", epoch="e2")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "cd" * 32}, "different models or weights"),
        ({"transport": "socket"}, "--handoff_transport"),
        ({"pools": (replace(POOL, shape=(3, 32, 2, 2, 8)),)}, "--page_size"),
        ({"pools": (POOL, POOL)}, "1 and 2 pools"),
    ],
)
def test_peers_that_differ_are_refused_and_both_are_named(change, says):
    with pytest.raises(ConfigError, match=says) as caught:
        ONE.check(replace(TWO, **change))
    assert "prefill-1 and decode-2" in str(caught.value)


def test_dtypes_of_the_pools_may_differ():
    for dtype in ("bfloat16", "int8"):
        ONE.check(replace(TWO, pools=(replace(POOL, dtype=dtype),)))


def pair(first: bytes, second: bytes) -> tuple[Channel, Channel]:
    """Both ends of a connection, with these keys."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        two = socket.create_connection(listener.getsockname())
        one, _ = listener.accept()
    made = {}
    thread = threading.Thread(target=lambda: made.setdefault("one", Channel(one, first, is_server=True)))
    thread.start()
    channel = Channel(two, second, is_server=False)
    thread.join(10)
    return made["one"], channel


def exchanged(first: bytes, second: bytes):
    server, client = pair(first, second)
    found: list = []

    def serve() -> None:
        try:
            found.append(server.exchange(b"from the server"))
        except WireError as error:
            found.append(error)
            server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        answer = client.exchange(b"from the client")
    except WireError as error:
        answer = error
        client.close()
    thread.join(10)
    return found[0], answer, server, client


def test_the_same_key_opens_and_another_does_not():
    assert exchanged(b"k" * 16, b"k" * 16)[:2] == (b"from the client", b"from the server")
    first, second, *_ = exchanged(b"k" * 16, b"x" * 16)
    assert isinstance(first, WireError)
    assert isinstance(second, WireError)
    assert "--handoff_key" in str(first) + str(second)


def test_a_frame_that_was_changed_repeated_or_reflected_is_not_read():
    _, _, server, client = exchanged(b"k" * 16, b"k" * 16)
    client.send(b"hello")
    raw = server._socket.recv(4096)
    for wrong in (raw[:5] + bytes([raw[5] ^ 1]) + raw[6:],):
        client._socket.sendall(wrong)
        with pytest.raises(WireError, match="not signed"):
            server.receive()
    server._socket.sendall(raw)
    with pytest.raises(WireError, match="not signed"):
        client.receive()


MESSAGES = st.one_of(
    st.builds(
        Ask,
        st.text(max_size=8),
        st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
        st.integers(0, 2**31),
        st.integers(0, 9),
        st.text(max_size=4),
        st.text(max_size=4),
        st.integers(-3, 3),
        st.floats(0.1, 1e6),
    ),
    st.builds(Renew, st.lists(st.text(max_size=5), max_size=4).map(tuple)),
    st.builds(Resend, st.text(max_size=5), st.integers(0, 5)),
    st.builds(Abort, st.text(max_size=5)),
    st.builds(Refused, st.text(max_size=5), st.sampled_from(["bad", "busy", "gone"]), st.text(max_size=5)),
    st.builds(Beat, st.integers(0, 10**9), st.booleans()),
    st.builds(
        Offer,
        st.text(max_size=5),
        st.integers(0, 3),
        st.integers(0, 3),
        st.booleans(),
        st.binary(max_size=16),
        st.integers(0, 99),
        st.lists(
            st.builds(
                Piece,
                st.integers(0, 3),
                st.integers(0, 9),
                st.integers(1, 16),
                st.binary(min_size=8, max_size=8),
                st.integers(0, 2**60),
                st.integers(0, 2**40),
            ),
            max_size=3,
        ).map(tuple),
    ),
)


@given(MESSAGES)
def test_messages_are_read_as_they_were_written(message):
    codec = MessageCodec()
    assert codec.unpack(codec.pack(message)) == message


@given(st.binary(max_size=60))
def test_anything_else_is_refused(data):
    codec = MessageCodec()
    try:
        message = codec.unpack(data)
    except ProtocolError:
        return
    assert codec.pack(message)


@given(MESSAGES, st.data())
def test_cut_messages_are_refused(message, data):
    codec = MessageCodec()
    packed = codec.pack(message)
    with pytest.raises(ProtocolError):
        codec.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


def test_a_restarted_peer_is_met_again_under_a_new_epoch_p02():
    key = b"k" * 16
    asker = Links(TWO, key, "127.0.0.1", 0)
    first = Links(ONE, key, "127.0.0.1", 0)
    port = int(first.address.rpartition(":")[2])
    try:
        asker.dial([first.address])
        assert asker.inbox.get(timeout=10).identity.epoch == "e1"
        first.close()
        assert not asker.inbox.get(timeout=10).is_open
        second = Links(replace(ONE, epoch="e9"), key, "127.0.0.1", port)
        try:
            assert asker.inbox.get(timeout=10).identity.epoch == "e9"
        finally:
            second.close()
    finally:
        asker.close()


def test_a_peer_of_another_model_is_told_apart_and_named():
    key = b"k" * 16
    asker, other = Links(TWO, key, "127.0.0.1", 0), Links(replace(ONE, model="00" * 32), key, "127.0.0.1", 0)
    try:
        asker.dial([other.address])
        while not asker.refusals:
            threading.Event().wait(0.01)
        reason = asker.refusals[other.address]
        assert "decode-2 and prefill-1 serve different models" in reason
        assert asker.inbox.empty()
    finally:
        asker.close()
        other.close()
