"""Twenty minutes with everything on: memory flat, no page, file or lease leaked. SOAK_SECONDS shortens a run."""

import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.engine.helpers import check_idle, greedy
from tests.engine.test_tiers import LONGEST, SESSIONS, Conversations
from trillion_infer.testing.mooncake import Master, master_program

SECONDS = float(os.environ.get("SOAK_SECONDS", "1200"))


def resident_mb() -> float:
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


@pytest.mark.slow
def test_everything_on_for_a_long_time_leaks_nothing_k10(make_llm, tmp_path):
    talk = Conversations(make_llm, "smollm2")
    session = -(-LONGEST // 8) * sum(layout.page_bytes for layout in talk._cold.blueprint.layouts)
    master = Master("--default_kv_lease_ttl=100") if master_program() else None
    store = master.url(segment=32 << 20) if master else f"file://{tmp_path}/store?bytes={20 * session}"
    llm = talk.llm(host_kv=3 * session, disk_kv=f"{tmp_path}:{6 * session}", store=store, keep_alive=0.2)
    rng, turns, begun = random.Random(5), [0] * SESSIONS, time.monotonic()
    files, memory, rounds = [], [], 0
    while time.monotonic() - begun < SECONDS:
        for each in rng.sample(range(SESSIONS), rng.choice([1, 2, 8])):
            talk.check(llm, [(each, turns[each])])
            turns[each] = (turns[each] + 1) % 8
        name = f"session {rng.randrange(6)}"
        llm.generate([talk.prompt(rng.randrange(SESSIONS))], greedy(6), session_id=name)
        if rng.random() < 0.3:
            llm.sessions.save(name)
        if rng.random() < 0.2:
            llm.sessions.delete(name)
        if master is not None and rounds % 40 == 39:
            master.kill()
            talk.check(llm, [(rng.randrange(SESSIONS), 0)])
            master.start()
        check_idle(llm)
        rounds += 1
        files.append(sum(1 for path in tmp_path.rglob("*") if path.is_file()))
        memory.append(resident_mb())
    stats = llm.stats()
    assert stats["kv_host.bytes"] <= 3 * session
    assert stats["kv_disk.bytes"] <= 6 * session
    assert stats["kv_in_flight_bytes"] == 0
    assert max(files) <= 2 * max(files[: rounds // 2]) + 8
    half = len(memory) // 2
    assert min(memory[half:]) < max(memory[:half]) + 64, f"from {memory[half // 2]:.0f} to {memory[-1]:.0f} MB"
    llm.close()
    if master is not None:
        master.kill()
    assert not list(tmp_path.rglob("*.part"))
    print(f"{rounds} rounds, {memory[half // 2]:.0f} to {memory[-1]:.0f} MB resident")
