"""One clear typed error each; other requests finish; no page leaks."""

import gc
import json

import numpy as np
import pytest

from pallas_kernels.cpu_native import native
from tests.conftest import GOLDEN
from tests.engine.helpers import check_idle, greedy, tokens_of
from trillion_infer import LLM, ConfigError, InvalidRequestError, ModelLoadError, OutOfMemoryError, SamplingParams
from trillion_infer.core.errors import UnsupportedModelError

pytestmark = pytest.mark.smoke

TINY = GOLDEN / "tiny" / "smollm2"


@pytest.fixture(scope="module")
def llm(make_llm):
    return make_llm("smollm2", page_size=8, prefill_chunk=16)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty after tokenisation"),
        ([5, 128], r"holds 128; token ids are whole numbers in \[0, 128\)"),
        ([-1], "holds -1"),
        ([2**63], "holds 9223372036854775808"),
        ([1.5], "holds 1.5"),
        ({"prompt_token_ids": [5], "prompt": "x"}, "exactly one of prompt and prompt_token_ids"),
        ("text", "no tokenizer"),
    ],
)
def test_prompts_are_checked_on_the_host_u07_u13(llm, prompt, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate([prompt] if isinstance(prompt, list) else prompt, greedy(2))
    assert tokens_of(llm.generate([5, 6], greedy(2)))
    check_idle(llm)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_stream_that_is_refused_leaves_nothing_behind(llm):
    """Not even an object whose end would fail."""
    with pytest.raises(InvalidRequestError, match="holds 128"):
        llm.stream([5, 128], greedy(2))
    gc.collect()
    check_idle(llm)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_over_long_requests_name_the_three_numbers_u12(llm, extra):
    limit = llm.max_model_len
    with pytest.raises(ValueError, match=f"{limit + extra} tokens and 5 new tokens.*holds {limit}"):
        llm.generate([5] * (limit + extra), greedy(5))
    assert len(tokens_of(llm.generate([5] * 10, greedy(3)))[0]) == 3
    check_idle(llm)


def test_no_max_tokens_means_to_the_end_of_the_context_u09(llm):
    room = llm.max_model_len - 250
    output = llm.generate([7] * 250, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert output.max_tokens == room
    assert len(output.outputs[0].token_ids) == room


def test_stop_ids_outside_the_vocabulary_harm_nobody_u15(llm):
    alone = tokens_of(llm.generate([5, 6, 7], greedy(6)))
    bad = SamplingParams(stop_token_ids=[133], min_tokens=1)
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids is 133; it must be token ids in \[0, 128\)"):
        llm.generate([[5, 6, 7], [8]], [greedy(6), bad])
    assert tokens_of(llm.generate([5, 6, 7], greedy(6))) == alone


def test_stop_strings_without_a_tokenizer_are_refused_u17(llm):
    with pytest.raises(InvalidRequestError, match="stop strings need text"):
        llm.generate([5, 6], SamplingParams(stop="x"))


def test_generate_each_refuses_one_and_serves_the_rest(llm):
    jobs = [(0, lambda: ([5, 6], greedy(3))), (1, lambda: ([999], greedy(3))), (2, lambda: ([7], greedy(2)))]
    answers = dict(llm.generate_each(jobs))
    assert isinstance(answers[1], InvalidRequestError)
    assert [len(answers[i].outputs[0].token_ids) for i in (0, 2)] == [3, 2]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-9, 0])
def test_tiny_temperatures_are_greedy_u01(llm, temperature):
    expected = tokens_of(llm.generate([5, 9, 17], greedy(7)))
    params = SamplingParams(temperature=temperature, max_tokens=7, ignore_eos=True)
    assert tokens_of(llm.generate([5, 9, 17], params)) == expected


@pytest.mark.parametrize("top_k", [None, 0, -1])
def test_top_k_off_leaves_samples_different_u02(llm, top_k):
    params = SamplingParams(temperature=1.0, top_k=top_k, n=20, max_tokens=6, ignore_eos=True)
    output = llm.generate([5, 6], params)[0]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 10


def test_top_k_one_is_greedy_u02(llm):
    params = SamplingParams(temperature=1.0, top_k=1, max_tokens=6, ignore_eos=True)
    assert tokens_of(llm.generate([5, 6], params)) == tokens_of(llm.generate([5, 6], greedy(6)))


def test_logprobs_are_valid_json_u24(llm):
    params = greedy(4, logprobs=5, prompt_logprobs=5, top_k=1, logit_bias={5: -100.0})
    output = llm.generate([5, 6, 7], params)[0]
    values = [lp.logprob for entry in output.outputs[0].logprobs for lp in entry.values()]
    json.dumps(values, allow_nan=False)
    assert all(np.isfinite(values))


def test_abort_in_flight_returns_every_page_u45(llm):
    llm.generator.add("a", [5] * 60, greedy(100))
    llm.generator.add("b", [6] * 5, greedy(8))
    for _ in range(4):
        llm.generator.step()
    llm.generator.abort("a")
    while llm.generator.has_work:
        llm.generator.step()
    assert llm.generator.take("a").outputs[0].finish_reason == "abort"
    assert len(llm.generator.take("b").outputs[0].token_ids) == 8
    check_idle(llm)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": "tensor=16"}, ConfigError, "needs 16 devices; there are 8"),
        ({"mesh": "tensor"}, ConfigError, "not of the form axis=size"),
        ({"mesh": "heads=2"}, ConfigError, "axis 'heads' is unknown"),
        ({"mesh": "expert=2"}, ConfigError, "has no experts"),
        ({"dtype": "int3"}, ConfigError, "dtype is 'int3'; it must be one of"),
        ({"kv_memory": 10}, OutOfMemoryError, "the KV budget is 10 bytes.*Not even one request of.*Raise kv_memory"),
        ({"kv_memory": float("nan")}, ConfigError, "kv_memory"),
        ({"max_model_len": 10**9}, ConfigError, "the model's positions end at"),
        ({"max_running": 0}, ConfigError, "max_running is 0"),
        ({"page_size": 7}, ConfigError, "page_size is 7"),
        ({"config": "nothing"}, ConfigError, "'nothing' is not in configs/"),
    ],
)
def test_options_are_refused_before_loading(options, error, message):
    with pytest.raises(error, match=message):
        LLM(TINY, **options)


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="no_such"):
        LLM(TINY, no_such=1)


def _copy(tmp_path, **changes):
    """The tiny model with its config changed."""
    config = json.loads((TINY / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(TINY / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Nonesuch"]}, "architecture Nonesuch is not implemented; implemented: "),
        ({"surprise": 3}, "does not handle: surprise=3"),
        ({"hidden_act": "relu"}, "sets hidden_act to 'relu'; implemented: 'silu'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope_scaling is of type 'longrope'"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "spin": 1}}, "spin=1"),
    ],
)
def test_configs_that_differ_from_what_is_implemented_are_refused_by_name_u53(tmp_path, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        LLM(_copy(tmp_path, **changes))


def test_a_truncated_checkpoint_is_named(tmp_path):
    folder = _copy(tmp_path)
    data = (TINY / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        LLM(folder)


def test_no_such_model_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match="nowhere"):
        LLM(tmp_path / "nowhere")


def test_an_instruction_set_that_is_not_here_is_refused():
    missing = next(isa for isa in ("neon", "avx2") if isa not in native().isas)
    with pytest.raises(
        ConfigError, match=f"cpu_isa is '{missing}', which cannot run here; this processor .* have auto"
    ):
        LLM(TINY, cpu_isa=missing)
