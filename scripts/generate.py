"""Completes prompts.

Run:    python scripts/generate.py --model=MODEL --prompt="The capital of France is" --max_tokens=16
        python scripts/generate.py --model=MODEL --chat --prompt="What is the capital of France?"
        python scripts/generate.py --model=MODEL --disk_kv=kv:10e9 --session=tale --prompt=" And then"
        python scripts/generate.py --model=MODEL --prompts=in.jsonl --output=out.jsonl --mesh=tensor=4
        python scripts/generate.py --model=MODEL --prompt=Hi --mesh=stage=2,tensor=4 --coordinator=HOST:8476 \
            --num_processes=2 --process_id=0   # and the same with --process_id=1 on the other host
Expect: the text as it comes; with --output a JSON line a prompt, in input order.

MODEL is a Hugging Face directory, a .gguf file, an Orbax directory or a hub id. Input lines hold one of "prompt",
"prompt_token_ids" and "messages". A line that cannot be served becomes {"index", "error"}, and the exit status is 1.
"""

import json
import sys
from contextlib import closing
from pathlib import Path

from absl import flags

from trillion_infer import LLM, InvalidRequestError, SamplingParams
from trillion_infer.cli.flags import define_llm_flags, define_sampling_flags, run
from trillion_infer.cli.hosts import define_host_flags, follows
from trillion_infer.cli.jsonl import output_row, parse_row, read_rows
from trillion_infer.cli.progress import progress_bars

PROMPT = flags.DEFINE_string("prompt", None, "Text to complete.")
PROMPTS = flags.DEFINE_string("prompts", None, "JSONL file of prompts.")
OUTPUT = flags.DEFINE_string("output", None, "JSONL file to write; standard output if not given.")
CHAT = flags.DEFINE_bool("chat", False, "Treat --prompt as a user's message and apply the chat template.")
SESSION = flags.DEFINE_string(
    "session", None, "Session that --prompt goes on from, if it was saved, and that is saved afterwards."
)
llm_flags = define_llm_flags()
join_hosts = define_host_flags()
sampling_flags = define_sampling_flags(temperature=0.0, max_tokens=128)


def main(_: list[str]) -> int:
    if (PROMPT.value is None) == (PROMPTS.value is None):
        raise InvalidRequestError("give exactly one of --prompt and --prompts.")
    if SESSION.value is not None and (PROMPT.value is None or CHAT.value or OUTPUT.value):
        raise InvalidRequestError("--session goes with --prompt, and without --chat and --output.")
    params = SamplingParams(**sampling_flags())
    rows = [(0, {"prompt": PROMPT.value})] if PROMPTS.value is None else list(read_rows(PROMPTS.value))
    join_hosts()
    with progress_bars() as progress:
        llm = LLM(**llm_flags(), progress=progress)
    if follows(llm):
        return 0
    with closing(llm):
        return _answer(llm, params, rows)


def _answer(llm: LLM, params: SamplingParams, rows: list) -> int:
    """Prints or writes the completions; 1 if a prompt was refused."""
    if PROMPTS.value is None and OUTPUT.value is None and params.n == 1:
        prompt = llm.render_chat([{"role": "user", "content": PROMPT.value}]) if CHAT.value else PROMPT.value
        if SESSION.value is not None:
            prompt = llm.sessions.resume(SESSION.value) + prompt
        try:
            for piece in llm.stream(prompt, params, SESSION.value):
                print(piece, end="", flush=True)
        finally:  # what is said of an end before its time stands on its own line
            print(flush=True)
        if SESSION.value is not None:
            llm.sessions.save(SESSION.value)
        return 0
    if CHAT.value and PROMPT.value is not None:
        rows = [(0, {"messages": [{"role": "user", "content": PROMPT.value}]})]
    answers = llm.generate_each((index, lambda row=row: parse_row(row, params, llm.render_chat)) for index, row in rows)
    with Path(OUTPUT.value).open("w", encoding="utf-8") if OUTPUT.value else _standard_output() as out:
        failed = 0
        for index, answer in answers:
            failed += isinstance(answer, InvalidRequestError)
            line = (
                {"index": index, "error": str(answer)}
                if isinstance(answer, InvalidRequestError)
                else output_row(index, answer)
            )
            out.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            out.flush()
    if failed:
        print(f"error: {failed} of {len(rows)} prompts were refused; see their lines.", file=sys.stderr)
    return 1 if failed else 0


def _standard_output():
    return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)


if __name__ == "__main__":
    run(main)
