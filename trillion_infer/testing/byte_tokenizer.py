"""A tokenizer whose first 256 tokens are the bytes, for tests that must cut characters where they like."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trillion_infer.text.tokenizer import Tokenizer as TextTokenizer

EOS = 256


def byte_tokenizer(pieces: Sequence[str] = (), chat_template: str | None = None) -> TextTokenizer:
    """Ids 0 to 255 are bytes, 256 is `<eos>`, and the ids from 257 on stand for `pieces`, one each.

    Text is encoded as bytes; pieces are for tokens a scripted model emits.
    """
    alphabet = _byte_characters()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return TextTokenizer(backend, eos_ids=(EOS,), chat_template=chat_template)


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: itself where printable, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters, spare = [], 256
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters
