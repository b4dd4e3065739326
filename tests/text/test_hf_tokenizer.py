import json

import pytest

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.text import Tokenizer


@pytest.fixture
def directory(byte_tokenizer, tmp_path):
    """A model directory as Hugging Face lays it out, EOS ids spread over three files."""
    byte_tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", bos_token="<|bos|>", eos_token={"content": "<|im_end|>"})
    write(tmp_path, "config.json", eos_token_id=5)
    write(tmp_path, "generation_config.json", eos_token_id=[6, 7])
    return tmp_path


def write(directory, name, **content):
    path = directory / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **content}))


def test_same_ids_as_the_gguf_file(directory, byte_tokenizer):
    text = "<|im_start|>the é  end<|im_end|>"
    loaded = Tokenizer.from_hf(directory)
    assert loaded.encode(text) == byte_tokenizer.encode(text)
    assert loaded.special_ids == byte_tokenizer.special_ids
    assert loaded.bos_id == byte_tokenizer.bos_id


def test_u35_eos_is_the_union_of_every_source(directory, byte_tokenizer):
    end = byte_tokenizer.added_tokens["<|im_end|>"]
    assert Tokenizer.from_hf(directory).eos_ids == {5, 6, 7, end}
    write(directory, "config.json", eos_token_id=None, text_config={"eos_token_id": 9})
    assert Tokenizer.from_hf(directory).eos_ids == {9, 6, 7, end}


def test_truncation_and_padding_left_in_the_file_are_ignored(directory, byte_tokenizer):
    stored = Tokenizer.from_hf(directory).backend
    stored.enable_truncation(4)
    stored.enable_padding(length=50)
    stored.save(str(directory / "tokenizer.json"))
    text = "much longer than four tokens"
    assert Tokenizer.from_hf(directory).encode(text) == byte_tokenizer.encode(text)


def test_chat_template_files_in_order_of_precedence(directory):
    assert Tokenizer.from_hf(directory).chat_template is None
    write(directory, "tokenizer_config.json", chat_template=[{"name": "x", "template": "1"}])
    assert Tokenizer.from_hf(directory).chat_template == "1"
    write(
        directory,
        "tokenizer_config.json",
        chat_template=[{"name": "rag", "template": "1"}, {"name": "default", "template": "2"}],
    )
    assert Tokenizer.from_hf(directory).chat_template == "2"
    write(directory, "chat_template.json", chat_template="3")
    assert Tokenizer.from_hf(directory).chat_template == "3"
    (directory / "chat_template.jinja").write_text("4")
    assert Tokenizer.from_hf(directory).chat_template == "4"


@pytest.mark.parametrize("wanted", [True, False])
def test_an_explicit_add_bos_token_decides(directory, wanted):
    write(directory, "tokenizer_config.json", add_bos_token=wanted)
    tokenizer = Tokenizer.from_hf(directory)
    assert (tokenizer.encode("the")[0] == tokenizer.bos_id) is wanted


def test_special_tokens_map_names_what_the_config_does_not(directory):
    (directory / "tokenizer_config.json").write_text("{}")
    write(directory, "special_tokens_map.json", eos_token="<|im_start|>")
    tokenizer = Tokenizer.from_hf(directory)
    assert tokenizer.added_tokens["<|im_start|>"] in tokenizer.eos_ids
    assert tokenizer.template_variables == {"eos_token": "<|im_start|>"}


def test_a_token_only_the_config_declares_is_added(directory, byte_tokenizer):
    next_id = byte_tokenizer.vocab_size
    write(
        directory, "tokenizer_config.json", added_tokens_decoder={str(next_id): {"content": "<new>", "special": True}}
    )
    tokenizer = Tokenizer.from_hf(directory)
    assert tokenizer.encode("<new>", add_special_tokens=False) == [next_id]
    assert next_id in tokenizer.special_ids


def test_a_declared_token_with_another_id_is_refused(directory):
    write(directory, "tokenizer_config.json", added_tokens_decoder={"9999": {"content": "<new>"}})
    with pytest.raises(ModelLoadError, match="'<new>' the id 9999"):
        Tokenizer.from_hf(directory)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match="not a directory"):
        Tokenizer.from_hf(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").write_text("")
    with pytest.raises(ModelLoadError, match=r"no tokenizer.json \(found: tokenizer.model\)"):
        Tokenizer.from_hf(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_damaged_file_is_named(directory, name):
    (directory / name).write_text('{"cut')
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_hf(directory)


def test_a_word_piece_tokenizer_is_refused(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer.from_hf(tmp_path)
