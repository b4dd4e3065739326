"""Answers files of prompts, however long, and goes on where it was stopped.

Run:    python scripts/batch.py --model=MODEL --input=in.jsonl --output=out.jsonl --max_tokens=64
        python scripts/batch.py --model=MODEL --input='prompts-*.array_record' --output=out.jsonl
        python scripts/batch.py --model=MODEL --input=in.jsonl --output=out-0.jsonl --shards=4 --shard=0   # a quarter
Expect: a JSON line a row in input order, as generate.py writes them; the same command again answers what is missing.

Input rows are JSON objects, one a line, or one a record of files that end in .array_record, with one of "prompt",
"prompt_token_ids" and "messages", and SamplingParams' names, which win over the flags. A row that cannot be served
becomes {"index", "error"}, and the exit status is 1. OUTPUT.job says which job OUTPUT belongs to.
"""

import os
import sys
from contextlib import closing
from pathlib import Path

from absl import flags

from trillion_infer import LLM, InvalidRequestError, SamplingParams
from trillion_infer.batch import BatchJob, open_rows
from trillion_infer.batch.source import find_files
from trillion_infer.cli.flags import define_llm_flags, define_sampling_flags, run
from trillion_infer.cli.hosts import define_host_flags, follows
from trillion_infer.cli.progress import progress_bars

INPUT = flags.DEFINE_string("input", None, "JSONL or ArrayRecord files or patterns, joined by commas.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "JSONL file to write or go on with.", required=True)
IN_FLIGHT = flags.DEFINE_integer("in_flight", None, "Most rows held at once; 4 x max_running if not given.", 1)
SHARDS = flags.DEFINE_integer("shards", 1, "Parts of the input, one for each independent run.", 1)
SHARD = flags.DEFINE_integer("shard", 0, "This run's part, from 0.", 0)
llm_flags = define_llm_flags()
join_hosts = define_host_flags()
sampling_flags = define_sampling_flags(temperature=0.0, max_tokens=128)
SHAPE_ANSWERS = ("model", "config", "dtype", "quantize", "kv_dtype", "max_model_len", "seed")


def main(_: list[str]) -> int:
    if SHARD.value >= SHARDS.value:
        raise InvalidRequestError(f"--shard is {SHARD.value}; it must be below --shards, {SHARDS.value}.")
    files, options, sampling = find_files(INPUT.value), llm_flags(), sampling_flags()
    params = SamplingParams(**sampling)
    facts = {
        "input": [[os.path.abspath(path), os.path.getsize(path)] for path in files],
        "shard": [SHARD.value, SHARDS.value],
        "sampling": sampling,
        **{name: options.get(name) for name in SHAPE_ANSWERS},
    }
    job = BatchJob(open_rows(files)[SHARD.value :: SHARDS.value], Path(OUTPUT.value), facts)
    join_hosts()
    with progress_bars() as progress:
        llm = LLM(**options, progress=progress)
        if follows(llm):
            return 0
        with closing(llm):
            refused = job.run(llm, params, IN_FLIGHT.value or 4 * options["max_running"], progress)
    if refused:
        print(f"error: {refused} of {len(job.rows)} rows were refused; see their lines.", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    run(main)
