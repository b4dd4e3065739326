"""The Mooncake tier, with the real master: whatever happens to the store, an answer is right or there is none."""

import subprocess
import sys
import time

import pytest

from tests.cache.tiers.helpers import MODEL, SIZE, Clock, block, blocks, bytes_of, key_of
from trillion_infer.cache.tiers.base import StoredBlock, digest_of
from trillion_infer.cache.tiers.mooncake import RETRY_SECONDS, MooncakeTier
from trillion_infer.config.tiers import parse_store
from trillion_infer.core.errors import ConfigError
from trillion_infer.testing.mooncake import Master, master_program
from trillion_infer.testing.ports import free_port

pytestmark = pytest.mark.skipif(master_program() is None, reason="mooncake_master is not installed (extra: store)")

SEGMENT = 16 << 20


@pytest.fixture
def master():
    made = Master("--default_kv_lease_ttl=100")
    yield made
    made.kill()


@pytest.fixture
def open_tier(master):
    """open_tier(segment, model) on the test's master; closed after it."""
    made = []

    def open_tier(segment=SEGMENT, model=MODEL, block_bytes=SIZE, **options):
        made.append(MooncakeTier(parse_store(master.url(segment=segment)), model, block_bytes, **options))
        return made[-1]

    yield open_tier
    for tier in made:
        tier.close()


def test_what_one_process_puts_another_finds(open_tier):
    one, two = open_tier(), open_tier(segment=0)
    one.put(blocks(*range(40)))
    keys = [key_of(number) for number in range(50)]
    assert two.lookup(keys) == set(keys[:40])
    assert two.get_many(keys) == [*map(bytes_of, keys[:40]), *[None] * 10]
    assert one.stats()["stored"] == 40
    assert two.stats()["hits"] == 40


def test_a_second_put_of_a_block_changes_nothing(open_tier):
    """The store keeps the first value of a name; two processes writing the same block agree."""
    one, two = open_tier(), open_tier()
    one.put(blocks(1))
    two.put(blocks(1))
    for tier in (one, two):
        assert tier.get(key_of(1)) == bytes_of(key_of(1))
        assert tier.stats()["digest_failures"] == 0


def test_a_block_that_is_not_intact_is_removed_so_that_it_can_be_stored_again_k03(open_tier):
    one, two = open_tier(), open_tier()
    one.put([StoredBlock(key_of(1), block(2).data, block(2).digest)])
    assert two.get(key_of(1)) is None
    assert two.stats()["digest_failures"] == 1
    two.put(blocks(1))
    assert open_tier().get(key_of(1)) == bytes_of(key_of(1))


def test_another_model_finds_nothing(open_tier):
    open_tier().put(blocks(1))
    other = open_tier(model=b"o" * 32)
    assert other.lookup([key_of(1)]) == set()
    assert other.get(key_of(1)) is None


def test_an_object_longer_than_a_block_is_a_miss(open_tier):
    open_tier(block_bytes=2 * SIZE).put(blocks(1))
    small = open_tier(block_bytes=SIZE // 2)
    assert small.get(key_of(1)) is None


def test_a_full_store_refuses_and_counts_and_takes_blocks_again_k08(open_tier):
    """Past the segment's size the master evicts; what it would not take is counted, and what is there is right."""
    large = 1 << 19
    tier = open_tier(block_bytes=large)
    data = bytes_of(key_of(0)) * (large // SIZE + 1)

    def made(number):
        key = key_of(number)
        return StoredBlock(key, data[:large], digest_of(MODEL, key, data[:large]))

    for start in range(0, 96, 16):
        tier.put([made(number) for number in range(start, start + 16)])
    figures = tier.stats()
    assert figures["stored"] + figures["refused"] == 96
    assert figures["stored"] > 16
    time.sleep(1.2)
    tier.put([made(1000)])
    assert tier.get(key_of(1000)) == data[:large]
    assert all(tier.get(key_of(number)) in (None, data[:large]) for number in range(96))


def test_a_killed_master_takes_the_tier_down_and_a_restarted_one_brings_it_back_k07(open_tier, master):
    clock = Clock()
    tier = open_tier(clock=clock)
    tier.put(blocks(1))
    master.kill()
    begun = time.monotonic()
    assert tier.get(key_of(1)) is None
    assert tier.is_down
    tier.put(blocks(2))
    assert tier.lookup([key_of(1), key_of(2)]) == set()
    assert time.monotonic() - begun < 60, "a dead master must not hold anyone up"
    assert (tier.stats()["outages"], tier.stats()["refused"]) == (1, 1)
    master.start()
    for attempt in range(100):
        clock.now += RETRY_SECONDS
        tier.put(blocks(100 + attempt))
        if key_of(100 + attempt) in tier:
            break
        time.sleep(0.2)
    assert tier.get(key_of(100 + attempt)) == bytes_of(key_of(100 + attempt))
    assert tier.get(key_of(1)) in (None, bytes_of(key_of(1)))


def test_blocks_of_a_process_that_was_killed_are_misses(open_tier, master):
    """A lost segment: its owner is gone without a word."""
    code = (
        "import sys, time; from tests.cache.tiers.helpers import MODEL, SIZE, blocks\n"
        "from trillion_infer.config.tiers import parse_store\n"
        "from trillion_infer.cache.tiers.mooncake import MooncakeTier\n"
        "tier = MooncakeTier(parse_store(sys.argv[1]), MODEL, SIZE); tier.put(blocks(1, 2, 3))\n"
        "print('stored', tier.stats()['stored'], flush=True); time.sleep(600)"
    )
    tier = open_tier(segment=0)
    command = [sys.executable, "-c", code, master.url(segment=SEGMENT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert "stored 3" in owner.stdout.read(8) + owner.stdout.readline()
        assert tier.get(key_of(1)) == bytes_of(key_of(1))
        owner.kill()
    assert tier.get_many([key_of(2), key_of(3)]) == [None, None]
    own = open_tier()
    own.discard([key_of(2)])
    own.put(blocks(7))
    assert own.get(key_of(7)) == bytes_of(key_of(7))


def test_blocks_and_tenants_are_deleted_for_everyone(open_tier):
    one, two = open_tier(), open_tier()
    one.put(blocks(*range(8)))
    two.discard([key_of(0), key_of(99)])
    two.delete_tenant(key_of(1)[1][:8])
    left = [number for number in range(8) if one.get(key_of(number)) is not None]
    assert left == list(range(2, 8))


def test_a_store_that_is_not_there_is_refused_at_once():
    spec = parse_store(f"mooncake://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"cannot be reached \(Connection refused\); start mooncake_master"):
        MooncakeTier(spec, MODEL, SIZE)
