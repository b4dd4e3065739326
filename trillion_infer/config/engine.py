"""What a user may set about an engine, checked before anything is loaded."""

import os
from dataclasses import dataclass
from pathlib import Path

from trillion_infer.config.experts import parse_expert_memory
from trillion_infer.config.tiers import check_host, parse_disk, parse_store
from trillion_infer.core.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = (None, "auto", "float32", "bfloat16", "int8", "fp8")
QUANTIZE = (None, "none", "keep", "int8", "int4", "int4_64", "fp8")
CPU_ISAS = ("auto", "avx2", "avx512", "neon")
ATTENTION = ("auto", "reference", "pallas", "tpu", "gpu", "cpu")
PAGE_SIZES = (8, 16, 32, 64, 128, 256, 512)


def user_cache(name: str) -> str:
    """Folder of this name in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(root) / "trillion_infer" / name)


@dataclass(frozen=True)
class EngineConfig:
    """Keywords of LLM that shape the engine (DESIGN 3.1), and a few more for experts.

    kv_memory: bytes (above 1) or a fraction of what is free (up to 1); None: all that the compiled programs leave.
    host_kv, disk_kv: bytes of host memory, and FOLDER:BYTES of disk, for KV that the pools give up.
    store: URL of a store that processes share, for all KV.
    sessions: folder of saved sessions. keep_alive: seconds for which a session's KV is pinned after a turn.
    quantize: how weights are rounded while they load (weights/rounding.py); keep: blocks of a GGUF stay as they are;
    none: they are decoded; None: what the platform does best.
    expert_memory: host or host:BYTES keeps routed experts in host memory, BYTES of hot ones on the devices; disk
        likewise in a mapped file.
    speculate: drafters joined by commas: ngram, suffix, grammar, draft:PATH, eagle3:PATH, mtp; None: none.
    draft_len: most drafts of a request in one step, 1 to 15, or 7 where several run; None: 15, 3 if models draft.
    prefill_options: what prefill engines of their own have different (config/roles.py), as "max_running=8,…".
    attention: backend of the attention ops. precompile: compile every bucket without being asked.
    compile_cache: folder of XLA's own cache, "" for none. bundle: folder of executable bundles, "" for none; None:
    the user's cache on CPU, none elsewhere. prefix_caching: share KV of equal prefixes.
    chunked_prefill: False computes each prompt in one step. run_ahead: the host prepares a step while one runs.
    debug_kernels: check the values of every batch before it is sent, which makes every step wait for the last.
    interpret: run Pallas kernels on CPU in interpret mode, for tests; `attention` says whose (pallas: TPU's).
    cpu_isa: instruction set of the native CPU kernels, for the whole process.
    int8_activations: native CPU kernels round activations to int8 where weights are packed and dtype is bfloat16.
    penalties: False saves the sampler's tables and refuses requests that need them.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    max_running: int = 64
    max_waiting: int | None = None
    prefill_chunk: int = 512
    page_size: int | None = None
    kv_memory: float | None = None
    kv_dtype: str | None = None
    quantize: str | None = None
    expert_memory: str | None = None
    speculate: str | None = None
    draft_len: int | None = None
    host_kv: float = 0
    disk_kv: str | None = None
    store: str | None = None
    sessions: str | None = None
    keep_alive: float = 300.0
    prefill_options: str | None = None
    seed: int = 0
    attention: str = "auto"
    precompile: bool = True
    compile_cache: str | None = None
    bundle: str | None = None
    prefix_caching: bool = True
    chunked_prefill: bool = True
    run_ahead: bool = True
    penalties: bool = True
    interpret: bool = False
    debug_kernels: bool = False
    cpu_isa: str = "auto"
    int8_activations: bool = False

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _one_of("quantize", self.quantize, QUANTIZE)
        _one_of("attention", self.attention, ATTENTION)
        _one_of("cpu_isa", self.cpu_isa, CPU_ISAS)
        if self.page_size is not None:
            _one_of("page_size", self.page_size, PAGE_SIZES)
        for field, low in (("max_running", 1), ("prefill_chunk", 1)):
            _at_least(field, getattr(self, field), low)
        for field, low in (("max_model_len", 2), ("max_waiting", 1)):
            if getattr(self, field) is not None:
                _at_least(field, getattr(self, field), low)
        parse_expert_memory(self.expert_memory)
        length = self.draft_len
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= 15):
            raise ConfigError(f"draft_len is {length!r}; it must be a whole number from 1 to 15, or None.")
        check_host(self.host_kv)
        if self.disk_kv:
            parse_disk(self.disk_kv)
        if self.store:
            parse_store(self.store)
        if self.has_tiers and not self.prefix_caching:
            raise ConfigError("host_kv, disk_kv and store keep prefixes and prefix_caching is False; leave one out.")
        if not isinstance(self.keep_alive, int | float) or isinstance(self.keep_alive, bool) or self.keep_alive < 0:
            raise ConfigError(f"keep_alive is {self.keep_alive!r}; it must be a number of seconds, 0 or more.")
        memory = self.kv_memory
        if memory is not None and not (isinstance(memory, int | float) and not isinstance(memory, bool) and memory > 0):
            raise ConfigError(f"kv_memory is {memory!r}; it must be bytes, a fraction in (0, 1], or None.")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed is {self.seed!r}; it must be a whole number.")

    @property
    def has_tiers(self) -> bool:
        """KV is kept beyond device memory."""
        return bool(self.host_kv or self.disk_kv or self.store)

    @property
    def session_folder(self) -> Path | None:
        """Where sessions are saved: `sessions`, or beside the blocks on disk; None where neither is given."""
        if self.sessions:
            return Path(self.sessions).expanduser()
        return parse_disk(self.disk_kv).folder / "sessions" if self.disk_kv else None

    @property
    def expert_files(self) -> Path | None:
        """Folder of the files from which experts are mapped; None where they are not."""
        memory = parse_expert_memory(self.expert_memory)
        return Path(user_cache("experts")) if memory is not None and memory.place == "disk" else None

    @property
    def compile_cache_folder(self) -> str | None:
        """None where caching is off."""
        folder = user_cache("xla") if self.compile_cache is None else self.compile_cache
        return folder or None

    def bundle_folder(self, platform: str) -> str | None:
        """Where bundles of compiled programs lie; None where they are off."""
        if self.bundle is None:
            return user_cache("bundles") if platform == "cpu" else None
        return self.bundle or None


def _one_of(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{field} is {value!r}; it must be one of {', '.join(map(str, allowed))}.")


def _at_least(field: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{field} is {value!r}; it must be a whole number of {low} or more.")
