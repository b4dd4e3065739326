"""This engine beside transformers, llama.cpp and vLLM on the same prompts in one run, with the machine's limits.

Run:    python benchmarks/compare.py --model=smollm2.bf16.gguf --config=smollm2_cpu --chart=docs/benchmarks.png \\
            --transformers_python=/path/to/python-with-torch --vllm_python=/path/to/python-with-vllm \\
            --llama_cpp_python=/path/to/python-with-xllamacpp --llama_cpp_model=smollm2.f16.gguf \\
            --vllm_model=FOLDER --docs=docs/measurements.md
Expect: JSON lines as they are measured, a notice for every engine that is absent, a table, a chart, and a section of
        the Markdown file. Workloads and metrics are those of scripts/benchmark.py.
"""

import sys
from pathlib import Path

from absl import flags

from trillion_infer.benchmark.others import OTHERS
from trillion_infer.benchmark.records import BASELINE
from trillion_infer.benchmark.run import MAX_RUNNING, Plan, run_plan
from trillion_infer.benchmark.workloads import Sizes, parse_workloads
from trillion_infer.benchmark.written import draw_chart, markdown, write_section
from trillion_infer.cli.flags import define_llm_flags, run

WORKLOAD = flags.DEFINE_string("workload", "decode,prefill,offline,startup", "As in scripts/benchmark.py.")
REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each workload; the best is given.")
SCALE = flags.DEFINE_float("scale", 1.0, "Factor on every size of the workloads.")
CHART = flags.DEFINE_string("chart", None, "File to draw a bar chart to (.png, .svg).")
DOCS = flags.DEFINE_string("docs", None, "Markdown file that gets the table, between its marks.")
PYTHONS = {
    name: flags.DEFINE_string(f"{name}_python", None, f"Python for {name}; empty: not measured; default: this one.")
    for name in (BASELINE, *OTHERS)
}
MODELS = {
    name: flags.DEFINE_string(f"{name}_model", None, f"The same model in a form for {name}; default: --model.")
    for name in (BASELINE, *OTHERS)
}
llm_flags = define_llm_flags(max_running=MAX_RUNNING)


def main(_: list[str]) -> None:
    absent: list[str] = []

    def tell(notice: str) -> None:
        absent.append(notice)
        print(f"notice: {notice}", file=sys.stderr)

    pythons = {name: flag.value for name, flag in PYTHONS.items()}
    workloads = parse_workloads(WORKLOAD.value)
    torch_python = pythons.pop(BASELINE)
    models = {name: flag.value for name, flag in MODELS.items() if flag.value}
    plan = Plan(llm_flags(), workloads, Sizes().scaled(SCALE.value), REPEATS.value, torch_python, pythons, models)
    found = []
    for record in run_plan(plan, tell):
        found.append(record)
        print(record.line(), flush=True)
    section = markdown(found, absent)
    print(section)
    if DOCS.value:
        write_section(Path(DOCS.value), section)
    if CHART.value:
        draw_chart(Path(CHART.value), found)


if __name__ == "__main__":
    run(main)
