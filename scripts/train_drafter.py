"""Trains an EAGLE-3 head for a model, on prompts of yours that the model itself answers.

Run:    python scripts/train_drafter.py --model=MODEL --prompts=PROMPTS.jsonl --output=FOLDER
        python scripts/train_drafter.py --model=MODEL --prompts=PROMPTS.jsonl --output=FOLDER --heldout=OTHERS.jsonl \\
            --steps=400 --rows=8 --length=144 --unroll=3 --drafted=4096
Expect: a line every ten steps (loss, share of right tokens for each step of the unroll); in FOLDER answers.jsonl,
        metrics.jsonl, loss.png, checkpoints/ and head/, which --speculate=eagle3:FOLDER/head takes. With --heldout the
        mean acceptance length on prompts that were not trained on. Run again, it goes on where it was stopped.

PROMPTS.jsonl: a line each, {"messages": …} | {"prompt": …} | {"prompt_token_ids": …}.
"""

import importlib
import json
from pathlib import Path

from absl import flags

from trillion_infer.cli.flags import define_llm_flags, run
from trillion_infer.cli.progress import progress_bars
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.llm import LLM
from trillion_infer.train.answers import read_conversations, regenerate
from trillion_infer.train.export import DTYPES, export_head
from trillion_infer.train.measure import acceptance
from trillion_infer.train.trainer import TrainConfig, Trainer, plot

_DEFAULTS = TrainConfig()
PROMPTS = flags.DEFINE_string("prompts", None, "JSONL of conversations or prompts.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "Folder for everything that is made.", required=True)
HELDOUT = flags.DEFINE_string("heldout", None, "JSONL of prompts for measuring the trained head.")
ANSWER_TOKENS = flags.DEFINE_integer("answer_tokens", 128, "Most tokens of an answer.", lower_bound=4)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Of the answers.", lower_bound=0)
STEPS = flags.DEFINE_integer("steps", _DEFAULTS.steps, "Updates.")
ROWS = flags.DEFINE_integer("rows", _DEFAULTS.rows, "Conversations of a batch.")
LENGTH = flags.DEFINE_integer("length", _DEFAULTS.length, "Tokens of a conversation; longer ones are cut.")
UNROLL = flags.DEFINE_integer("unroll", _DEFAULTS.unroll, "Steps of the training-time test.")
START = flags.DEFINE_string("start", None, "Exported head to go on with; --drafted is then the head's own.")
DRAFTED = flags.DEFINE_integer("drafted", _DEFAULTS.drafted, "Size of the head's vocabulary.")
RATE = flags.DEFINE_float("rate", _DEFAULTS.rate, "Peak learning rate.")
FEATURES = flags.DEFINE_integer(
    "features", _DEFAULTS.features, "Bytes of hidden states that may be kept in a file; 0: compute them each time.", 0
)
SAVE_EVERY = flags.DEFINE_integer("save_every", _DEFAULTS.save_every, "Updates a checkpoint.")
HEAD_DTYPE = flags.DEFINE_enum("head_dtype", "float32", list(DTYPES), "Of the exported head.")
llm_flags = define_llm_flags()


def main(_: list[str]) -> None:
    importlib.import_module("grain")  # where it is missing, that is said before the model answers the prompts
    options, folder = llm_flags(), Path(OUTPUT.value)
    config = TrainConfig(
        STEPS.value,
        ROWS.value,
        LENGTH.value,
        UNROLL.value,
        DRAFTED.value,
        RATE.value,
        SAVE_EVERY.value,
        options["seed"],
        FEATURES.value,
    )
    start = Path(START.value) if START.value else None
    rows = read_conversations(Path(PROMPTS.value))
    heldout = read_conversations(Path(HELDOUT.value)) if HELDOUT.value else []
    folder.mkdir(parents=True, exist_ok=True)
    with progress_bars() as progress:
        llm = LLM(**{**options, "progress": progress})
    params = SamplingParams(temperature=TEMPERATURE.value, max_tokens=ANSWER_TOKENS.value)
    examples = regenerate(llm, rows, params, folder / "answers.jsonl")
    held = regenerate(llm, heldout, params, folder / "heldout_answers.jsonl")
    trainer = Trainer(llm, options["model"], examples, config, folder, held, start)
    trainer.run(lambda row: print(json.dumps(row), flush=True) if row["step"] % 10 == 0 or "heldout" in row else None)
    export_head(folder / "head", trainer.spec, trainer.weights, trainer.kept, HEAD_DTYPE.value)
    plot(folder)
    llm.close()
    if heldout:
        head = f"eagle3:{folder / 'head'}"
        print(json.dumps(acceptance(options, heldout, head, 3, ANSWER_TOKENS.value)))


if __name__ == "__main__":
    run(main)
