"""The host's work for a step: in proportion to the requests that run, whatever their contexts, and nothing piles up."""

import cProfile

import jax
import pytest

from tests.engine.helpers import check_idle
from trillion_infer import SamplingParams
from trillion_infer.benchmark.host import full_generator
from trillion_infer.engine.memory import resident


def calls_of_a_step(running: int, context: int, steps: int = 20) -> float:
    """Python and C calls of a decode step, in the mean: work without a clock."""
    generator = full_generator(running, context, steps)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        generator.step()
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats()) / steps


def test_a_step_costs_the_same_whatever_the_context():
    short, long = calls_of_a_step(16, 100), calls_of_a_step(16, 6000)
    assert abs(long - short) < 0.02 * short


def test_a_step_costs_in_proportion_to_what_runs():
    """At most 60 calls a request, beside what a step costs at all."""
    few, many = calls_of_a_step(8, 100), calls_of_a_step(64, 100)
    assert (many - few) / 56 < 60


def test_a_step_of_decoding_moves_one_array_each_way(make_llm, monkeypatch):
    """The packed batch travels with the call; only sampled ids come back."""
    llm = make_llm("smollm2", page_size=8)
    sent: list[object] = []
    place = type(llm.engine.programs).place
    monkeypatch.setattr(type(llm.engine.programs), "place", lambda *a: (sent.append(a), place(*a))[1])
    llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=4))
    sent.clear()
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *a, **k: (sent.append(a), put(*a, **k))[1])
    llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert sent == []


@pytest.mark.slow
def test_10000_steps_compile_nothing_and_keep_memory_flat(make_llm):
    llm = make_llm("smollm2", page_size=8, max_running=4)
    params = SamplingParams(temperature=0.8, max_tokens=100, ignore_eos=True)
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def run_to(steps: int) -> int:
        number = 0
        while llm.engine.steps < steps:
            number += 1
            llm.generate([[number % 100 + 4, place + 4, number // 100 + 4] for place in range(4)], params)
        return resident() or 0

    start = llm.engine.steps
    early = run_to(start + 2_000)
    before = llm.stats()["compilations"]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        late = run_to(start + 10_000)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert llm.stats()["compilations"] == before
    assert compiled == []
    assert late - early < 16 * 2**20
    check_idle(llm)
