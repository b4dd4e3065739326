"""The host's share of a step: scheduling, packing, dispatch and delivery, with a model that answers at once."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.generation.generator import Generator
from trillion_infer.testing.scripted import scripted_generator

CASES = ((64, 100), (64, 100_000), (256, 100))
"""(requests running, tokens of context): few and many of the first, short and long of the second."""

PAGE = 64


def host_overhead(steps: int = 300) -> dict[str, float]:
    """Median milliseconds of a decode step on the host by case: host_ms_RUNNING_CONTEXT."""
    return {f"host_ms_{running}_{context}": host_ms(running, context, steps) for running, context in CASES}


def host_ms(running: int, context: int, steps: int) -> float:
    """Median milliseconds of a step of `running` requests with `context` tokens each, less those of the model."""
    return statistics.median(step_times(full_generator(running, context, steps), steps))


def full_generator(running: int, context: int, steps: int) -> Generator:
    """A generator over the scripted model whose `running` requests decode. They share all of their context but the
    last token, so that the prompts are computed once."""
    chunk, warm_up = 8192, 8
    pages = context // PAGE + running * ((steps + warm_up) // PAGE + 3)
    generator = scripted_generator(
        lambda index, length: 7,
        None,
        max_running=running,
        max_model_len=context + steps + 4 * warm_up,
        num_pages=pages,
        page_size=PAGE,
        prefill_chunk=chunk,
        expected_output=1,
    )
    generator.engine.programs = Timed(generator.engine.programs)  # pyright: ignore[reportAttributeAccessIssue]
    params = SamplingParams(max_tokens=steps + 2 * warm_up, ignore_eos=True, temperature=0.7)
    for number in range(running):
        ids = [11] * (context - 1) + [12 + number]
        generator.add(str(number), {"prompt_token_ids": ids}, params)
    while generator.engine.stats()["running"] < running or generator.engine.queued_tokens() > running:  # pyright: ignore
        generator.step()
    for _ in range(warm_up):
        generator.step()
    return generator


def step_times(generator: Generator, steps: int) -> Iterator[float]:
    """Milliseconds of each step on the host, the model's own left out."""
    programs: Any = generator.engine.programs  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(steps):
        programs.seconds, start = 0.0, time.perf_counter()
        generator.step()
        yield (time.perf_counter() - start - programs.seconds) * 1e3


class Timed:
    """Programs that add up what their runs take in `seconds`."""

    def __init__(self, programs: Any):
        self._programs, self.seconds = programs, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def forward(self, bucket: Any) -> Any:
        return _TimedProgram(self, self._programs.forward(bucket).run)

    def choose(self, bucket: Any) -> Any:
        return _TimedProgram(self, self._programs.choose(bucket).run)


class _TimedProgram:
    def __init__(self, owner: Timed, run: Any):
        self._owner, self._run = owner, run

    def run(self, *args: Any) -> Any:
        start = time.perf_counter()
        result = self._run(*args)
        self._owner.seconds += time.perf_counter() - start
        return result
