"""Builds the tokenizer that a GGUF file's metadata describes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.text.pretokenizers import splitting

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# Chat files often name only the end of text as EOS; a control token of this list that the chat template
# writes also ends a turn.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|eot|>", "<|end|>", "<|return|>", "<|call|>")


def backend_from_gguf(metadata: Mapping[str, Any]) -> Backend:
    """The `tokenizers` object for `metadata` (keys as in the file); ModelLoadError names what is missing."""
    kind = _get(metadata, "model")
    if kind == "gpt2":
        backend = _byte_level(metadata)
    elif kind == "llama":
        backend = _sentencepiece(metadata)
    else:
        raise ModelLoadError(
            f"the GGUF tokenizer is of type {kind!r} (tokenizer.ggml.model); 'gpt2' and 'llama' can be read, "
            "others load from their Hugging Face directory."
        )
    _add_special_tokens(backend, metadata)
    return backend


def eos_ids_from_gguf(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Every id that ends a turn: eos, eot and eom of the file, and turn ends its chat template writes."""
    ids = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    template = metadata.get("tokenizer.chat_template", "")
    wanted = {token for token in _TURN_ENDS if token in template}
    if wanted:
        types, tokens = np.asarray(_get(metadata, "token_type")), _get(metadata, "tokens")
        ids.update(int(i) for i in np.flatnonzero(types == _CONTROL) if tokens[i] in wanted)
    return frozenset(int(i) for i in ids if i is not None)


def _get(metadata: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise ModelLoadError(f"the GGUF file has no {key}; it holds no usable tokenizer.")
    return metadata[key]


def _byte_level(metadata: Mapping[str, Any]) -> Backend:
    tokens = _get(metadata, "tokens")
    split = splitting(_get(metadata, "pre"))
    merges = [tuple(merge.split(" ", 1)) for merge in _get(metadata, "merges")]
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    try:
        model = models.BPE(vocab, merges, ignore_merges=split.ignore_merges)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelLoadError(f"the GGUF vocabulary and merges do not fit together: {error}.") from error
    backend = Backend(model)
    backend.normalizer = split.normalizer()  # type: ignore[assignment]
    backend.pre_tokenizer = split.pre_tokenizer()  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return backend


def _sentencepiece(metadata: Mapping[str, Any]) -> Backend:
    tokens, types = _get(metadata, "tokens"), np.asarray(_get(metadata, "token_type"))
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    merges = _merges_from_scores(tokens, types, np.asarray(_get(metadata, "scores")), vocab)
    backend = Backend(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: normalizers.Normalizer = normalizers.Replace(" ", "▁")
    undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        undo.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = spaces  # type: ignore[assignment]
    backend.decoder = decoders.Sequence(undo)  # type: ignore[assignment]
    return backend


def _merges_from_scores(
    tokens: list[str], types: np.ndarray, scores: np.ndarray, vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores highest: every split of a piece into two pieces
    is a merge, ordered by the score of the whole."""
    usable = np.flatnonzero(types == _NORMAL)
    ranked = usable[np.argsort(-scores[usable], kind="stable")]
    return [
        (left, right)
        for piece in map(tokens.__getitem__, ranked.tolist())
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
    ]


def _add_special_tokens(backend: Backend, metadata: Mapping[str, Any]) -> None:
    tokens, types = _get(metadata, "tokens"), np.asarray(_get(metadata, "token_type"))
    control = [tokens[i] for i in np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN))]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    user = [tokens[i] for i in np.flatnonzero(types == _USER_DEFINED)]
    # SentencePiece looks for these in the text whose spaces are already `▁`; a prepended space would spoil that.
    normalized = isinstance(backend.normalizer, normalizers.Replace)
    backend.add_tokens([AddedToken(t, normalized=normalized, special=False) for t in user])
    wraps = _wrapping(metadata)
    if wraps:
        before = [tokens[i] for flag, i in wraps if flag == "bos"]
        after = [tokens[i] for flag, i in wraps if flag == "eos"]
        template = [*before, "$A", *after]
        pairs = [(tokens[i], i) for _, i in wraps]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)  # type: ignore


def _wrapping(metadata: Mapping[str, Any]) -> list[tuple[str, int]]:
    if metadata["tokenizer.ggml.model"] == "gpt2":
        defaults = {"bos": splitting(_get(metadata, "pre")).adds_bos, "eos": False}
    else:
        defaults = {"bos": True, "eos": False}
    chosen = []
    for name, default in defaults.items():
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            chosen.append((name, int(_get(metadata, f"{name}_token_id"))))
    return chosen
