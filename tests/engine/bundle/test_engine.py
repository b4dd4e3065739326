"""An engine on a bundle answers as one that compiled, without tracing; what does not fit is refused with a reason."""

import json
import shutil
import subprocess
import sys

import jax
import pytest

from tests.engine.helpers import check_idle
from trillion_infer import LLM, SamplingParams
from trillion_infer.engine.bundle import store
from trillion_infer.testing.tiny_models import tiny_config

pytestmark = pytest.mark.matrix

OPTIONS = {"dtype": "float32", "max_running": 2, "prefill_chunk": 32, "kv_memory": 2**20, "compile_cache": ""}
PROMPTS = [[5, 6, 7], list(range(20, 60)), [9] * 12]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8),
    SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.3, logit_bias={5: 2.0}),
]


def answers(llm: LLM) -> list:
    outputs = llm.generate(PROMPTS, PARAMS)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


def reasons(llm: LLM) -> list[str]:
    return llm.engine.programs.source.reasons


class Traces:
    """Counts what JAX traces and compiles."""

    def __enter__(self) -> "Traces":
        self.events: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, seconds: float, **told: object) -> None:
        if event in ("/jax/core/compile/backend_compile_duration", "/jax/core/compile/jaxpr_trace_duration"):
            self.events.append(f"{event} {told.get('fun_name')}")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the bundle of a tiny model, and its answers."""
    root = tmp_path_factory.mktemp("bundles")
    llm = LLM(tiny_config("llama"), bundle=str(root), **OPTIONS)
    llm.wait_for_programs()
    assert llm.stats()["compilations"] == len(llm.engine.programs.names())
    found = answers(llm)
    llm.close()
    return root, found


@pytest.fixture
def copied(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "bundles")
    return tmp_path / "bundles"


def the_folder(root):
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    return folder


def test_a_second_engine_neither_traces_nor_compiles_a_step(made):
    root, expected = made
    llm = LLM(tiny_config("llama"), bundle=str(root), **OPTIONS)
    assert llm.stats()["compilations"] == 0
    with Traces() as traces:
        assert answers(llm) == expected
        for name in llm.engine.programs.names():
            llm.engine.programs.get(name)
    assert traces.events == []
    assert reasons(llm) == []
    check_idle(llm)
    llm.close()


def test_an_engine_on_a_bundle_imports_no_modules_to_trace(made):
    """flax and what it brings take a sixth of a start."""
    code = (
        "import json, sys\n"
        "from trillion_infer import LLM, SamplingParams\n"
        "llm = LLM(*json.loads(sys.argv[1]), **json.loads(sys.argv[2]))\n"
        "llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2))\n"
        "names = ('flax', 'jax.experimental.pallas', 'trillion_infer.layers.decoder')\n"
        "print(llm.stats()['compilations'], [name for name in names if name in sys.modules])"
    )
    options = json.dumps({**OPTIONS, "bundle": str(made[0])})
    told = subprocess.run(
        [sys.executable, "-c", code, json.dumps([tiny_config("llama")]), options],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert told.stdout.strip() == "0 []", told.stderr


def test_without_precompiling_programs_come_from_the_bundle_one_by_one(made):
    root, _ = made
    llm = LLM(tiny_config("llama"), bundle=str(root), precompile=False, **OPTIONS)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3))
    assert llm.stats()["compilations"] == 0
    assert 0 < len(llm.engine.programs.all) < len(llm.engine.programs.names())
    llm.close()


def test_damaged_programs_are_compiled_and_the_bundle_mended(made, copied):
    folder = the_folder(copied)
    flipped, cut, gone = (folder / f"{name}.xla" for name in ("decode_2", "choose_2", "update_tables"))
    whole = flipped.read_bytes()
    flipped.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    llm = LLM(tiny_config("llama"), bundle=str(copied), **OPTIONS)
    llm.wait_for_programs()
    told = {"decode_2": "is damaged", "choose_2": "is damaged", "update_tables": "cannot be read"}
    assert len(reasons(llm)) == 3
    for name, why in told.items():
        assert any(reason.startswith(f"{name} is compiled: {name}.xla {why}") for reason in reasons(llm))
    assert llm.stats()["compilations"] == 3
    assert answers(llm) == made[1]
    llm.close()
    again = LLM(tiny_config("llama"), bundle=str(copied), **OPTIONS)
    assert again.stats()["compilations"] == 0
    assert answers(again) == made[1]
    again.close()


def test_a_damaged_manifest_is_refused_with_its_reason(copied):
    manifest = the_folder(copied) / store.MANIFEST
    text = bytearray(manifest.read_bytes())
    text[len(text) // 2] ^= 1
    manifest.write_bytes(text)
    llm = LLM(tiny_config("llama"), bundle=str(copied), precompile=False, **OPTIONS)
    assert "is refused: its manifest is damaged" in reasons(llm)[0]
    llm.close()


def forge(root, change) -> None:
    """Alters the manifest as somebody would who also fixes its digest."""
    manifest = the_folder(root) / store.MANIFEST
    body = json.loads(manifest.read_text())["body"]
    change(body)
    text = json.dumps(body, sort_keys=True).encode()
    manifest.write_text(json.dumps({"sha256": store.sha256(text), "body": body}))


def test_another_machines_bundle_under_our_name_is_refused(copied):
    forge(copied, lambda body: body["identity"]["host"].update(cpu="another"))
    llm = LLM(tiny_config("llama"), bundle=str(copied), precompile=False, **OPTIONS)
    assert "is refused: its manifest is another deployment's" in reasons(llm)[0]
    llm.close()


def test_a_program_for_other_arguments_is_not_run(made, copied):
    def swap(body):
        programs = body["programs"]
        programs["decode_1"] = programs["decode_2"]

    forge(copied, swap)
    llm = LLM(tiny_config("llama"), bundle=str(copied), **OPTIONS)
    assert answers(llm) == made[1]  # what a first request does not take is loaded behind the engine
    llm.engine.programs.get("decode_1")
    assert reasons(llm) == ["decode_1 is compiled: it was compiled for other arguments"]
    llm.close()


def test_what_differs_from_the_closest_bundle_is_said(copied, monkeypatch):
    from trillion_infer.engine.bundle import identity

    monkeypatch.setattr(identity, "code_digest", lambda: "newer code")
    llm = LLM(tiny_config("llama"), bundle=str(copied), precompile=False, **OPTIONS)
    assert reasons(llm) == [f"{copied} holds no bundle that fits; the closest one differs in code"]
    llm.close()


def test_bundles_of_a_mesh(tmp_path):
    options = {**OPTIONS, "max_running": 1, "mesh": "data=2,tensor=2", "speculate": "ngram", "bundle": str(tmp_path)}
    first = LLM(tiny_config("qwen3_moe"), **options)
    first.wait_for_programs()
    expected = answers(first)
    first.close()
    second = LLM(tiny_config("qwen3_moe"), **options)
    assert second.stats()["compilations"] == 0
    assert answers(second) == expected
    check_idle(second)
    second.close()


def test_what_xlas_cache_gave_is_not_bundled(tmp_path):
    """Such programs lose their functions when they are serialised again; an engine with both compiles anew."""
    cache, bundles = str(tmp_path / "xla"), tmp_path / "bundles"
    options = {**OPTIONS, "compile_cache": cache}
    previous = jax.config.jax_compilation_cache_dir
    try:
        for folder in ("", str(bundles)):
            llm = LLM(tiny_config("llama"), bundle=folder, **options)
            llm.wait_for_programs()
            llm.close()
        llm = LLM(tiny_config("llama"), bundle=str(bundles), **options)
    finally:
        jax.config.update("jax_compilation_cache_dir", previous)
    assert llm.stats()["compilations"] == 0
    assert len(answers(llm)) == len(PROMPTS)
    llm.close()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    llm = LLM(tiny_config("llama"), bundle=str(tmp_path / "file" / "below"), precompile=False, **OPTIONS)
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=1))[0].finished
    llm.close()
