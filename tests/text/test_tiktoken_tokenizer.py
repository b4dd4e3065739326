import base64
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.text import Tokenizer

EXTRA = [b"th", b"he", b"the", b" t", b" the", b"aa", b"aaa", "é".encode(), b"in", b"ing", "안".encode()]
RANKS = {data: rank for rank, data in enumerate([bytes([b]) for b in range(256)] + EXTRA)}
FIRST_SPECIAL = len(RANKS)
DECLARED = {
    str(FIRST_SPECIAL): {"content": "[BOS]", "special": True},
    str(FIRST_SPECIAL + 1): {"content": "<|im_end|>", "special": True},
    str(FIRST_SPECIAL + 7): {"content": "<|tool_call_begin|>", "special": False},
}


def write(directory, ranks, **config):
    lines = [base64.b64encode(data) + b" " + str(rank).encode() for data, rank in ranks.items()]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": DECLARED, "eos_token": "<|im_end|>"}
    return Tokenizer.from_hf(write(tmp_path_factory.mktemp("kimi"), RANKS, bos_token="[BOS]", **config))


def merged(word: bytes) -> list[int]:
    """Ids of one word by the definition: the neighbours of lowest rank merge, the leftmost first."""
    parts = [bytes([b]) for b in word]
    while True:
        pairs = [(RANKS[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in RANKS]
        if not pairs:
            return [RANKS[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(word=st.text("thea inga안é", min_size=1, max_size=12).filter(str.isalpha))
def test_a_word_merges_by_rank(tokenizer, word):
    assert tokenizer.encode(word, add_special_tokens=False) == merged(word.encode())


@given(text=st.text())
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_have_the_declared_or_a_reserved_name(tokenizer):
    assert tokenizer.vocab_size == FIRST_SPECIAL + 256
    assert tokenizer.encode("[BOS]<|im_end|>") == [FIRST_SPECIAL, FIRST_SPECIAL + 1]
    assert tokenizer.encode(f"<|reserved_token_{FIRST_SPECIAL + 3}|>") == [FIRST_SPECIAL + 3]
    assert tokenizer.eos_ids == {FIRST_SPECIAL + 1}
    assert tokenizer.bos_id == FIRST_SPECIAL
    assert tokenizer.added_tokens["<|tool_call_begin|>"] == FIRST_SPECIAL + 7
    assert FIRST_SPECIAL + 7 not in tokenizer.special_ids
    assert FIRST_SPECIAL + 3 in tokenizer.special_ids


def test_an_unknown_class_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match="'Other'"):
        Tokenizer.from_hf(write(tmp_path, RANKS, tokenizer_class="Other"))


@pytest.mark.parametrize("line", [b"!!! 0", b"YQ==", b"YQ== x", b"YQ== 5"])
def test_a_damaged_file_names_its_line(tmp_path, line):
    write(tmp_path, RANKS, tokenizer_class="TikTokenTokenizer")
    (tmp_path / "tiktoken.model").write_bytes(line)
    with pytest.raises(ModelLoadError, match="line 1 of"):
        Tokenizer.from_hf(tmp_path)
