"""How byte-level BPE vocabularies split text before merging, by the name a GGUF file gives."""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from trillion_infer.core.errors import ModelLoadError

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_HAN = r"&&[^\p{Han}]"

_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_K2 = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]*[{_LOWER}{_NOT_HAN}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]+[{_LOWER}{_NOT_HAN}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}|" + _TAIL
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class Splitting:
    """One way to split: regexes applied in turn, then bytes.

    An empty `patterns` leaves the splitting to GPT-2's own expression. `ignore_merges` takes a word that is in
    the vocabulary whole. `adds_bos` is the default where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = Splitting()
_DIGITS = Splitting(single_digits=True)
_LLAMA_BPE = Splitting((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN = Splitting((_QWEN2,), nfc=True)

SPLITTINGS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "mpt": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "dbrx": Splitting((_LLAMA3,)),
    "smaug-bpe": Splitting((_LLAMA3,)),
    "glm4": Splitting((_LLAMA3,)),
    "chatglm-bpe": Splitting((_LLAMA3,)),
    "minimax-m2": Splitting((_GPT4O,)),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "stablelm2": Splitting((_QWEN2,)),
    "tekken": Splitting((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": Splitting((_GPT4O,)),
    "llama4": Splitting((_GPT4O,), adds_bos=True),
    "kimi-k2": Splitting((KIMI_K2,)),
    "deepseek-v3": Splitting(_DEEPSEEK_V3),
    "hunyuan-dense": Splitting(_DEEPSEEK_V3),
}


def splitting(name: str) -> Splitting:
    """The splitting called `name` in `tokenizer.ggml.pre`; ModelLoadError names an unknown one."""
    if name not in SPLITTINGS:
        raise ModelLoadError(
            f"the GGUF file splits text by {name!r} (tokenizer.ggml.pre), which is not one of "
            f"{', '.join(sorted(SPLITTINGS))}; load the model from its Hugging Face directory instead."
        )
    return SPLITTINGS[name]
