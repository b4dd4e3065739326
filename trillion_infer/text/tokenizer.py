"""Text to token ids and back."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.text.gguf_metadata import read_gguf_metadata
from trillion_infer.text.gguf_tokenizer import backend_from_gguf, eos_ids_from_gguf
from trillion_infer.text.pieces import piece_reader


class Tokenizer:
    """A vocabulary with its special tokens and chat template. Immutable after construction.

    `bos_id` is None where the model has none; `eos_ids` holds every id that ends a turn; `special_ids` are the
    ids that `decode` leaves out by default; `added_tokens` maps the text of every token matched before the
    vocabulary splits (special or not) to its id.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        extra_template_variables: Mapping[str, str] | None = None,
    ):
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        self.template_variables = dict(extra_template_variables or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        decoder = backend.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: id for id, token in decoder.items()}
        self.special_ids = frozenset(id for id, token in decoder.items() if token.special)
        self._added_bytes = {id: token.content.encode() for id, token in decoder.items()}
        self._read_piece, self.drops_leading_space = piece_reader(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, source: str | Path | Mapping[str, Any]) -> Tokenizer:
        """The tokenizer inside a GGUF file, given its path or its metadata already read."""
        metadata = source if isinstance(source, Mapping) else read_gguf_metadata(source)
        backend = backend_from_gguf(metadata)
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        eos = metadata.get("tokenizer.ggml.eos_token_id")
        named = {"bos_token": bos, "eos_token": eos}
        return cls(
            backend,
            bos_id=None if bos is None else int(bos),
            eos_ids=eos_ids_from_gguf(metadata),
            chat_template=metadata.get("tokenizer.chat_template"),
            extra_template_variables={
                name: backend.id_to_token(int(id)) or "" for name, id in named.items() if id is not None
            },
        )

    @classmethod
    def from_hf(cls, directory: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face model directory. Raises ModelLoadError naming a missing file."""
        from trillion_infer.text.hf_tokenizer import read_hf_tokenizer

        return cls(**read_hf_tokenizer(Path(directory)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. With `add_special_tokens` the model's own BOS/EOS are added, but never a second
        BOS to a text that already begins with one. Special tokens written in `text` become their ids."""
        try:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise InvalidRequestError(f"the text is {text!r:.80}; a string of valid Unicode is expected.") from error
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            return ids[1:]
        return ids

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, *, continuation: bool = False) -> str:
        """Text of `ids`. An id outside the vocabulary is an empty string; bytes that are no UTF-8 become
        U+FFFD. `continuation` keeps the leading space that a SentencePiece model drops at a text's start."""
        data = b"".join([self.id_to_bytes(id, skip_special_tokens) for id in ids])
        text = data.decode("utf-8", "replace")
        return text[1:] if self.drops_leading_space and not continuation and text[:1] == " " else text

    def id_to_bytes(self, id: int, skip_special_tokens: bool = False) -> bytes:
        """The bytes token `id` contributes to a text, at any position but the first."""
        if skip_special_tokens and id in self.special_ids:
            return b""
        data = self._bytes.get(id)
        if data is None:
            data = self._bytes[id] = self._compute_bytes(id)
        return data

    def id_to_piece(self, id: int) -> str | None:
        """The vocabulary's own spelling of `id` (`Ġthe`), None outside the vocabulary."""
        return self.backend.id_to_token(id) if 0 <= id < self.vocab_size else None

    def piece_to_id(self, piece: str) -> int | None:
        """The id whose spelling in the vocabulary is `piece`, else None."""
        return self.backend.token_to_id(piece)

    def _compute_bytes(self, id: int) -> bytes:
        id = operator.index(id)
        if id in self._added_bytes:
            return self._added_bytes[id]
        piece = self.id_to_piece(id)
        return b"" if piece is None else self._read_piece(piece)
