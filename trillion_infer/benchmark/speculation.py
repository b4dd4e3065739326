"""Speculation against none, in one run: the same prompts, by turns, through two engines that differ in it alone."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from trillion_infer.core.outputs import RequestOutput
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.llm import LLM

DRAFTERS = "ngram,suffix"
"""What is measured where the options name no drafters."""

BATCH = 32
FORMULAIC = ("tool", "edit")
KINDS = (*FORMULAIC, "chat")
OUT = 160
"""Tokens of an answer, at most."""


def prompts(kind: str, split: str = "measure") -> list[str]:
    """User messages that come with the library. tool, edit: formulaic, in splits tune and measure; chat: free."""
    name = "chat_heldout" if kind == "chat" else "speculate"
    text = resources.files("trillion_infer.benchmark").joinpath(f"data/{name}.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    chosen = [row for row in rows if kind == "chat" or (row["kind"], row["split"]) == (kind, split)]
    return [row["messages"][0]["content"] for row in chosen]


def speculate(
    options: Mapping[str, Any], repeats: int, split: str = "measure", tell: Callable[[str], None] = lambda line: None
) -> Iterator[tuple[str, float]]:
    """Decoding speed, batch 1 and BATCH, with and without drafts, and their ratio; acceptance by drafter and workload.

    Speed at batch 1 counts from the first token of each answer to its last: prompts do not matter. Every request
    is of a tenant of its own, so that no text of an earlier one helps; `history` has the formulaic prompts once more,
    each asked once by one tenant, as an agent asks. Raises AssertionError if an answer differs.
    """
    drafters = options.get("speculate") or DRAFTERS
    shared = {**options, "max_running": BATCH}
    pair = {"plain": LLM(**{**shared, "speculate": None}), "drafts": LLM(**{**shared, "speculate": drafters})}
    try:
        for llm in pair.values():
            llm.wait_for_programs()
            for _ in range(3):  # what steps cost must be known before drafts are tried
                _answers(llm, prompts("edit", "tune")[:1], "warm-up")
            for kind in ("chat", "edit"):  # answers of one length, and of several: every number that may run together
                _answers(llm, (prompts(kind, "tune") * BATCH)[:BATCH], "warm-up")
        for kind in KINDS:
            yield from _alone(pair, kind, prompts(kind, split), repeats)
        for kind in FORMULAIC:
            yield from _alone(pair, kind, prompts(kind, split), repeats, history=True)
        for kind in KINDS:
            tell(f"batch {BATCH}, {kind}")
            texts = prompts(kind, split) if kind == "chat" else prompts(kind, "measure") + prompts(kind, "tune")
            yield from _together(pair, kind, (texts * BATCH)[:BATCH], repeats)
    finally:
        for llm in pair.values():
            llm.close()


def _alone(
    pair: Mapping[str, LLM], kind: str, texts: Sequence[str], repeats: int, history: bool = False
) -> Iterator[tuple[str, float]]:
    label = f"{kind}_history" if history else kind
    seconds, tokens = dict.fromkeys(pair, 0.0), dict.fromkeys(pair, 0)
    before = _counts(pair["drafts"])
    for turn in range(repeats):
        for number, text in enumerate(texts):
            found = {}
            for name in sorted(pair, reverse=(turn + number) % 2 == 1):
                tenant = f"{label} {turn}" if history else f"{label} {turn} {number}"
                (output,) = _answers(pair[name], [text], tenant)
                times = output.metrics.token_times
                seconds[name] += times[-1] - times[0]
                tokens[name] += len(times) - 1
                found[name] = output.outputs[0].token_ids
            assert found["plain"] == found["drafts"], f"answers to {text!r} differ with drafts and without"
    speed = {name: tokens[name] / seconds[name] for name in pair}
    yield f"{label}_plain_tok_s", speed["plain"]
    yield f"{label}_drafts_tok_s", speed["drafts"]
    yield f"{label}_drafts_ratio", speed["drafts"] / speed["plain"]
    yield from _acceptance(label, before, _counts(pair["drafts"]))


def _together(pair: Mapping[str, LLM], kind: str, texts: Sequence[str], repeats: int) -> Iterator[tuple[str, float]]:
    seconds = dict.fromkeys(pair, 0.0)
    for turn in range(repeats):
        for name in sorted(pair, reverse=turn % 2 == 1):
            outputs = _answers(pair[name], texts, f"{kind} together {turn}")
            times = [time for output in outputs for time in output.metrics.token_times]
            seconds[name] += max(times) - min(times)
    yield f"{kind}_batch{BATCH}_ratio", seconds["plain"] / seconds["drafts"]


def _answers(llm: LLM, texts: Sequence[str], tenant: str) -> list[RequestOutput]:
    rendered = [llm.render_chat([{"role": "user", "content": t}], add_generation_prompt=True) for t in texts]
    ids = [f"{tenant} {number}" for number in range(len(texts))]
    params = SamplingParams(temperature=0, max_tokens=OUT)
    for request_id, text in zip(ids, rendered, strict=True):
        llm.generator.add(request_id, text, params, cache_salt=tenant)
    while any(not llm.generator.output(request_id).finished for request_id in ids):
        llm.generator.step()
    return [llm.generator.take(request_id) for request_id in ids]


def _counts(llm: LLM) -> dict[str, dict[str, float]]:
    """By drafter: drafts, tokens proposed and accepted so far."""
    found: dict[str, dict[str, float]] = {}
    for key, value in llm.stats().items():
        if match := re.fullmatch(r"speculate\.(\w+)\.(drafts|proposed|accepted)", key):
            found.setdefault(match[1], {})[match[2]] = value
    return found


def _acceptance(kind: str, before: Mapping, after: Mapping) -> Iterator[tuple[str, float]]:
    for drafter, counts in after.items():
        new = {name: value - before.get(drafter, {}).get(name, 0) for name, value in counts.items()}
        if new["drafts"]:
            yield f"{kind}_{drafter}_acceptance_length", 1 + new["accepted"] / new["drafts"]
            yield f"{kind}_{drafter}_acceptance_rate", new["accepted"] / new["proposed"]
