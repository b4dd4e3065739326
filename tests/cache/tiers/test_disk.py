"""The disk tier: blocks outlive the process; whatever happens to the files, an answer is right or there is none."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.tiers.helpers import MODEL, SIZE, Clock, block, blocks, bytes_of, key_of
from trillion_infer.cache.tiers import disk as disk_module
from trillion_infer.cache.tiers.base import StoredBlock
from trillion_infer.cache.tiers.disk import RETRY_SECONDS, DiskTier
from trillion_infer.cache.tiers.segment import PARTIAL, SUFFIX
from trillion_infer.core.errors import ConfigError

BIG = 10**9


def tier_at(folder, budget=BIG, model=MODEL, **options) -> DiskTier:
    return DiskTier(folder, model, budget, refresh_seconds=0, **options)


def only_file(tier: DiskTier) -> Path:
    (path,) = tier.folder.glob(f"*{SUFFIX}")
    return path


def bytes_on_disk(tier: DiskTier) -> int:
    return sum(path.stat().st_size for path in tier.folder.iterdir())


def test_blocks_are_found_after_a_restart_k02_k05(tmp_path):
    tier_at(tmp_path).put([*blocks(*range(40)), block(1, group=1)])
    again = tier_at(tmp_path)
    assert again.num_blocks == 41
    for key in [*map(key_of, range(40)), key_of(1, 1)]:
        assert again.get(key) == bytes_of(key)
    assert again.get(key_of(41)) is None
    assert again.used == bytes_on_disk(again)


@pytest.mark.parametrize("place", ["payload", "header"])
def test_a_flipped_bit_is_a_miss_and_counted_k03(tmp_path, place):
    tier = tier_at(tmp_path)
    tier.put(blocks(1, 2))
    data = bytearray(only_file(tier).read_bytes())
    data[-1 if place == "payload" else 100] ^= 4
    only_file(tier).write_bytes(data)
    again = tier_at(tmp_path)
    answers = [again.get(key_of(1)), again.get(key_of(2))]
    if place == "payload":
        assert answers == [bytes_of(key_of(1)), None]
        assert again.stats()["digest_failures"] == 1
        assert key_of(2) not in again
    else:
        assert answers == [None, None]
        assert again.stats()["misses"] == 1


@pytest.mark.parametrize("length", [0, 10, 200, 1500])
def test_a_truncated_file_is_a_miss_before_and_after_a_restart(tmp_path, length):
    tier = tier_at(tmp_path)
    tier.put(blocks(1, 2))
    os.truncate(only_file(tier), length)
    assert tier.get(key_of(2)) is None
    assert tier.stats()["misses"] == 1
    again = tier_at(tmp_path)
    assert again.num_blocks == 0
    assert again.stats()["misses"] == 1
    assert bytes_on_disk(again) == 0


def test_a_missing_file_is_a_miss(tmp_path):
    tier = tier_at(tmp_path)
    tier.put(blocks(1))
    only_file(tier).unlink()
    assert tier.get(key_of(1)) is None
    assert tier.stats()["misses"] == 1
    tier.put(blocks(1))
    assert tier.get(key_of(1)) == bytes_of(key_of(1))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30))
def test_swapped_payloads_are_misses_k03(tmp_path_factory, numbers):
    """A digest covers the identity: another request's block under this name is refused."""
    tier = tier_at(tmp_path_factory.mktemp("kv"))
    wrong = [StoredBlock(key_of(n), block(n + 1).data, block(n + 1).digest) for n in numbers]
    tier.put(wrong)
    assert [tier.get(key_of(n)) for n in numbers] == [None] * len(numbers)


def test_another_models_file_is_not_read_and_not_removed(tmp_path):
    ours, theirs = tier_at(tmp_path), tier_at(tmp_path, model=b"o" * 32)
    theirs.put(blocks(1))
    assert only_file(theirs).rename(ours.folder / f"copied{SUFFIX}")
    again = tier_at(tmp_path)
    assert again.get(key_of(1)) is None
    assert again.stats()["foreign"] == 1
    assert (again.folder / f"copied{SUFFIX}").exists()


def test_another_format_version_is_not_read_and_not_removed(tmp_path):
    tier = tier_at(tmp_path)
    tier.put(blocks(1))
    data = bytearray(only_file(tier).read_bytes())
    data[8] += 1
    only_file(tier).write_bytes(data)
    again = tier_at(tmp_path)
    assert (again.num_blocks, again.stats()["foreign"]) == (0, 1)
    assert only_file(again).exists()


@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), max_size=12))
def test_the_budget_holds_and_answers_stay_right(tmp_path_factory, batches):
    tier = tier_at(tmp_path_factory.mktemp("kv"), budget=9 * SIZE)
    for batch in batches:
        tier.put(blocks(*batch))
        assert tier.used == bytes_on_disk(tier) <= tier.budget
        assert all(tier.get(key_of(n)) in (None, bytes_of(key_of(n))) for n in batch)
        assert key_of(batch[-1]) in tier or len(set(batch)) > 2


def test_the_least_recently_used_file_leaves_first(tmp_path):
    tier = tier_at(tmp_path, budget=3 * SIZE + 900)
    for number in (1, 2, 3):
        tier.put(blocks(number))
    assert tier.get(key_of(1)) is not None
    tier.put(blocks(4))
    assert [key_of(n) in tier for n in (1, 2, 3, 4)] == [True, False, True, True]
    assert tier.stats()["evictions"] == 1


