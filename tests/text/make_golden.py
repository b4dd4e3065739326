"""Writes golden_ids.json: token ids that transformers gives for varied texts.

Run where transformers and gguf are installed:
    python tests/text/make_golden.py SMOLLM2.gguf GEMMA3.gguf tests/text/golden_ids.json
Expected: one line per model with the number of texts.
"""

import json
import sys
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

TEXTS = [
    "",
    " ",
    "Hello",
    " Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "It's 12:45 on 2024-11-03, and I'LL pay $1,234.56 (≈ €1 100).",
    "a  b   c    d\t\te\n\n\nf \n g  \r\nh",
    "trailing spaces   ",
    "    indented\n\tand tabs\n",
    "  42 is  7 more than   35\n 1 2 3",
    "def f(x: int) -> int:\n    if x < 2:\n        return 1\n    return x * f(x - 1)  # recursion\n",
    'for (int i=0;i<10;++i){printf("%d\\n", i);}',
    '{"name": "get_weather", "arguments": {"city": "서울", "units": ["C", "F"]}}',
    "안녕하세요, 만나서 반갑습니다. 오늘 날씨가 좋네요!",
    "日本語のテキストと中文文本混在、句読点も。",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 🇨🇿 👍🏽 mixed🙂text",
    "∑ᵢ xᵢ² ≤ ∞ ⇒ √2 ≠ 1.4142…",
    "zero​width﻿bom nbsp　ideographic",
    "e\u0301 vs é, ﬁ ligature, Å Å",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <|im_end|>  spaced<start_of_turn>model\n<end_of_turn>",
    "almost <|im_start |> special <|im_end|",
    "<think>\nreasoning\n</think>\n<tool_call>{}</tool_call>",
    "http://example.com/path?query=1&b=%20#frag user@mail.org",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA " * 3,
    "!!!???...;;;---___===***~~~```'''\"\"\"",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "\u0000\u0001\u001b[31mred\u007f",
    "Line one\u2028line two\u0085line three",
    "don't can't we'll I'd you've THEY'RE o'clock",
    "1000000 3.14159 0x7f 1e-9 ½ ² ٣ ๔",
    "<0x0A> ▁literal▁ Ġliteral",
]

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief. 짧게."}, {"role": "user", "content": "What is  2 + 2?\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b 👍"},
        {"role": "user", "content": "  <|im_start|>c"},
    ],
]


def main(smollm2: str, gemma3: str, output: str) -> None:
    golden = {"texts": TEXTS, "chats": CHATS}
    for name, path in (("smollm2", Path(smollm2)), ("gemma3", Path(gemma3))):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        if name == "smollm2":
            # The GGUF reader of transformers ignores `tokenizer.ggml.pre`; the model's own tokenizer.json
            # splits every digit off first.
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        plain = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
        golden[name] = {
            "plain": plain,
            "wrapped": [tokenizer(text, add_special_tokens=True).input_ids for text in TEXTS],
            "decoded": [tokenizer.decode(ids, skip_special_tokens=False) for ids in plain],
            "decoded_clean": [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain],
        }
        print(name, len(TEXTS))
        if tokenizer.chat_template:
            golden[name]["chats"] = [
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS
            ]
    Path(output).write_text(json.dumps(golden, ensure_ascii=True, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
