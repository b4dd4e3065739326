"""An engine that answers while the rest of its programs is compiled: same tokens, no waiting, a whole bundle, a clean
end at any time."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.engine.helpers import check_idle, greedy, tokens_of
from trillion_infer import LLM, SamplingParams
from trillion_infer.engine import programs
from trillion_infer.engine.behind import Behind
from trillion_infer.engine.bundle import store
from trillion_infer.testing.tiny_models import tiny_config

OPTIONS = {"dtype": "float32", "max_running": 2, "prefill_chunk": 48, "kv_memory": 2**21, "compile_cache": ""}
MANY = {"max_running": 17}
"""More than the first step with prefill has rows."""

PROMPTS = [[5, 6, 7] * 30, *([number, 9, 8] * number for number in range(4, 22))]
PARAMS = [greedy(12), *(SamplingParams(temperature=0.7, seed=n, max_tokens=4 + n, top_p=0.9) for n in range(18))]


@pytest.fixture
def held(monkeypatch):
    """Compilations behind an engine begin when this event is set."""
    event, compile_now = threading.Event(), programs.compile_program

    def compile_later(*args):
        if threading.current_thread().name.endswith("-behind"):
            assert event.wait(300)
        return compile_now(*args)

    monkeypatch.setattr(programs, "compile_program", compile_later)
    yield event
    event.set()


def test_what_is_compiled_behind_changes_no_token_and_delays_no_step(tmp_path, held):
    options = {**OPTIONS, **MANY, "bundle": str(tmp_path)}
    llm = LLM(tiny_config("llama"), **options)
    first = llm.stats()
    assert first["compilations"] == len(llm.engine.programs.names()) > first["programs_coming"] > 0
    early = tokens_of(llm.generate(PROMPTS, PARAMS))
    assert llm.stats()["programs_coming"] == first["programs_coming"], "a step needed a program that was not there"
    held.set()
    llm.wait_for_programs()
    assert llm.stats()["compilations"] == len(llm.engine.programs.names())
    assert tokens_of(llm.generate(PROMPTS, PARAMS)) == early
    assert llm.stats()["compilations"] == len(llm.engine.programs.names())
    check_idle(llm)
    llm.close()
    again = LLM(tiny_config("llama"), **options)
    again.wait_for_programs()
    assert again.stats()["compilations"] == 0, "the bundle lacks what was compiled behind"
    again.close()


def test_without_chunks_the_first_programs_hold_whole_prompts(held):
    llm = LLM(tiny_config("llama"), bundle="", chunked_prefill=False, max_model_len=120, **OPTIONS)
    first = llm.stats()["programs_coming"]
    assert len(llm.generate([list(range(4, 104))], greedy(4))[0].outputs[0].token_ids) == 4
    assert llm.stats()["programs_coming"] == first > 0
    held.set()
    llm.close()


def test_with_drafts_all_is_compiled_before_the_engine_is_ready(held):
    few = {**OPTIONS, "max_running": 1, "prefill_chunk": 16, "draft_len": 1}
    llm = LLM(tiny_config("llama"), bundle="", speculate="ngram", **few)
    assert llm.stats()["programs_coming"] == 0
    assert {program.name for program in llm.engine.programs.all} == set(llm.engine.programs.names())
    llm.close()


def stored_programs(root: Path) -> set[str]:
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    bundle = store.read(folder)
    return {name for name in bundle.programs if bundle.payload(name)}


def test_an_engine_that_ends_early_leaves_what_it_compiled(tmp_path):
    """By `close` or with its process, without compiling on."""
    code = (
        "import sys\n"
        "from trillion_infer import LLM\n"
        "from trillion_infer.testing.tiny_models import tiny_config\n"
        f"llm = LLM(tiny_config('llama'), bundle=sys.argv[1], **{OPTIONS})\n"
        "print(llm.generate([[5, 6, 7]])[0].finished, llm.engine.programs.coming == frozenset())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=200, check=True
    )
    assert ended.stdout.strip() == "True False", ended.stderr
    left = stored_programs(tmp_path)
    llm = LLM(tiny_config("llama"), bundle=str(tmp_path), **OPTIONS)
    assert {"choose_2", "mixed_32x2", "make_pools"} <= left < set(llm.engine.programs.names())
    assert {program.name for program in llm.engine.programs.all if program.loaded} == left
    llm.close()
    assert left <= stored_programs(tmp_path)


def test_what_fails_behind_is_left_to_who_needs_it(caplog):
    made, ended = [], []

    def make(name: str) -> None:
        if name == "bad":
            raise ValueError("no such program")
        made.append(name)

    behind = Behind(["bad", "good"], make, lambda: ended.append(True))
    behind.start()
    behind.need("bad")
    behind.wait()
    assert (made, ended, behind.left) == (["good"], [True], frozenset())
    assert "bad failed behind the engine" in caplog.text


def test_what_is_needed_before_its_turn_is_made_once_by_who_needs_it():
    begun, go, made, made_at_end = threading.Event(), threading.Event(), [], []

    def make(name: str) -> None:
        made.append((name, threading.current_thread() is threading.main_thread()))
        begun.set()
        assert name == "second" or go.wait(60)

    behind = Behind(["first", "second", "third"], make, lambda: made_at_end.extend(made))
    behind.start()
    assert begun.wait(60)
    behind.need("second")
    assert behind.left == {"first", "third"}
    go.set()
    behind.wait()
    assert made == made_at_end == [("first", False), ("second", True), ("third", False)]
