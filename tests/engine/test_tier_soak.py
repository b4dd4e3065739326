"""Twenty minutes with everything on: memory flat, no page, file, pin or thread leaked. SOAK_SECONDS shortens a run."""

import os
import random
import re
import threading
import time
from pathlib import Path

import pytest

from tests.engine.helpers import check_idle, greedy
from tests.engine.test_tiers import LONGEST, SESSIONS, Conversations
from trillion_infer.testing.mooncake import Master, master_program

SECONDS = float(os.environ.get("SOAK_SECONDS", "1200"))


def resident_mb() -> float:
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def abort_in_the_middle(llm, prompt: list[int], steps: int) -> None:
    llm.generator.add("left", prompt, greedy(6))
    for _ in range(steps):
        llm.generator.step()
    llm.generator.abort("left")
    llm.generator.take("left")


def tenant_comes_and_goes(llm, prompt: list[int], tenant: str) -> None:
    llm.generator.add("tenant", prompt, greedy(6), cache_salt=tenant)
    while not llm.generator.output("tenant").finished:
        llm.generator.step()
    llm.generator.take("tenant")
    llm.sessions.delete_tenant(tenant)


@pytest.mark.slow
def test_everything_on_for_a_long_time_leaks_nothing_k10(make_llm, tmp_path):
    talk = Conversations(make_llm, "smollm2")
    session = -(-LONGEST // 8) * talk.block_bytes
    master = Master("--default_kv_lease_ttl=100") if master_program() else None
    store = master.url(segment=32 << 20) if master else f"file://{tmp_path}/store?bytes={20 * session}"
    llm = talk.llm(host_kv=3 * session, disk_kv=f"{tmp_path}:{6 * session}", store=store, keep_alive=0.2)
    rng, turns, begun = random.Random(5), [0] * SESSIONS, time.monotonic()
    figures: list[tuple[int, float, int, int]] = []
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
        if rng.random() < 0.3:
            abort_in_the_middle(llm, talk.prompt(rng.randrange(SESSIONS)), rng.randrange(6))
        if rng.random() < 0.2:
            tenant_comes_and_goes(llm, talk.prompt(rng.randrange(SESSIONS)), f"tenant {rng.randrange(3)}")
        if master is not None and len(figures) % 40 == 39:
            master.kill()
            talk.check(llm, [(rng.randrange(SESSIONS), 0)])
            master.start()
        check_idle(llm)
        files = sum(1 for path in tmp_path.rglob("*") if path.is_file())
        figures.append((files, resident_mb(), threading.active_count(), open_files()))
    stats, half = llm.stats(), len(figures) // 2
    print(f"{len(figures)} rounds; files, resident MB, threads, open files at the start, middle and end:")
    print(*(figures[at] for at in (len(figures) // 20, half, -1)), sep="\n")
    print({name: value for name, value in stats.items() if name.startswith("kv_") and value})
    assert stats["kv_host.bytes"] <= 3 * session
    assert stats["kv_disk.bytes"] <= 6 * session
    llm.engine.tiering.stack.flush()
    assert llm.stats()["kv_in_flight_bytes"] == 0
    files, memory, threads, descriptors = zip(*figures, strict=True)
    assert max(files) <= 2 * max(files[:half]) + 8
    assert min(memory[half:]) < max(memory[:half]) + 64
    assert max(threads[half:]) <= max(threads[:half]) + 1
    assert max(descriptors[half:]) <= max(descriptors[:half]) + 8
    for each in llm.sessions.list():
        llm.sessions.delete(each.name)
    groups = llm.engine.schedulers[0].cache.groups
    assert not any(group._pins for group in groups)
    llm.close()
    if master is not None:
        master.kill()
    assert not list(tmp_path.rglob("*.part"))
