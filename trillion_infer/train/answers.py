"""Conversations answered again by the target itself: a head must learn what its target says, not what others said."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trillion_infer.core.errors import ConfigError
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.llm import LLM


@dataclass(frozen=True)
class Answered:
    """Token ids of a prompt and of the target's answer."""

    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


def read_conversations(path: Path) -> list[dict[str, Any]]:
    """Lines of a JSONL file: {"messages": […]}, {"prompt": text} or {"prompt_token_ids": […]}. Raises ConfigError."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON ({error}); give one object a line.") from error
        if not isinstance(row, dict) or not {"messages", "prompt", "prompt_token_ids"} & set(row):
            raise ConfigError(f"{path}, line {number} has no messages, prompt or prompt_token_ids; give one of them.")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path} holds no conversation; give at least one line.")
    return rows


def prompt_of(llm: LLM, row: Mapping[str, Any]) -> Any:
    """What LLM.generate takes for a line: a conversation ends before its last answer, which is made anew."""
    if "messages" not in row:
        return {name: row[name] for name in ("prompt", "prompt_token_ids") if name in row}
    messages = list(row["messages"])
    while messages and messages[-1].get("role") == "assistant":
        messages.pop()
    return llm.render_chat(messages, add_generation_prompt=True)


def regenerate(
    llm: LLM, rows: Sequence[Mapping[str, Any]], params: SamplingParams, out: Path, batch: int = 64
) -> list[Answered]:
    """The answers of all rows, in order; those that `out` holds already are read from it, the others are appended.

    A line that was cut off by a crash is made again.
    """
    found = list(_read(out)) if out.exists() else []
    with _appending(out, found) as file:
        for start in range(len(found), len(rows), batch):
            part = rows[start : start + batch]
            for output in llm.generate([prompt_of(llm, row) for row in part], params):
                each = Answered(list(output.prompt_token_ids), list(output.outputs[0].token_ids))
                file.write(json.dumps({"prompt_ids": each.prompt_ids, "answer_ids": each.answer_ids}) + "\n")
                found.append(each)
            file.flush()
            os.fsync(file.fileno())
    return found[: len(rows)]


def _appending(out: Path, whole: Sequence[Answered]):
    """The file, cut after its last whole line."""
    if out.exists():
        lines = out.read_bytes().splitlines(keepends=True)[: len(whole)]
        with out.open("r+b") as file:
            file.truncate(sum(map(len, lines)))
    return out.open("a", encoding="utf-8")


def _read(out: Path) -> Iterator[Answered]:
    for line in out.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        row = json.loads(line)
        yield Answered(row["prompt_ids"], row["answer_ids"])
