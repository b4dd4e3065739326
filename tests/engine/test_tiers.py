"""KV beyond device memory: the same tokens from wherever a prefix comes back, or it is computed again."""

import random
import shutil
from pathlib import Path

import pytest

from tests.conftest import GOLDEN
from tests.engine.helpers import (
    DRAFTING,
    HEAD,
    Drafts,
    check_idle,
    equal_drafts,
    greedy,
    note_drafts,
    tokens_of,
)
from tests.engine.test_equalities import SMALL, prompts_of, tight_memory
from trillion_infer import LLM, ConfigError, InvalidRequestError
from trillion_infer.testing.mooncake import Master, master_program

pytestmark = pytest.mark.matrix

MODELS = ["smollm2", "gemma3_text", "deepseek_v3"]
TINY = GOLDEN / "tiny"
SESSIONS, LENGTH, LONGEST = 20, 40, 96


class Conversations:
    """Sessions that grow from turn to turn, each answered as a model without any cache answers."""

    def __init__(self, make_llm, name: str, bundles: Path | str = ""):
        """bundles: a folder by which engines of the same shape share their compiled programs."""
        self.name, self._make, self._bundles = name, make_llm, str(bundles)
        self._cold = make_llm(name, **SMALL, prefix_caching=False)
        self.block_bytes = sum(layout.page_bytes for layout in self._cold.blueprint.layouts)
        self._whole = prompts_of(11, [LONGEST] * SESSIONS)
        self._answers: dict[tuple[int, int], list[int]] = {}

    def llm(self, **options) -> LLM:
        """A device pool that holds three sessions; the test's own."""
        layouts = self._cold.blueprint.layouts
        memory = tight_memory(self._cold, pages=3 * LONGEST // 8 // len(layouts))
        common = {**SMALL, "max_model_len": 112, "kv_memory": memory, "bundle": self._bundles}
        llm = self._make.fresh(self.name, **{**common, **options})
        llm.engine.tiering.promoter.chooses = False  # so small a model computes faster than some disks read
        return llm

    def prompt(self, session: int, turn: int = 0) -> list[int]:
        return self._whole[session][: min(LENGTH + session + 5 * turn, LONGEST)]

    def check(self, llm: LLM, turns: list[tuple[int, int]]) -> int:
        """Runs (session, turn) pairs together; tokens that were found, wherever."""
        prompts = [self.prompt(*turn) for turn in turns]
        outputs = llm.generate(prompts, greedy(6))
        assert tokens_of(outputs) == [self._answer(*turn) for turn in turns]
        found = [output.num_cached_tokens for output in outputs]
        assert all(hit < len(prompt) for hit, prompt in zip(found, prompts, strict=True))
        return sum(found)

    def _answer(self, session: int, turn: int) -> list[int]:
        if (session, turn) not in self._answers:
            outputs = self._cold.generate([self.prompt(each, turn) for each in range(SESSIONS)], greedy(6))
            self._answers.update(((each, turn), answer) for each, answer in enumerate(tokens_of(outputs)))
        return self._answers[session, turn]

    def check_each(self, llm: LLM, turn: int = 0) -> int:
        """Every session, one after the other."""
        return sum(self.check(llm, [(session, turn)]) for session in range(SESSIONS))


@pytest.fixture(scope="module")
def bundles(no_compile_cache, tmp_path_factory):
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module", params=MODELS)
def talk(request, make_llm, bundles):
    return Conversations(make_llm, request.param, bundles)


@pytest.fixture(scope="module")
def dense(make_llm, bundles):
    return Conversations(make_llm, "smollm2", bundles)


def prefix_tokens(talk: Conversations) -> int:
    """What all sessions together can have cached: whole blocks before the last token."""
    return sum((len(talk.prompt(session)) - 1) // 8 * 8 for session in range(SESSIONS))


def came_by_layers(llm: LLM) -> None:
    """Most sessions ran some layers at a time, as those of their prefix came, and none in vain."""
    stats = llm.stats()
    assert stats["kv_layered_prefills"] > SESSIONS // 2
    assert stats["kv_layered_dropped"] == 0


def test_device_and_host_hits_equal_cold(talk):
    llm = talk.llm(host_kv=1e9)
    assert talk.check_each(llm) == 0
    assert talk.check(llm, [(19, 0)]) > 0
    assert llm.stats()["kv_host.hit_tokens"] == 0, "the last session is still on the device"
    assert talk.check_each(llm) == prefix_tokens(talk)
    stats = llm.stats()
    assert stats["kv_host.hit_tokens"] > prefix_tokens(talk) // 2
    assert stats["kv_promoted_bytes"] > 0
    assert stats["kv_host.digest_failures"] == 0
    came_by_layers(llm)
    check_idle(llm)
    llm.close()


def test_disk_hits_equal_cold_and_outlive_the_llm_k02_k05(talk, tmp_path):
    options = {"disk_kv": f"{tmp_path}:1e9"}
    llm = talk.llm(**options)
    assert talk.check_each(llm) == 0
    assert talk.check_each(llm) == prefix_tokens(talk)
    assert llm.stats()["kv_disk.hit_tokens"] > prefix_tokens(talk) // 2
    check_idle(llm)
    llm.close()
    again = talk.llm(**options)
    whole_blocks = sum(len(talk.prompt(session)) // 8 * 8 for session in range(SESSIONS))
    assert talk.check_each(again, turn=1) == again.stats()["kv_disk.hit_tokens"] == whole_blocks
    came_by_layers(again)
    check_idle(again)
    again.close()


@pytest.mark.parametrize(
    ("name", "speculate"),
    [
        ("smollm2", f"draft:{TINY / 'smollm2'}"),
        (DRAFTING, HEAD["speculate"]),
        pytest.param("deepseek_v3_mtp", "mtp", marks=pytest.mark.slow),
    ],
)
def test_blocks_hold_the_kv_of_a_model_that_drafts(make_llm, bundles, tmp_path, monkeypatch, name, speculate):
    """Cold, from host memory and from disk: the same answers, and the same drafts, with the same probabilities."""
    talk, options = Conversations(make_llm, name, bundles), {"speculate": speculate, "max_running": 1}
    drafts: list[Drafts] = []

    def run(llm: LLM) -> int:
        """Every session; tokens found in a tier."""
        before = llm.stats()
        drafts.append(note_drafts(llm.engine, monkeypatch))
        talk.check_each(llm)
        check_idle(llm)
        after = llm.stats()
        return sum(after[key] - before[key] for key in after if key in ("kv_host.hit_tokens", "kv_disk.hit_tokens"))

    llm = talk.llm(**options, host_kv=1e9, disk_kv=f"{tmp_path}:1e9")
    assert run(llm) == 0
    assert run(llm) > prefix_tokens(talk) // 2
    llm.close()
    again = talk.llm(**options, disk_kv=f"{tmp_path}:1e9")
    assert run(again) == prefix_tokens(talk)
    again.close()
    for theirs in drafts[1:]:
        equal_drafts(drafts[0], theirs)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2,tensor=2", "sequence=2,tensor=2"])
def test_another_mesh_finds_what_one_device_stored(talk, tmp_path, mesh):
    llm = talk.llm(disk_kv=f"{tmp_path}:1e9")
    talk.check_each(llm)
    llm.close()
    many = talk.llm(disk_kv=f"{tmp_path}:1e9", mesh=mesh, kv_memory=2**22)
    assert talk.check_each(many) == prefix_tokens(talk)
    check_idle(many)
    many.close()


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_random_turns_past_full_tiers_k10(talk, tmp_path, count):
    """Host and disk hold a few sessions each, so that every tier gives up blocks all the time."""
    session = -(-LONGEST // 8) * talk.block_bytes
    llm = talk.llm(host_kv=3 * session, disk_kv=f"{tmp_path}:{6 * session}")
    rng = random.Random(5)
    turns = [0] * SESSIONS
    for _ in range(count):
        chosen = rng.sample(range(SESSIONS), rng.choice([1, 1, 2, 8]))
        talk.check(llm, [(each, turns[each]) for each in chosen])
        for each in chosen:
            turns[each] = (turns[each] + 1) % 8
        check_idle(llm)
    stats = llm.stats()
    assert stats["kv_host.bytes"] <= 3 * session
    assert stats["kv_disk.bytes"] <= 6 * session
    for name in ("kv_host.evictions", "kv_disk.evictions", "kv_host.hit_tokens", "kv_disk.hit_tokens"):
        assert stats[name] > 0, (name, stats)
    for name in ("digest_failures", "misses", "refused"):
        assert stats[f"kv_host.{name}"] == stats[f"kv_disk.{name}"] == 0
    llm.close()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 6 * session


@pytest.fixture(params=["file", "mooncake"])
def store(request, tmp_path):
    """URL of an empty store that processes share."""
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    if master_program() is None:
        pytest.skip("mooncake_master is not installed (extra: store)")
    master = Master()
    yield master.url(segment=64 << 20)
    master.kill()


def test_two_llms_on_one_store_share_prefixes_whatever_their_mesh(talk, store):
    one, two = talk.llm(store=store), talk.llm(store=store, mesh="tensor=2", kv_memory=2**22)
    assert talk.check_each(one) == 0
    one.engine.tiering._save_published(one.engine.pools, 1)
    one.engine.tiering.stack.flush()
    assert talk.check_each(two) == prefix_tokens(talk)
    assert two.stats()["kv_store.hit_tokens"] == prefix_tokens(talk)
    came_by_layers(two)
    for llm in (two, one):
        check_idle(llm)
        llm.close()


@pytest.mark.skipif(master_program() is None, reason="mooncake_master is not installed (extra: store)")
def test_a_master_that_is_killed_and_restarted_costs_only_the_cache_k07(dense):
    master = Master("--default_kv_lease_ttl=100")
    llm = dense.llm(store=master.url(segment=64 << 20))
    (tier,) = llm.engine.tiering.stack.tiers
    dense.check_each(llm)
    master.kill()
    dense.check_each(llm)
    assert llm.stats()["kv_store.outages"] >= 1
    assert tier.is_down
    master.start()
    tier._down_until = 0
    dense.check_each(llm)
    check_idle(llm)
    llm.close()
    master.kill()


def test_a_session_comes_back_after_a_restart_on_another_mesh(talk, tmp_path):
    options = {"disk_kv": f"{tmp_path}:1e9", "keep_alive": 1000}
    llm = talk.llm(**options)
    (first,) = llm.generate([talk.prompt(0)], greedy(6), session_id="alice")
    llm.sessions.save("alice")
    talk.check_each(llm)
    llm.close()
    many = talk.llm(**options, mesh="tensor=2", kv_memory=2**22)
    info = many.sessions.load("alice")
    history = many.sessions.history("alice")
    assert list(history) == talk.prompt(0) + tokens_of([first])[0]
    assert info.num_tokens == len(history)
    (again,) = many.generate([[*history, 5, 6, 7]], greedy(4), session_id="alice")
    (cold,) = talk._cold.generate([[*history, 5, 6, 7]], greedy(4))
    assert tokens_of([again]) == tokens_of([cold])
    assert again.num_cached_tokens == (len(history) - 1) // 8 * 8
    many.sessions.delete("alice")
    assert many.sessions.list() == []
    (gone,) = many.generate([history], greedy(4))
    assert gone.num_cached_tokens == 0, "deleted in every tier"
    check_idle(many)
    many.close()


def test_tenants_share_nothing_and_leave_nothing_in_any_tier(dense, tmp_path):
    llm = dense.llm(host_kv=4 * dense.block_bytes, disk_kv=f"{tmp_path}:1e9")
    prompts = [dense.prompt(session) for session in range(6)]

    def found(*tenants: str) -> list[int]:
        outputs = llm.generate(
            [prompt for prompt in prompts for _ in tenants], greedy(2), tenant=[*tenants] * len(prompts)
        )
        return [sum(each.num_cached_tokens for each in outputs[i :: len(tenants)]) for i in range(len(tenants))]

    assert found("acme", "acme/lab", "rival") == [0, 0, 0]
    assert min(found("acme", "acme/lab", "rival")) > 100
    stats = llm.stats()
    assert stats["kv_host.blocks"] > 0
    assert stats["kv_disk.blocks"] > 0
    llm.sessions.delete_tenant("acme")
    acme, part, rival = found("acme", "acme/lab", "rival")
    assert acme == part == 0
    assert rival > 100
    with pytest.raises(InvalidRequestError, match="part of a tenant"):
        llm.sessions.delete_tenant("acme/lab")
    with pytest.raises(InvalidRequestError, match="2 tenants for 6 prompts"):
        llm.generate(prompts, greedy(2), tenant=["acme", "rival"])
    check_idle(llm)
    llm.close()


def test_pinned_sessions_stay_and_idle_ones_are_demoted(dense):
    llm = dense.llm(host_kv=1e9, keep_alive=0.0)
    llm.sessions._keep_alive = 1000
    llm.generate([dense.prompt(0)], greedy(6), session_id="kept")
    for session in range(1, 6):
        dense.check(llm, [(session, 0)])
    assert dense.check(llm, [(0, 0)]) == (len(dense.prompt(0)) - 1) // 8 * 8
    assert llm.stats()["kv_host.hit_tokens"] == 0, "a pinned session never left the device"
    llm.sessions._next_expiry = llm.sessions._keep_alive = 0
    llm.sessions.tick()
    assert not llm.sessions.list()[0].is_pinned
    for session in range(6, 12):
        dense.check(llm, [(session, 0)])
    assert dense.check(llm, [(0, 0)]) > 0
    assert llm.stats()["kv_host.hit_tokens"] > 0
    check_idle(llm)
    llm.close()


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(next(p for p in path.parent.glob("*.kv") if p != path).read_bytes()),
    ],
    ids=["flipped", "truncated", "missing", "another"],
)
@pytest.mark.parametrize("restart", [False, True])
def test_damaged_files_are_computed_again_k03_k04(dense, tmp_path, damage, restart):
    llm = dense.llm(disk_kv=f"{tmp_path}:1e9")
    dense.check_each(llm)
    if restart:
        llm.close()
    else:
        llm.engine.tiering.stack.flush()
    for path in sorted(tmp_path.rglob("*.kv"))[::2]:
        damage(path)
    if restart:
        llm = dense.llm(disk_kv=f"{tmp_path}:1e9")
    found = dense.check_each(llm)
    assert found <= prefix_tokens(dense)
    check_idle(llm)
    llm.close()


def test_a_host_block_that_changed_is_computed_again(dense):
    llm = dense.llm(host_kv=1e9)
    dense.check_each(llm)
    tiering = llm.engine.tiering
    tiering.stack.flush()
    blocks = tiering.stack.tiers[0]._blocks
    for key, block in list(blocks.items())[::2]:
        object.__setattr__(block, "data", bytes([block.data[0] ^ 1]) + block.data[1:])
        assert blocks[key] is block
    assert dense.check_each(llm) < prefix_tokens(dense)
    assert llm.stats()["kv_host.digest_failures"] > 0
    check_idle(llm)
    llm.close()


def test_a_folder_that_is_gone_costs_only_the_cache(dense, tmp_path):
    llm = dense.llm(disk_kv=f"{tmp_path / 'kv'}:1e9")
    dense.check_each(llm)
    llm.engine.tiering.stack.flush()
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_text("in the way")
    dense.check_each(llm)
    assert llm.stats()["kv_disk.refused"] > 0
    check_idle(llm)
    llm.close()


def test_two_llms_on_one_folder_find_each_others_blocks(dense, tmp_path):
    one, two = (dense.llm(disk_kv=f"{tmp_path}:1e9") for _ in range(2))
    dense.check_each(one)
    one.engine.tiering.save_cached(one.engine.all_pools)
    two.engine.tiering.stack.tiers[0]._refresh_seconds = 0
    assert dense.check_each(two) == prefix_tokens(dense)
    for llm in (one, two):
        check_idle(llm)
        llm.close()


def test_another_model_and_another_dtype_find_nothing(make_llm, tmp_path):
    for name, options in (("smollm2", {}), ("qwen3", {}), ("smollm2", {"dtype": "bfloat16"})):
        llm = make_llm.fresh(name, **SMALL, **options, disk_kv=f"{tmp_path}:1e9")
        (output,) = llm.generate([prompts_of(3, [60])[0]], greedy(4))
        assert output.num_cached_tokens == 0
        llm.close()


def test_a_prefix_that_cannot_be_reused_is_computed_k11(make_llm, tmp_path):
    """Rotary frequencies that depend on the sequence's length: nothing is kept, in any tier."""
    llm = make_llm.fresh("llama_dynamic", **SMALL, host_kv=1e9, disk_kv=f"{tmp_path}:1e9")
    for _ in range(2):
        (output,) = llm.generate([prompts_of(3, [60])[0]], greedy(4))
        assert output.num_cached_tokens == 0
    llm.close()
    llm.close()
    assert not list(tmp_path.rglob("*.kv"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_kv": 10}, "host_kv is 10 bytes and one block of this model takes"),
        ({"host_kv": -1}, "host_kv is -1; it must be a number of bytes"),
        ({"disk_kv": "/tmp/kv"}, "disk_kv is '/tmp/kv'; it must be FOLDER:BYTES"),
        ({"disk_kv": "/dev/null/kv:1e9"}, "cannot be written"),
        ({"sessions": "/dev/null/x"}, "sessions folder '/dev/null/x' cannot be made"),
        ({"host_kv": 1e9, "prefix_caching": False}, "prefix_caching is False"),
        ({"store": "mooncake://localhost:1"}, "store mooncake://localhost:1 cannot be reached"),
        ({"store": "s4://bucket"}, "store 's4://bucket' cannot be used"),
    ],
)
def test_bad_tiers_are_refused_at_the_start(make_llm, options, message):
    with pytest.raises(ConfigError, match=message):
        make_llm.fresh("smollm2", **options)
