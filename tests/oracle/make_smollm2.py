"""Golden answers of SmolLM2-135M-Instruct, dequantised from its GGUF to float32.

    python tests/oracle/make_smollm2.py /path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Writes golden/smollm2/{prompts.json,golden.npz,chat.json,tokenizer.json,penalties.json}.
"""

import sys
from pathlib import Path

import prompts
import torch
from common import GOLDEN, save_json
from real_model import RealModel

CHAT_CASES = [(name, flag) for name in prompts.CHATS for flag in (True, False)]
PENALTY_STEPS = 24


def main(gguf: Path) -> None:
    """Makes every file."""
    real = RealModel.load(gguf)
    folder = GOLDEN / "smollm2"
    entries = [real.text_entry(name, "text", text) for name, text in prompts.SHORT.items()]
    entries += [real.text_entry(name, "code", text) for name, text in prompts.CODE.items()]
    entries += [real.text_entry(name, "korean", text) for name, text in prompts.KOREAN.items()]
    entries += [real.chat_entry(name, messages) for name, messages in prompts.CHATS.items()]
    for seed, (name, length) in enumerate(prompts.LONG_TOKENS.items()):
        entries.append(real.long_entry(name, prompts.long_text(seed), length))
    real.write(folder, entries)
    save_json(folder / "chat.json", [_chat(real, name, flag) for name, flag in CHAT_CASES])
    save_json(folder / "tokenizer.json", [real.tokenizer_entry(text) for text in prompts.TOKENIZER_TEXTS])
    save_json(folder / "penalties.json", _penalties(real, "Paris Paris Paris"))


def _chat(real: RealModel, name: str, generation: bool) -> dict:
    messages = prompts.CHATS[name]
    text = real.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    ids = real.chat_ids(messages, generation)
    return {"name": name, "messages": messages, "add_generation_prompt": generation, "text": text, "ids": ids}


def _penalties(real: RealModel, text: str) -> dict:
    ids = real.tokenizer(text)["input_ids"]
    generated = real.model.generate(
        torch.tensor([ids]), max_new_tokens=PENALTY_STEPS, min_new_tokens=PENALTY_STEPS, do_sample=False,
        repetition_penalty=1.5,
    )[0, len(ids) :].tolist()  # fmt: skip
    settings = {
        "none": {},
        "repetition_penalty": {"repetition": 1.5},
        "presence_penalty": {"presence": 2.0},
        "frequency_penalty": {"frequency": 2.0},
    }
    runs = {name: real.penalised(ids, PENALTY_STEPS, **values) for name, values in settings.items()}
    eos = real.model.config.eos_token_id
    mine = runs["repetition_penalty"]["tokens"]
    if eos not in mine and mine != generated:
        raise RuntimeError(f"transformers' repetition penalty gives {generated}, ours {mine}")
    return {"text": text, "ids": ids, "transformers_generate_repetition_1.5": generated, "runs": runs}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
