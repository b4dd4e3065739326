import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.core.errors import InvalidRequestError, ModelLoadError
from trillion_infer.text import Tokenizer
from trillion_infer.text.gguf_metadata import read_gguf_metadata
from trillion_infer.text.pretokenizers import SPLITTINGS

GOLDEN = json.loads((Path(__file__).parent / "golden_ids.json").read_text())


def check_golden(tokenizer: Tokenizer, name: str) -> None:
    golden = GOLDEN[name]
    for index, text in enumerate(GOLDEN["texts"]):
        ids = golden["plain"][index]
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == golden["wrapped"][index], text
        assert tokenizer.decode(ids, skip_special_tokens=False) == golden["decoded"][index], text
        assert tokenizer.decode(ids) == golden["decoded_clean"][index], text


def test_smollm2_ids_and_texts_equal_transformers(smollm2_tokenizer):
    check_golden(smollm2_tokenizer, "smollm2")


@pytest.mark.slow
def test_gemma3_ids_and_texts_equal_transformers(gemma3_tokenizer):
    check_golden(gemma3_tokenizer, "gemma3")


def test_smollm2_special_tokens_come_from_the_file(smollm2_tokenizer):
    assert smollm2_tokenizer.bos_id == 1
    assert smollm2_tokenizer.eos_ids == {2}
    assert smollm2_tokenizer.special_ids == set(range(17))
    assert smollm2_tokenizer.added_tokens["<|im_start|>"] == 1
    assert smollm2_tokenizer.vocab_size == 49152
    assert "<|im_start|>" in smollm2_tokenizer.chat_template


@given(text=st.text())
def test_byte_level_round_trip(byte_tokenizer, text):
    ids = byte_tokenizer.encode(text)
    assert byte_tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|>" + text


@given(text=st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_sentencepiece_round_trip(sentencepiece_tokenizer, text):
    assert sentencepiece_tokenizer.decode(sentencepiece_tokenizer.encode(text)) == text


@given(text=st.text())
def test_decode_equals_the_tokenizers_package(byte_tokenizer, text):
    ids = byte_tokenizer.encode(text)
    for skip in (False, True):
        assert byte_tokenizer.decode(ids, skip) == byte_tokenizer.backend.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(-5, 400)))
def test_byte_level_decode_of_any_ids_equals_the_tokenizers_package(byte_tokenizer, ids):
    inside = [id for id in ids if 0 <= id < byte_tokenizer.vocab_size]
    assert byte_tokenizer.decode(ids) == byte_tokenizer.backend.decode(inside, skip_special_tokens=True)


def test_bos_is_never_doubled(byte_tokenizer):
    bos = byte_tokenizer.bos_id
    assert byte_tokenizer.encode("the") == byte_tokenizer.encode("<|bos|>the")
    assert byte_tokenizer.encode("the")[0] == bos
    assert byte_tokenizer.encode("<|bos|>") == [bos]
    assert byte_tokenizer.encode("the", add_special_tokens=False)[0] != bos


@pytest.mark.parametrize("id", [-1, 265, 10**6, 2**63])
def test_u26_an_id_outside_the_vocabulary_decodes_to_nothing(byte_tokenizer, id):
    assert byte_tokenizer.decode([id]) == ""
    assert byte_tokenizer.decode([id], skip_special_tokens=False) == ""
    assert byte_tokenizer.id_to_piece(id) is None


def test_numpy_ids_decode(byte_tokenizer):
    assert byte_tokenizer.decode(np.array(byte_tokenizer.encode("the end"), np.int32)) == "the end"


@pytest.mark.parametrize("text", ["a\ud800b", b"bytes", None])
def test_what_is_no_text_is_refused(byte_tokenizer, text):
    with pytest.raises(InvalidRequestError, match="valid Unicode"):
        byte_tokenizer.encode(text)


def test_llama_spaces(sentencepiece_tokenizer):
    pieces = [sentencepiece_tokenizer.id_to_piece(id) for id in sentencepiece_tokenizer.encode("the hello é")]
    assert pieces == ["<s>", "▁the", "▁hello", "▁", "é"]
    ids = sentencepiece_tokenizer.encode("the", add_special_tokens=False)
    assert sentencepiece_tokenizer.decode(ids) == "the"
    assert sentencepiece_tokenizer.decode(ids, continuation=True) == " the"


def test_turn_ends_written_by_the_chat_template_are_eos(byte_metadata):
    metadata = {**byte_metadata, "tokenizer.ggml.eos_token_id": 0}
    end = byte_metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    assert Tokenizer.from_gguf(metadata).eos_ids == {0, end}
    assert Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": ""}).eos_ids == {0}
    assert Tokenizer.from_gguf({**metadata, "tokenizer.ggml.eot_token_id": 7}).eos_ids == {0, 7, end}


@pytest.mark.parametrize("name", sorted(SPLITTINGS))
def test_every_splitting_compiles_and_keeps_the_text(byte_metadata, name):
    tokenizer = Tokenizer.from_gguf({**byte_metadata, "tokenizer.ggml.pre": name})
    text = "It's  12345 日本語 カナ the\n\n  x+=1; THE'LL é 안녕 👍"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", "  ", " ab"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", "  ", " ab"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", "  ", " ab"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", "  ", " ab"]),
        ("deepseek-v3", ["It", "'s", " ", "123", "45", "  ", " ab"]),
        ("gpt-4o", ["It's", " ", "123", "45", "  ", " ab"]),
        ("kimi-k2", ["It's", " ", "123", "45", "  ", " ab"]),
    ],
)
def test_splitting_of_digits_contractions_and_spaces(name, expected):
    words = SPLITTINGS[name].pre_tokenizer().pre_tokenize_str("It's 12345   ab")
    assert [word.replace("Ġ", " ") for word, _ in words] == expected


def test_an_unknown_splitting_is_named(byte_metadata):
    with pytest.raises(ModelLoadError, match=r"'martian'.*tokenizer.ggml.pre"):
        Tokenizer.from_gguf({**byte_metadata, "tokenizer.ggml.pre": "martian"})


def test_an_unknown_kind_is_named(byte_metadata):
    with pytest.raises(ModelLoadError, match="'bert'"):
        Tokenizer.from_gguf({**byte_metadata, "tokenizer.ggml.model": "bert"})


@pytest.mark.parametrize("key", ["model", "tokens", "merges", "token_type", "pre"])
def test_a_missing_key_is_named(byte_metadata, key):
    metadata = {k: v for k, v in byte_metadata.items() if k != f"tokenizer.ggml.{key}"}
    with pytest.raises(ModelLoadError, match=f"tokenizer.ggml.{key}"):
        Tokenizer.from_gguf(metadata)


def test_metadata_of_a_file_equals_the_gguf_package(smollm2_path):
    from gguf import GGUFReader

    ours = read_gguf_metadata(smollm2_path)
    theirs = {k: v for k, v in GGUFReader(smollm2_path).fields.items() if not k.startswith("GGUF.")}
    assert ours.keys() == theirs.keys()
    for key, field in theirs.items():
        value = ours[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key


@pytest.mark.parametrize("size", [0, 3, 24, 100, 5000, 400_000])
def test_a_truncated_file_is_refused(smollm2_path, tmp_path, size):
    path = tmp_path / "cut.gguf"
    path.write_bytes(Path(smollm2_path).read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"bytes, too few|truncated or damaged"):
        read_gguf_metadata(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK" * 100)
    with pytest.raises(ModelLoadError, match="magic"):
        read_gguf_metadata(path)
    with pytest.raises(ModelLoadError, match="no GGUF file"):
        read_gguf_metadata(tmp_path / "absent.gguf")