def test_a_smaller_budget_after_a_restart_is_kept(tmp_path):
    tier_at(tmp_path).put(blocks(*range(64)))
    again = tier_at(tmp_path, budget=20 * SIZE)
    assert bytes_on_disk(again) == again.used <= 20 * SIZE


def test_a_full_device_takes_the_tier_down_and_it_comes_back(tmp_path, monkeypatch):
    clock = Clock()
    tier = tier_at(tmp_path, clock=clock)
    tier.put(blocks(1))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_module, "write_segment", full)
    tier.put(blocks(2))
    tier.put(blocks(3))
    monkeypatch.undo()
    tier.put(blocks(4))
    assert tier.is_down
    assert (tier.stats()["write_failures"], tier.stats()["refused"]) == (1, 3)
    assert tier.get(key_of(1)) == bytes_of(key_of(1))
    clock.now += RETRY_SECONDS
    tier.put(blocks(5))
    assert tier.get(key_of(5)) == bytes_of(key_of(5))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full_costs_only_the_cache(small_disk):
    clock = Clock()
    tier = tier_at(small_disk, clock=clock)
    for number in range(200):
        tier.put(blocks(number))
        clock.now += RETRY_SECONDS
    figures = tier.stats()
    assert figures["write_failures"] > 0
    assert figures["stored"] + figures["refused"] == 200
    assert figures["stored"] == tier.num_blocks > 10
    assert all(tier.get(key_of(n)) in (None, bytes_of(key_of(n))) for n in range(200))
    assert tier.used == bytes_on_disk(tier), "nothing half written is left"
    again = tier_at(small_disk)
    assert again.num_blocks == tier.num_blocks


def test_two_processes_writing_the_same_blocks_agree(tmp_path):
    code = (
        "import sys; from tests.cache.tiers.helpers import MODEL, blocks; from pathlib import Path\n"
        "from trillion_infer.cache.tiers.disk import DiskTier\n"
        "tier = DiskTier(Path(sys.argv[1]), MODEL, 10**9, refresh_seconds=0)\n"
        "[tier.put(blocks(*range(n, n + 8))) for n in range(0, 160, 8)]"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, tmp_path]) for _ in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    tier = tier_at(tmp_path)
    assert [tier.get(key_of(n)) for n in range(160)] == [bytes_of(key_of(n)) for n in range(160)]
    assert tier.used == bytes_on_disk(tier)


def test_a_write_that_fails_half_way_leaves_nothing_behind_k04(tmp_path):
    """A real limit of the kernel: files may not grow past 1,500 bytes."""
    code = (
        "import resource, sys; from pathlib import Path; from tests.cache.tiers.helpers import MODEL, blocks\n"
        "from trillion_infer.cache.tiers.disk import DiskTier\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))\n"
        "tier = DiskTier(Path(sys.argv[1]), MODEL, 10**9); tier.put(blocks(1, 2, 3))\n"
        "print(tier.stats()['write_failures'], tier.stats()['refused'], tier.num_blocks, tier.is_down)"
    )
    out = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["1", "3", "0", "True"]
    assert bytes_on_disk(tier_at(tmp_path)) == 0


def test_a_folder_that_vanishes_takes_the_tier_down(tmp_path):
    tier = tier_at(tmp_path)
    tier.folder.rmdir()
    tier.put(blocks(1))
    assert tier.is_down
    assert tier.get(key_of(1)) is None


def test_an_unusable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\)"):
        tier_at(tmp_path / "file" / "kv")


def test_two_tiers_on_one_folder_share_blocks_and_survive_each_others_evictions(tmp_path):
    one, two = tier_at(tmp_path, budget=8 * SIZE), tier_at(tmp_path, budget=8 * SIZE)
    for number in range(30):
        writer, reader = (one, two) if number % 2 else (two, one)
        writer.put(blocks(number))
        reader.refresh()
        assert reader.get(key_of(number)) == bytes_of(key_of(number))
        for tier in (one, two):
            assert all(tier.get(key_of(n)) in (None, bytes_of(key_of(n))) for n in range(number))
        assert bytes_on_disk(one) <= 8 * SIZE


def test_killed_while_writing_fifty_times(tmp_path):
    """Whatever was published is whole, what was not is removed, and the budget holds."""
    for attempt in range(50):
        command = [sys.executable, "-m", "tests.cache.tiers.crash_writer", str(tmp_path), str(attempt * 100_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(1 + attempt % 5):
                assert writer.stdout.readline() == "wrote\n"
            writer.send_signal(signal.SIGKILL)
        again = tier_at(tmp_path, budget=400_000)
        assert again.num_blocks > 0
        assert not list(again.folder.glob(f"*{PARTIAL}"))
        for key in list(again._where):
            assert again.get(key) == bytes_of(key)
        assert (again.stats()["misses"], again.stats()["digest_failures"]) == (0, 0)
        assert bytes_on_disk(again) <= 400_000


def test_deleted_blocks_and_tenants_leave_the_files(tmp_path):
    tier = tier_at(tmp_path)
    tier.put(blocks(*range(40)))
    tier.discard([key_of(3), key_of(4), key_of(99)])
    tier.delete_tenant(key_of(20)[1][:8])
    gone = (3, 4, 20)
    for each in (tier, tier_at(tmp_path)):
        assert [n for n in range(40) if each.get(key_of(n)) is None] == list(gone)
    content = b"".join(path.read_bytes() for path in tier.folder.iterdir())
    assert all(key_of(n)[1] not in content for n in gone)
    assert tier.used == bytes_on_disk(tier)
