"""Tiers together: blocks are stored in the background, spill downwards, and come back from wherever they are."""

import threading

import pytest

from tests.cache.tiers.helpers import MODEL, SIZE, blocks, bytes_of, key_of
from trillion_infer.cache.tiers.disk import DiskTier
from trillion_infer.cache.tiers.host import HostTier
from trillion_infer.cache.tiers.make import make_tiers
from trillion_infer.cache.tiers.stack import IN_FLIGHT_LIMIT, TierStack
from trillion_infer.core.errors import ConfigError


def submit(stack: TierStack, *numbers: int) -> None:
    keys = [key_of(number) for number in numbers]
    stack.submit(keys, lambda: [bytes_of(key) for key in keys], SIZE * len(keys))


def fetch(stack: TierStack, *numbers: int):
    keys = [key_of(number) for number in numbers]
    return stack.read(keys, stack.locate(keys))


def test_what_the_host_gives_up_goes_to_disk_and_both_answer(tmp_path):
    stack = TierStack([HostTier(MODEL, 4 * SIZE), DiskTier(tmp_path, MODEL, 10**9)])
    for number in range(20):
        submit(stack, number)
    stack.flush()
    found = fetch(stack, *range(20))
    assert [data for data, _ in found] == [bytes_of(key_of(number)) for number in range(20)]
    assert [tier.name for _, tier in found] == ["disk"] * 16 + ["host"] * 4
    stack.close()


def test_closing_saves_the_host_tier(tmp_path):
    stack = TierStack([HostTier(MODEL, 100 * SIZE), DiskTier(tmp_path, MODEL, 10**9)])
    submit(stack, *range(80))
    stack.close()
    again = DiskTier(tmp_path, MODEL, 10**9)
    assert all(again.get(key_of(number)) == bytes_of(key_of(number)) for number in range(80))


def test_a_block_on_its_way_is_waited_for():
    stack = TierStack([HostTier(MODEL, 100 * SIZE)])
    gate = threading.Event()

    def read():
        gate.wait()
        return [bytes_of(key_of(1))]

    stack.submit([key_of(1)], read, SIZE)
    assert key_of(1) in stack
    threading.Timer(0.01, gate.set).start()
    assert fetch(stack, 1)[0][0] == bytes_of(key_of(1))
    stack.close()


class GatedDisk(DiskTier):
    """A disk that is slow to take blocks."""

    gate, asked = threading.Event(), threading.Event()

    def put(self, blocks):
        if blocks:
            self.asked.set()
            self.gate.wait(20)
        return super().put(blocks)


def test_a_block_between_two_tiers_is_found_and_waited_for(tmp_path):
    """The host has given it up and the disk has not got it yet."""
    stack = TierStack([HostTier(MODEL, 1 * SIZE), GatedDisk(tmp_path, MODEL, 10**9)])
    submit(stack, 1)
    stack.flush()
    submit(stack, 2)
    assert GatedDisk.asked.wait(20)
    assert key_of(1) in stack
    assert key_of(1) in stack.locate([key_of(1)])
    threading.Timer(0.05, GatedDisk.gate.set).start()
    data, tier = fetch(stack, 1)[0]
    assert (data, tier.name) == (bytes_of(key_of(1)), "disk")
    stack.close()


def test_a_read_that_fails_loses_its_blocks_only():
    stack = TierStack([HostTier(MODEL, 100 * SIZE)])

    def fail():
        raise RuntimeError("device lost")

    stack.submit([key_of(1)], fail, SIZE)
    submit(stack, 2)
    stack.flush()
    assert fetch(stack, 1) == [None]
    assert fetch(stack, 2)[0][0] == bytes_of(key_of(2))
    assert stack.stats()["kv_dropped"] == 1
    stack.close()


def test_what_waits_to_be_stored_is_bounded_k08():
    stack = TierStack([HostTier(MODEL, 100 * SIZE)])
    gate = threading.Event()
    stack.submit([key_of(1)], lambda: [gate.wait() and bytes_of(key_of(1))], IN_FLIGHT_LIMIT)
    assert not stack.can_take(1)
    gate.set()
    stack.flush()
    assert stack.can_take(SIZE)
    stack.close()


@pytest.mark.parametrize(
    ("host", "disk", "message"),
    [
        (1999, None, "host_kv is 1,999 bytes and one block of this model takes 2,000"),
        (0, "{}/kv:2000", "disk_kv is 2,000 bytes and one block of this model takes 2,"),
        (0, "{}/kv", "must be FOLDER:BYTES"),
        (0, "{}/kv:many", "must be FOLDER:BYTES"),
        (0, ":1e9", "must be FOLDER:BYTES"),
        (0, "{}/kv:-5", "must be FOLDER:BYTES"),
        (0, "/proc/nothing/kv:1e9", "cannot be written"),
    ],
)
def test_budgets_that_hold_nothing_and_bad_folders_are_refused(tmp_path, host, disk, message):
    with pytest.raises(ConfigError, match=message):
        make_tiers(host, disk and disk.format(tmp_path), None, MODEL, "layout", [[SIZE], [SIZE]])


def test_another_layout_of_the_same_model_finds_nothing(tmp_path):
    (one,) = make_tiers(0, f"{tmp_path}:1e9", None, b"model", "pages of 8", [[SIZE]])
    (two,) = make_tiers(0, f"{tmp_path}:1e9", None, b"model", "pages of 16", [[SIZE]])
    one.put(blocks(1))
    two.refresh()
    assert two.get(key_of(1)) is None
