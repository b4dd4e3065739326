"""One process of an engine over several: python group_process.py RANK PORT MODEL MESH [KEY_FILE]

The leader answers prompts, streams one, aborts one, answers again and prints a line of JSON; with ENDLESS=1 it goes on
answering until it is stopped. OPTIONS_<rank>: keywords of LLM as JSON, which win. Its devices are those that
`tests/environment.py` gave its environment.
"""

import json
import os
import sys

from trillion_infer import LLM, SamplingParams
from trillion_infer.distributed.start import start_processes

PROMPTS = [[5, 9, 11], [7] * 20, list(range(30, 70)), [100]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = {"dtype": "float32", "max_running": 4, "page_size": 8, "prefill_chunk": 32, "kv_memory": 2**24}


def main(rank: int, port: str, model: str, mesh: str, key_file: str | None = None) -> None:
    start_processes(f"127.0.0.1:{port}", 2, rank)
    options = {**OPTIONS, **json.loads(os.environ.get(f"OPTIONS_{rank}", "{}"))}
    llm = LLM(model, **options, mesh=mesh, precompile=False, group_key_file=key_file)
    if not llm.leads:
        llm.follow()
        return
    first = tokens(llm)
    while os.environ.get("ENDLESS"):
        print("answering", flush=True)
        tokens(llm)
    llm.generator.add("aborted", PROMPTS[2], SamplingParams(max_tokens=200, ignore_eos=True))
    llm.generator.add("streamed", PROMPTS[1], GREEDY)
    streamed: list[int] = []
    while llm.generator.has_work:
        streamed += [t for delta in llm.generator.step() if delta.request_id == "streamed" for t in delta.token_ids]
        if len(streamed) == 3:
            llm.generator.abort("aborted")
    again = tokens(llm)
    llm.engine.check_integrity()
    print(json.dumps({"first": first, "streamed": streamed, "again": again}))
    llm.close()


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
