"""Blocks below a URL, with fsspec's local and in-memory file systems."""

import threading
import uuid
from pathlib import Path

import pytest

from tests.cache.tiers.helpers import MODEL, SIZE, Clock, block, blocks, bytes_of, key_of
from trillion_infer.cache.tiers.objects import RETRY_SECONDS, ObjectTier
from trillion_infer.config.tiers import ObjectStore, parse_store
from trillion_infer.core.errors import ConfigError


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    return f"file://{tmp_path}/store" if request.param == "file" else f"memory://{uuid.uuid4().hex}"


def tier_at(url, model=MODEL, **options) -> ObjectTier:
    return ObjectTier(parse_store(url), model, list_seconds=0, **options)


def paths(tmp_path) -> list[Path]:
    return sorted(path for path in tmp_path.rglob("*") if path.is_file())


def test_what_one_process_puts_another_finds(url):
    one, two = tier_at(url), tier_at(url)
    one.put(blocks(*range(20)))
    keys = [key_of(number) for number in range(25)]
    assert two.lookup(keys) == set(keys[:20])
    assert two.get_many(keys) == [*map(bytes_of, keys[:20]), *[None] * 5]
    assert tier_at(url, model=b"o" * 32).lookup(keys) == set()


def test_two_writers_of_the_same_block_leave_one_whole_object(tmp_path):
    tiers = [tier_at(f"file://{tmp_path}") for _ in range(4)]
    threads = [threading.Thread(target=tier.put, args=(blocks(*range(30)),)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths(tmp_path)) == 30
    fresh = tier_at(f"file://{tmp_path}")
    assert fresh.get_many([key_of(n) for n in range(30)]) == [bytes_of(key_of(n)) for n in range(30)]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_object_is_a_miss_and_leaves_k03(tmp_path, damage):
    tier = tier_at(f"file://{tmp_path}")
    tier.put(blocks(1))
    (path,) = paths(tmp_path)
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    {
        "flip": lambda: path.write_bytes(data),
        "truncate": lambda: path.write_bytes(data[:50]),
        "empty": lambda: path.write_bytes(b""),
        "remove": path.unlink,
    }[damage]()
    assert tier.get(key_of(1)) is None
    assert key_of(1) not in tier
    assert paths(tmp_path) == []
    assert tier.stats()["misses" if damage == "remove" else "digest_failures"] == 1


def test_the_oldest_objects_leave_a_full_store(tmp_path):
    budget = 20 * (SIZE + 32)
    tier = tier_at(f"file://{tmp_path}?bytes={budget}")
    for number in range(100):
        tier.put(blocks(number))
    assert sum(path.stat().st_size for path in paths(tmp_path)) <= budget * 9 // 8
    assert tier.get(key_of(99)) == bytes_of(key_of(99))
    assert tier.get(key_of(0)) is None
    assert tier.stats()["evictions"] > 70


def test_a_store_that_breaks_is_left_alone_and_tried_again(tmp_path):
    clock = Clock()
    folder = tmp_path / "store"
    tier = tier_at(f"file://{folder}", clock=clock)
    tier.put(blocks(1))
    moved = folder.rename(tmp_path / "away")
    folder.write_text("in the way")
    tier.put(blocks(2))
    assert tier.is_down
    assert tier.get(key_of(1)) is None
    assert (tier.stats()["outages"], tier.stats()["refused"], tier.stats()["write_failures"]) == (1, 1, 1)
    folder.unlink()
    moved.rename(folder)
    clock.now += RETRY_SECONDS
    tier.put(blocks(3))
    assert tier.get_many([key_of(1), key_of(3)]) == [bytes_of(key_of(1)), bytes_of(key_of(3))]


def test_blocks_and_tenants_are_deleted_for_everyone(url):
    one, two = tier_at(url), tier_at(url)
    one.put([*blocks(*range(8)), block(1, group=1)])
    two.discard([key_of(0), key_of(99)])
    two.delete_tenant(key_of(1)[1][:8])
    assert [number for number in range(8) if one.get(key_of(number)) is not None] == list(range(2, 8))
    assert one.get(key_of(1, 1)) is None


def test_a_url_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for url in (f"file://{tmp_path}/file/store", "nothing://store"):
        with pytest.raises(ConfigError, match="cannot be used"):
            ObjectTier(ObjectStore(url, 0), MODEL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mooncake://nowhere", "must be mooncake://HOST:PORT"),
        ("mooncake://host:70000", "must be mooncake://HOST:PORT"),
        ("mooncake://10.0.0.1:50051", "add host=ADDRESS"),
        ("mooncake://127.0.0.1:1?segment=big", "must be a number of bytes"),
        ("mooncake://127.0.0.1:1?colour=red", "takes segment, host, protocol"),
        ("mooncake://127.0.0.1:1?protocol=udp", "must be tcp or rdma"),
        ("/plain/path", "must be mooncake://HOST:PORT"),
        ("file:///x?bytes=-1", "must be a number of bytes"),
    ],
)
def test_urls_that_say_nothing_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_store(text)
