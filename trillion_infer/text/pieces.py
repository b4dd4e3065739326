"""What bytes a token stands for."""

import json
from collections.abc import Callable

from tokenizers import Tokenizer as Backend

from trillion_infer.core.errors import ModelLoadError


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's reversible alphabet: printable Latin-1 characters stand for themselves, the other bytes for
    the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    alphabet = {chr(b): b for b in printable}
    alphabet.update({chr(256 + n): b for n, b in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()
_LETTERS = {byte: char for char, byte in _ALPHABET.items()}
_BYTE_PIECES = {f"<0x{b:02X}>": bytes([b]) for b in range(256)}


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a byte-level piece: `Ġthe` is b" the"."""
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:
        return piece.encode()


def byte_level_piece(data: bytes) -> str:
    """The byte-level spelling of `data`, the reverse of `byte_level_bytes`."""
    return "".join([_LETTERS[byte] for byte in data])


def sentencepiece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: `▁the` is b" the", `<0x0A>` is b"\\n"."""
    byte = _BYTE_PIECES.get(piece)
    return piece.replace("▁", " ").encode() if byte is None else byte


def piece_reader(backend: Backend) -> tuple[Callable[[str], bytes], bool]:
    """(piece -> bytes, whether a leading space of a whole text is dropped), read off the backend's decoder.

    Raises ModelLoadError for a decoder whose output is not the concatenation of its tokens.
    """
    decoder = backend.decoder
    steps = [] if decoder is None else _steps(json.loads(decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return byte_level_bytes, False
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds:
        drops = any(_drops_leading_space(step) for step in steps)
        return sentencepiece_bytes, drops
    raise ModelLoadError(
        f"the tokenizer decodes by {sorted(kinds) or 'nothing'}; byte-level and SentencePiece-like "
        "tokenizers are supported."
    )


def _steps(decoder: dict) -> list[dict]:
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _drops_leading_space(step: dict) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never"
    return step["type"] == "Strip" and step.get("start", 0) > 0
