"""A job that answers rows into a JSONL file, and goes on there after it was stopped, however."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trillion_infer.cli.jsonl import output_row, parse_row
from trillion_infer.core.errors import ConfigError, InvalidRequestError
from trillion_infer.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    import grain

    from trillion_infer.llm import LLM


@dataclass(frozen=True)
class BatchJob:
    """rows: (index, row) in the order of the output (`open_rows`). output: JSONL file, a line a row, as generate.py
    writes them. facts: what the answers depend on, as JSON; kept beside the output in OUTPUT.job, so that a job of
    other facts does not go on in it.
    """

    rows: "grain.MapDataset"
    output: Path
    facts: Mapping[str, Any]

    def run(
        self,
        llm: "LLM",
        params: SamplingParams,
        in_flight: int,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> int:
        """Answers the rows that have no line yet, `in_flight` at once at most; the number of lines that are refusals.

        `progress("rows", done, total)` is called after each. Raises ConfigError where another job's lines are in the
        output or another process writes it.
        """
        import grain

        read_ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=64)
        with self._opened() as file:
            done, refused = _whole_lines(file, self.output, self.rows)
            rest = iter(self.rows[done:].to_iter_dataset(read_ahead))
            jobs = ((index, lambda row=row: parse_row(row, params, llm.render_chat)) for index, row in rest)
            for index, answer in llm.generate_each(jobs, in_flight):
                bad = isinstance(answer, InvalidRequestError)
                line = {"index": index, "error": str(answer)} if bad else output_row(index, answer)
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
                file.flush()
                done, refused = done + 1, refused + bad
                if progress:
                    progress("rows", done, len(self.rows))
            os.fsync(file.fileno())
        return refused

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """The output, this process's alone, with its facts beside it."""
        facts, beside = json.dumps(self.facts, sort_keys=True), self.output.with_name(f"{self.output.name}.job")
        with self.output.open("ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{self.output} is being written by another process; give another --output."
                ) from None
            if self.output.stat().st_size and (found := _text(beside)) != facts:
                differs = _difference(found, self.facts)
                raise ConfigError(f"{self.output} holds another job ({differs}); give another --output or remove it.")
            beside.write_text(facts, encoding="utf-8")
            yield file


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _difference(found: str | None, facts: Mapping[str, Any]) -> str:
    """What differs between two jobs, in words."""
    try:
        before = json.loads(found or "")
        names = [name for name in {**before, **facts} if before.get(name) != facts.get(name)]
        return ", ".join(f"{name} was {before.get(name)!r} and is {facts.get(name)!r}" for name in sorted(names))
    except (ValueError, AttributeError):
        return "with nothing that says of which"


def _whole_lines(file: BinaryIO, path: Path, rows: "grain.MapDataset") -> tuple[int, int]:
    """Lines written so far and how many of them are refusals. A line cut short is taken away.

    Raises ConfigError for lines that do not answer the rows from the first one on.
    """
    file.seek(0)
    done = refused = end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            found = json.loads(line)
            if done >= len(rows) or found["index"] != _index(rows, done):
                raise ValueError(f"it is row {found['index']}")
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} line {done + 1} is no line of this job ({error}); remove the file.") from None
        done, refused, end = done + 1, refused + ("error" in found), end + len(line)
    file.truncate(end)
    return done, refused


def _index(rows: "grain.MapDataset", place: int) -> int:
    row: Any = rows[place]
    return row[0]
