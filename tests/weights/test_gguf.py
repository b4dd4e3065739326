"""A GGUF reads as the Hugging Face checkpoint that it was made from."""

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.core.errors import ModelLoadError, UnsupportedModelError
from trillion_infer.testing.checkpoints import write_gguf
from trillion_infer.weights import open_checkpoint
from trillion_infer.weights.fetch import fetch_gemma3_270m
from trillion_infer.weights.gguf_file import GGUFFile

GOLDEN = Path(__file__).parent / "golden"
M, F, V, D, H, K = 64, 96, 32, 16, 4, 2
METADATA = {
    "block_count": 1,
    "embedding_length": M,
    "feed_forward_length": F,
    "context_length": 128,
    "attention.head_count": H,
    "attention.head_count_kv": K,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": D,
    "rope.freq_base": 5e5,
    "vocab_size": V,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(V)],
}


def llama_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (V, M),
        "output_norm": (M,),
        "blk.0.attn_norm": (M,),
        "blk.0.ffn_norm": (M,),
        "blk.0.attn_q": (H * D, M),
        "blk.0.attn_k": (K * D, M),
        "blk.0.attn_v": (K * D, M),
        "blk.0.attn_output": (M, H * D),
        "blk.0.ffn_gate": (F, M),
        "blk.0.ffn_up": (F, M),
        "blk.0.ffn_down": (M, F),
    }
    return {f"{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of Llama's query and key heads."""
    return w.reshape(heads, 2, D // 2, -1).swapaxes(1, 2).reshape(w.shape)


def write(path: Path, arch="llama", tensors=None, metadata=None, **kwargs) -> Path:
    return write_gguf(path / "m.gguf", tensors or llama_tensors(), arch, METADATA | (metadata or {}), **kwargs)


def test_llama_query_and_key_rows_come_back_in_order(tmp_path):
    hf = llama_tensors()
    stored = hf | {
        "blk.0.attn_q.weight": interleave(hf["blk.0.attn_q.weight"], H),
        "blk.0.attn_k.weight": interleave(hf["blk.0.attn_k.weight"], K),
    }
    checkpoint = open_checkpoint(write(tmp_path, tensors=stored))
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    for name, short in names.items():
        np.testing.assert_array_equal(
            checkpoint.read(f"model.layers.0.self_attn.{name}.weight"), hf[f"blk.0.{short}.weight"]
        )


@given(first=st.integers(0, K * D - 1), count=st.integers(1, K * D))
def test_rows_decode_as_rows_of_the_whole(tmp_path_factory, first, count):
    qtypes = {"blk.0.attn_k.weight": Q.Q4_1}
    checkpoint = open_checkpoint(write(tmp_path_factory.mktemp("g"), qtypes=qtypes))
    name = "model.layers.0.self_attn.k_proj.weight"
    whole = checkpoint.read(name)
    rows = slice(first, min(first + count, K * D))
    out = np.empty(whole[rows].shape[::-1], np.float32).T  # not contiguous
    checkpoint.decode(name, rows, out)
    np.testing.assert_array_equal(out, whole[rows])


def test_bfloat16_is_the_rounded_float32(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path, qtypes={"token_embd.weight": Q.Q8_0}))
    name, bf16 = "model.embed_tokens.weight", np.dtype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(checkpoint.read(name, bf16), checkpoint.read(name).astype(bf16))


def test_raw_blocks_decode_to_what_read_returns(tmp_path):
    from gguf.quants import dequantize

    checkpoint = open_checkpoint(write(tmp_path, qtypes={"blk.0.attn_q.weight": Q.Q4_0}))
    name = "model.layers.0.self_attn.q_proj.weight"
    qtype, blocks = checkpoint.read_raw(name)
    np.testing.assert_array_equal(dequantize(blocks, Q[qtype]), checkpoint.read(name))


def test_config_is_spelled_as_hugging_face_does(tmp_path):
    config = open_checkpoint(write(tmp_path)).config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["head_dim"] == D
    assert config["tie_word_embeddings"] is True
    assert config["rope_scaling"] is None


def test_an_output_matrix_means_untied(tmp_path):
    tensors = llama_tensors() | {"output.weight": np.ones((V, M), np.float32)}
    checkpoint = open_checkpoint(write(tmp_path, tensors=tensors))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in checkpoint.names()


def test_llama3_rope_is_recognised_from_its_divisors(tmp_path):
    turns = 8192 * 5e5 ** (-np.arange(0, D, 2) / D) / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / (smooth + (1 - smooth) / 32)).astype(np.float32)
    scaling = open_checkpoint(write(tmp_path, tensors=llama_tensors() | {"rope_freqs.weight": factors})).config[
        "rope_scaling"
    ]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == 32


def test_other_rope_divisors_are_refused(tmp_path):
    factors = np.linspace(1, 3, D // 2).astype(np.float32)
    path = write(tmp_path, tensors=llama_tensors() | {"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"attention.clamp_kqv": 3.0}, r"nobody handles: llama\.attention\.clamp_kqv"),
        ({"expert_count": 8}, r"llama\.expert_count"),
        ({"attention.key_length": 32}, "must agree"),
        ({"split.count": 3}, "split GGUF"),
        ({"attention.sliding_window": 64}, "sliding_window"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, metadata, message):
    path = write(tmp_path, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(path)


def test_unknown_architecture_is_named_with_the_known_ones(tmp_path):
    path = write(tmp_path, arch="mamba")
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*gemma3, llama, qwen2, qwen3"):
        open_checkpoint(path)


def test_unknown_tensors_are_named(tmp_path):
    path = write(tmp_path, tensors=llama_tensors() | {"blk.0.ssm_a.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ssm_a\.weight"):
        open_checkpoint(path)


@given(st.data())
def test_a_truncated_file_is_named_whatever_its_length(tmp_path_factory, data):
    path = write(tmp_path_factory.mktemp("g"))
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 64))])
    with pytest.raises(ModelLoadError, match=r"m\.gguf"):
        open_checkpoint(path)


@given(st.data())
def test_damaged_headers_end_in_the_typed_error_or_a_readable_file(tmp_path_factory, data):
    path = write(tmp_path_factory.mktemp("g"))
    content = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, 2000), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        file = GGUFFile(path)
    except ModelLoadError:
        return
    assert all(t.end <= len(content) for t in file.tensors.values())


def matches_golden(path, name: str) -> None:
    golden, checkpoint = json.loads((GOLDEN / f"{name}.json").read_text()), open_checkpoint(path)
    expected = golden["config"]
    rope = expected.pop("rope_parameters")
    for key, value in expected.items():
        assert checkpoint.config[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert checkpoint.config["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]
    assert set(checkpoint.names()) == set(golden["tensors"])
    for tensor, (shape, digest) in golden["tensors"].items():
        assert list(checkpoint.shape(tensor)) == shape
        value = checkpoint.read(tensor, np.dtype(np.float32))
        assert hashlib.sha256(value.tobytes()).hexdigest()[:16] == digest, tensor


def test_smollm2_equals_transformers_reading_bit_for_bit(smollm2_path):
    matches_golden(smollm2_path, "smollm2")


@pytest.mark.slow
def test_gemma3_equals_transformers_reading_bit_for_bit():
    matches_golden(fetch_gemma3_270m(), "gemma3_270m")
