"""What is measured: sizes of the workloads, and token ids drawn for them with fixed seeds."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trillion_infer.core.errors import ConfigError

WORKLOADS = ("decode", "prefill", "offline", "startup", "serve", "interference", "transfer", "host", "kv", "speculate")
SEPARATE = ("interference", "transfer", "host", "kv", "speculate")
"""Workloads that "all" leaves out: other setups, and a model of their own."""


@dataclass(frozen=True)
class Sizes:
    """Tokens in and out of each workload, and the number of requests of the offline one."""

    decode_in: int = 32
    decode_out: int = 128
    prefill_in: int = 1024
    offline_requests: int = 32
    offline_in: tuple[int, int] = (16, 512)
    offline_out: int = 64
    startup_in: int = 32
    steady_streams: int = 4
    steady_out: int = 460
    long_prompts: int = 2
    long_in: int = 2000
    kv_prefix: int = 2000
    kv_tail: int = 50

    def scaled(self, scale: float) -> "Sizes":
        """Every size times `scale`, at least 1; two tokens and two requests at least where one would say nothing."""
        if not 0 < scale <= 64:
            raise ConfigError(f"scale is {scale}; it must be above 0 and at most 64.")

        def size(value: int, least: int = 1) -> int:
            return max(least, round(value * scale))

        low, high = self.offline_in
        return Sizes(
            size(self.decode_in),
            size(self.decode_out, 2),
            size(self.prefill_in),
            size(self.offline_requests, 2),
            (size(low), size(high)),
            size(self.offline_out),
            size(self.startup_in),
            self.steady_streams,
            size(self.steady_out, 8),
            size(self.long_prompts, 2),
            size(self.long_in),
            size(self.kv_prefix, 64),
            size(self.kv_tail),
        )


@dataclass(frozen=True)
class Work:
    """Prompts of every workload as token ids. Different draws share no prompt, so no prefix cache can help."""

    sizes: Sizes
    decode: list[int]
    prefill: list[int]
    offline: list[list[int]]
    startup: list[int]
    steady: list[list[int]]
    long: list[list[int]]

    def for_baseline(self, names: Sequence[str], running: int) -> dict[str, Any]:
        """The form that tests/oracle/torch_baseline.py reads; `running`: requests computed at once."""
        sizes = self.sizes
        work = {
            "decode": {"prompt_ids": self.decode, "out": sizes.decode_out},
            "prefill": {"prompt_ids": self.prefill, "out": 1},
            "offline": {"prompts": self.offline, "out": sizes.offline_out, "running": running},
            "startup": {"prompt_ids": self.startup},
        }
        return {name: work[name] for name in names if name in work}


def draw(sizes: Sizes, vocab: int, number: int) -> Work:
    """Draw `number` (0, 1, …) of the prompts: the same lengths in every draw, other ids.

    Ids below 100 (or the lower half of a small vocabulary) are left out, as special tokens tend to lie there.
    """
    lengths, ids = random.Random(0), random.Random(1 + number)
    first = min(100, vocab // 2)

    def prompt(length: int) -> list[int]:
        return [ids.randrange(first, vocab) for _ in range(length)]

    return Work(
        sizes,
        decode=prompt(sizes.decode_in),
        prefill=prompt(sizes.prefill_in),
        offline=[prompt(lengths.randint(*sizes.offline_in)) for _ in range(sizes.offline_requests)],
        startup=prompt(sizes.startup_in),
        steady=[prompt(sizes.decode_in) for _ in range(sizes.steady_streams)],
        long=[prompt(sizes.long_in) for _ in range(sizes.long_prompts)],
    )


def parse_workloads(text: str) -> tuple[str, ...]:
    """Names from "decode,offline" or "all", in the order they are run. Raises ConfigError for others."""
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        return tuple(name for name in WORKLOADS if name not in SEPARATE)
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ConfigError(f"workload {unknown[0]!r} is unknown; there are {', '.join(WORKLOADS)} and all.")
    return tuple(name for name in WORKLOADS if name in names)
