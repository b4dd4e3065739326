"""A benchmark from options to records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from trillion_infer.benchmark.baseline import SCRIPT, BaselineUnavailable, find_python, run_baseline
from trillion_infer.benchmark.host import host_overhead
from trillion_infer.benchmark.interference import Interference, compare, interference
from trillion_infer.benchmark.kv import kv_shares
from trillion_infer.benchmark.limits import machine_limits
from trillion_infer.benchmark.measure import MEASURES, peak_rss_mb, warm_up
from trillion_infer.benchmark.others import OTHERS, interpreter_of
from trillion_infer.benchmark.plots import draw_interference
from trillion_infer.benchmark.records import BASELINE, ENGINE, MACHINE, Record, ratios, record
from trillion_infer.benchmark.serving import serve
from trillion_infer.benchmark.speculation import speculate
from trillion_infer.benchmark.startup import startup
from trillion_infer.benchmark.transfer import Trace, transfer
from trillion_infer.benchmark.workloads import WORKLOADS, Sizes, Work, draw
from trillion_infer.core.errors import ConfigError
from trillion_infer.llm import LLM, Progress
from trillion_infer.models import read_family
from trillion_infer.weights.checkpoint import open_checkpoint

MAX_RUNNING = 16
"""Requests computed at once in the offline workload."""

_LIMIT_DTYPES = {"bf16_gflops": "bfloat16", "f32_gflops": "float32"}


@dataclass(frozen=True)
class Plan:
    """options: keywords of LLM. repeats: the best is reported. torch_python: see find_python. others: interpreters of
    the engines in OTHERS that are to be measured, None for this one; models: the same model in the form that an engine
    reads, where that is another. trace: gets the spans of `transfer`. plot: file
    for the picture of `interference`."""

    options: Mapping[str, Any]
    workloads: Sequence[str] = WORKLOADS
    sizes: Sizes = field(default_factory=Sizes)
    repeats: int = 3
    torch_python: str | None = None
    others: Mapping[str, str | None] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    trace: Trace | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats is {self.repeats}; it must be 1 or more.")


def run_plan(plan: Plan, tell: Callable[[str], None], progress: Progress | None = None) -> Iterator[Record]:
    """Records as they are measured: this engine, the machine's limits, the baseline, ratios.

    Over several processes the one that leads measures, and the others take part without a record.
    `tell` gets a sentence when the baseline is left out. Every repeat has prompts of its own; the baseline's are those
    of the first. Raises what LLM raises, and ConfigError for a torch_python that cannot serve.
    """
    if "speculate" in plan.workloads:
        yield from _speculation(plan, tell)
        plan = replace(plan, workloads=tuple(name for name in plan.workloads if name != "speculate"))
        if not plan.workloads:
            return
    if plan.workloads == ("transfer",):
        yield from _transfer(plan)
        return
    if "transfer" in plan.workloads:
        raise ConfigError("the workload transfer has devices of its own; run it alone.")
    if "startup" in plan.workloads and jax.distributed.is_initialized():
        raise ConfigError("the workload startup starts processes of its own; leave it out over several processes.")
    scripts: dict[str, tuple[str, Path]] = {}
    for engine, find in _finders(plan).items():
        try:
            scripts[engine] = find()
        except BaselineUnavailable as error:
            tell(f"{engine} is not measured: {error}.")
    checkpoint = open_checkpoint(plan.options["model"])
    family = read_family(checkpoint.config, checkpoint.generation_config)
    draws = [draw(plan.sizes, family.config.vocab, number) for number in range(plan.repeats + 1)]
    name, found = Path(plan.options["model"]).name, []
    # Before the parent touches a device: on accelerators only one process at a time may hold it.
    started = startup(plan.options, draws[0].startup, plan.repeats) if "startup" in plan.workloads else {}
    if "serve" in plan.workloads:
        started |= serve(plan.options, [work.offline for work in draws], plan.sizes.offline_out)
    if "host" in plan.workloads:
        started |= host_overhead()
    if "interference" in plan.workloads:
        yield from _interference(plan, draws[0], name)
        if plan.workloads == ("interference",):
            return
    if "kv" in plan.workloads:
        for metric, value in kv_shares(plan.options, plan.sizes, family.config.vocab, plan.repeats):
            yield record(ENGINE, metric, value, str(plan.options.get("dtype", "auto")), name)
        if plan.workloads == ("kv",):
            return
    llm = LLM(**{**plan.options, "progress": progress})
    if not llm.leads:
        llm.follow()
        return
    llm.wait_for_programs()
    dtype, running = llm.blueprint.dtype, llm.blueprint.config.max_running * llm.blueprint.data
    for metric, value in chain(started.items(), _figures(llm, plan.workloads, draws)):
        found.append(record(ENGINE, metric, value, dtype, name))
        yield found[-1]
    for metric, value in machine_limits().items():
        yield record(MACHINE, metric, value, _LIMIT_DTYPES.get(metric, dtype), name)
    work = draws[0].for_baseline(plan.workloads, running)
    for engine, (python, script) in scripts.items():
        try:
            for each in run_baseline(python, _model_of(plan, engine), dtype, work, plan.repeats, script):
                found.append(each)
                yield each
        except BaselineUnavailable as error:
            tell(f"{engine} is not measured: {error}.")
    yield from ratios(found)


def _finders(plan: Plan) -> dict[str, Callable[[], tuple[str, Path]]]:
    """What finds the interpreter and the script of each engine to compare with."""

    def finder(name: str, asked: str | None) -> Callable[[], tuple[str, Path]]:
        engine = OTHERS[name]
        return lambda: (interpreter_of(engine, asked, _model_of(plan, name)), engine.script)

    others = {name: finder(name, asked) for name, asked in plan.others.items()}
    return {BASELINE: lambda: (find_python(plan.torch_python), SCRIPT), **others}


def _model_of(plan: Plan, engine: str) -> str:
    return plan.models.get(engine) or str(plan.options["model"])


def _interference(plan: Plan, work: Work, name: str) -> Iterator[Record]:
    """Figures of each setup under its name, and how they compare."""
    options = {key: value for key, value in plan.options.items() if value is not None}
    found = interference(options, Interference(work.steady, work.long, plan.sizes.steady_out), plan.repeats)
    dtype = str(options.get("dtype", "auto"))
    if plan.plot is not None:
        draw_interference(found, plan.plot)
    for setup, figures in found.items():
        for metric, value in figures.items():
            yield record(f"{ENGINE} {setup}", metric, value, dtype, name)
    for metric, value in compare(found).items():
        yield record(ENGINE, metric, value, dtype, name)


def _transfer(plan: Plan) -> Iterator[Record]:
    """See benchmark/transfer.py."""
    checkpoint = open_checkpoint(plan.options["model"])
    family = read_family(checkpoint.config, checkpoint.generation_config)
    prompts = [draw(plan.sizes, family.config.vocab, number).long[0] for number in range(max(3, plan.repeats))]
    dtype, name = str(plan.options.get("dtype", "auto")), Path(plan.options["model"]).name

    for metric, value in transfer(plan.options, prompts, plan.trace).items():
        yield record(MACHINE if metric == "copy_gb_s" else ENGINE, metric, value, dtype, name)


def _speculation(plan: Plan, tell: Callable[[str], None]) -> Iterator[Record]:
    """Drafts against none: see benchmark/speculation.py."""
    dtype = str(plan.options.get("dtype", "auto"))
    for metric, value in speculate(plan.options, plan.repeats, tell=tell):
        yield record(ENGINE, metric, value, dtype, Path(plan.options["model"]).name)


def _figures(llm: LLM, workloads: Sequence[str], draws: Sequence[Work]) -> Iterator[tuple[str, float]]:
    """Best figures of a loaded LLM, which is closed. The last draw is for warming up."""
    *repeats, spare = draws
    if any(name in MEASURES for name in workloads):
        warm_up(llm, spare)
    for name in (name for name in workloads if name in MEASURES):
        runs = [MEASURES[name](llm, work) for work in repeats]
        yield from ((metric, max(run[metric] for run in runs)) for metric in runs[0])
    yield "peak_rss_mb", peak_rss_mb()
    llm.close()
