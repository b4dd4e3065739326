"""Frames arrive whole and in order, or not at all."""

import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trillion_infer.distributed.channel import Channel, ChannelError, accept, connect
from trillion_infer.distributed.wire import pack, unpack

KEY = b"0123456789abcdef"


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        return listening.accept()[0], theirs


def greet(server_key: bytes, client_key: bytes) -> tuple[list, socket.socket, socket.socket]:
    """[server's channel or error, client's], and the sockets below."""
    ours, theirs = tcp_pair()
    found: list = [None, None]

    def run(side: int, greeting, end: socket.socket, key: bytes) -> None:
        try:
            found[side] = greeting(end, key)
        except ChannelError as error:
            found[side] = error
            end.close()

    threads = [
        threading.Thread(target=run, args=(0, accept, ours, server_key)),
        threading.Thread(target=run, args=(1, connect, theirs, client_key)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return found, ours, theirs


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_frames_arrive_in_order_both_ways(frames):
    (server, client), *_ = greet(KEY, KEY)
    for sender, receiver in ((server, client), (client, server)):
        for frame in frames:
            sender.send(frame)
        assert [receiver.receive() for _ in frames] == frames
    server.close()
    client.close()


def test_another_key_is_refused_on_both_sides():
    found, *_ = greet(KEY, KEY[::-1])
    assert [str(error) for error in found] == ["it has another key", "it refused the key"]


@pytest.mark.parametrize("place", [4, 40])
def test_a_changed_byte_is_noticed(place):
    """Of the digest, and of the content."""
    (server, _), ours, theirs = greet(KEY, KEY)
    server.send(b"some content")
    frame = bytearray(theirs.recv(4096))
    frame[place] ^= 1
    one, other = socket.socketpair()
    one.sendall(frame)
    with pytest.raises(ChannelError, match="digest is wrong"):
        Channel(other, server._key, is_server=False).receive()
    for end in (ours, theirs, one, other):
        end.close()


def test_a_frame_cannot_be_repeated():
    (server, client), ours, theirs = greet(KEY, KEY)
    server.send(b"once")
    frame = theirs.recv(4096)
    one, other = socket.socketpair()
    one.sendall(frame + frame)
    channel = Channel(other, client._key, is_server=False)
    assert channel.receive() == b"once"
    with pytest.raises(ChannelError, match="digest is wrong"):
        channel.receive()
    for end in (ours, theirs, one, other):
        end.close()


def test_the_end_of_a_connection_is_an_error():
    (server, client), *_ = greet(KEY, KEY)
    server.close()
    with pytest.raises(ChannelError, match="closed"):
        client.receive()
    client.close()


@given(
    arrays.arrays(st.sampled_from(["<i4", "<u4", "|b1", "<f4", "<i8"]), arrays.array_shapes(min_dims=0, max_dims=3)),
    st.text(),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
)
def test_messages_arrive_as_they_were_sent(array, text, numbers):
    kind, sent, words, found = unpack(pack(["call", array, text, numbers]))
    assert (kind, words, found) == ("call", text, numbers)
    assert (sent.dtype, sent.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(sent, array)


@pytest.mark.parametrize("value", [object(), np.array([object()]), {1, 2}])
def test_objects_cannot_be_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        pack(["call", value])


@pytest.mark.parametrize("data", [pack(["x"])[:0] + b"\x01", b"\x90", b"\x91\x01"])
def test_other_bytes_are_no_message(data):
    with pytest.raises(ValueError, match="no message"):
        unpack(data)
