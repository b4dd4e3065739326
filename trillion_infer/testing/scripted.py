"""An engine whose model says what a script says, at once: for tests of everything around the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from sharding.mesh import make_mesh
from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.cache.naming import BlockNamer
from trillion_infer.config.cache import CacheGroup
from trillion_infer.config.scheduler import SchedulerConfig
from trillion_infer.engine.batch import BatchLayout
from trillion_infer.engine.buckets import Bucket, make_buckets
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.state import DeviceState
from trillion_infer.generation.generator import Generator
from trillion_infer.generation.prompts import PromptReader
from trillion_infer.sample import Sampled
from trillion_infer.sample.state import SamplerState
from trillion_infer.schedule.scheduler import Scheduler
from trillion_infer.text.tokenizer import Tokenizer

Script = Callable[[int, int], int]
"""script(number of the token being chosen, length of the prompt) -> token id."""


def follow(tokens: Sequence[int]) -> Script:
    """Emits these ids in turn, the last one for ever."""
    return lambda index, prompt_len: tokens[min(index, len(tokens) - 1)]


@dataclass
class ScriptedPrograms:
    """Stands for engine.programs.Programs: reads the packed batch as the device would, and answers by the script.

    Masks are obeyed: where the scripted token is forbidden, the lowest allowed one is chosen.
    """

    script: Script
    buckets: Any
    mesh: Any
    compiled: int = 0
    coming: frozenset[str] = frozenset()
    steps: int = 0
    update_tables: Any = field(default_factory=lambda: SimpleNamespace(run=lambda tables, updates: tables))
    init_slot: Any = field(default_factory=lambda: SimpleNamespace(run=lambda sampler, header, chunk: sampler))

    @property
    def ready(self) -> Any:
        return self.buckets

    def stop(self) -> None:
        """Nothing is made behind the engine."""

    def place(self, value: Any, spec: Any) -> jax.Array:
        """As Programs.place, on the one device."""
        return jax.device_put(value)

    def forward(self, bucket: Bucket) -> Any:
        """logits are the scripted ids themselves."""
        layout = BatchLayout(bucket)

        def run(params: Any, pools: Any, tables: Any, last_token: Any, packed: jax.Array) -> Any:
            self.steps += 1
            views = layout.views(np.asarray(packed)[0])
            pairs = zip(views["kv_lens"].tolist(), views["prompt_lens"].tolist(), strict=True)
            ids = [self.script(max(kv - prompt, 0), prompt) for kv, prompt in pairs]
            return pools, None, np.asarray(ids, np.int32), None

        return SimpleNamespace(run=run)

    def choose(self, bucket: Bucket) -> Any:
        def run(sampler: Any, rows: Any, ids: np.ndarray, mask: Any, has_mask: Any) -> Any:
            if bool(has_mask):
                ids = np.asarray([_allowed(i, row) for i, row in zip(ids.tolist(), np.asarray(mask), strict=True)])
            return sampler, _sampled(ids)

        return SimpleNamespace(run=run)


class _HostTokens(np.ndarray):
    """Tokens that are on the host already."""

    def copy_to_host_async(self) -> None:
        return


def _sampled(ids: np.ndarray) -> Sampled:
    count = len(ids)
    zeros, alternatives = np.zeros(count, np.float32), np.zeros((count, 20), np.float32)
    tokens = ids.astype(np.int32).view(_HostTokens)
    ranks = np.ones(count, np.int32)
    return Sampled(tokens, zeros, ranks, np.tile(ids[:, None], (1, 20)), alternatives, ranks * 0)  # pyright: ignore


def _allowed(token: int, mask_row: np.ndarray) -> int:
    if mask_row[token >> 5] >> np.uint32(token & 31) & 1:
        return token
    bits = np.unpackbits(mask_row.astype("<u4").view(np.uint8), bitorder="little")
    return int(np.argmax(bits))


def scripted_generator(
    script: Script | Sequence[int],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int = 512,
    max_running: int = 8,
    max_model_len: int = 4096,
    num_pages: int = 512,
    page_size: int = 16,
    prefill_chunk: int = 64,
    run_ahead: bool = True,
    expected_output: int = 256,
) -> Generator:
    """A Generator over a real scheduler and KV accounting whose model is `script` (a function, or ids to follow)."""
    group = CacheGroup("scripted", None, num_pages)
    config = SchedulerConfig(
        max_running=max_running,
        max_batch_tokens=max(prefill_chunk, max_running + 1),
        prefill_chunk=prefill_chunk,
        max_model_len=max_model_len,
        expected_output=expected_output,
    )
    scheduler = Scheduler(config, KVCache([group], page_size, BlockNamer(b"scripted", b"", page_size)))
    chosen = script if callable(script) else follow(script)
    programs = ScriptedPrograms(chosen, make_buckets(max_running, config.max_batch_tokens), make_mesh(None))
    state = DeviceState((), (), SamplerState.create(1, -(-vocab_size // 32) * 32))
    engine = Engine(programs, state, None, [scheduler], run_ahead)  # pyright: ignore[reportArgumentType]
    eos = tokenizer.eos_ids if tokenizer else frozenset()
    return Generator(engine, PromptReader(tokenizer, vocab_size=vocab_size, eos_ids=eos, max_model_len=max_model_len))
