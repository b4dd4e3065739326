"""Compiling the steps of all buckets, before the first request or behind the engine, and running what was compiled."""

import dataclasses
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.rules import VOCAB_AXES
from trillion_infer.config.model import ModelConfig
from trillion_infer.engine.batch import BatchLayout
from trillion_infer.engine.behind import Behind
from trillion_infer.engine.buckets import SCORE_ROWS, Bucket, Buckets
from trillion_infer.engine.compile_cache import COMPILER
from trillion_infer.engine.state import TABLE_CHUNK, DeviceState, MakePools, update_tables
from trillion_infer.layers.context import Ops
from trillion_infer.sample import SLOT_CHUNK, init_slot

if TYPE_CHECKING:
    from trillion_infer.distributed.calls import Recorder
    from trillion_infer.layers.decoder import Decoder

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Program:
    """A compiled program with what the compiler says of it. Sizes in bytes a device. loaded: from a bundle."""

    name: str
    run: Callable[..., Any]
    seconds: float
    temp_bytes: int
    flops: float
    bytes: float
    loaded: bool = False


class ProgramSource(Protocol):
    """Where programs may be had without compiling. temp_bytes: temporaries of its hungriest program."""

    @property
    def temp_bytes(self) -> int: ...

    def load(self, name: str, args: tuple[Any, ...], donated: tuple[int, ...], mesh: Mesh) -> Program | None:
        """The program for these abstract arguments, None where there is none."""
        ...


@dataclass
class ProgramSet:
    """Programs by name, compiled all at once, behind an engine that answers already, or when first needed. With a
    recorder, other processes repeat every call."""

    recorder: "Recorder | None" = field(default=None, init=False)
    _programs: dict[str, Program] = field(default_factory=dict, init=False)
    _adding: threading.Lock = field(default_factory=threading.Lock, init=False)
    _behind: Behind | None = field(default=None, init=False)
    _compiled: set[str] = field(default_factory=set, init=False)

    @property
    def compiled(self) -> int:
        """Programs that were compiled, or are to be behind the engine: after warm-up it does not change."""
        return len(self._compiled)

    def names(self) -> list[str]:
        """Every program that may be run, those that take longest first."""
        raise NotImplementedError

    def build(self, name: str) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
        """Function, abstract arguments and donated arguments of a program."""
        raise NotImplementedError

    @property
    def all(self) -> tuple[Program, ...]:
        """Those that are there."""
        return tuple(self._programs.values())

    @property
    def coming(self) -> frozenset[str]:
        """Names of what is being made behind the engine."""
        return frozenset() if self._behind is None else self._behind.left

    @property
    def temp_bytes(self) -> int:
        """Temporaries of the hungriest program."""
        return max((program.temp_bytes for program in self._programs.values()), default=0)

    def missing(self) -> list[str]:
        """Names of the programs that are neither compiled nor loaded yet."""
        return [name for name in self.names() if name not in self._programs]

    def compile_all(self, progress: Progress | None = None, names: Sequence[str] | None = None) -> None:
        """Compiles what is missing, or missing of `names`, in parallel; `progress(done, total)` is called as programs
        finish."""
        self._gather(self._compile, self.names() if names is None else names, progress)

    def _gather(self, make: Callable[[str], Program | None], names: Sequence[str], progress: Progress | None) -> None:
        missing = [name for name in names if name not in self._programs]
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1), COMPILER) as pool:
            for program in pool.map(make, missing):
                if program is not None:
                    self._add(program)
                    if progress:
                        progress(sum(name in self._programs for name in names), len(names))

    def _go_behind(self, behind: Behind) -> None:
        """Has its thread make programs while the engine answers."""
        self._behind = behind
        behind.start()

    def wait(self) -> None:
        """Until nothing is `coming`."""
        for name in self.coming:
            self.get(name)
        if self._behind is not None:
            self._behind.wait()

    def stop(self) -> None:
        """Begins no more programs behind the engine, and waits for the one that is under way."""
        if self._behind is not None:
            self._behind.stop()

    def get(self, name: str) -> Program:
        """One of `names`, made now if it is not there yet."""
        if name not in self._programs:
            if self._behind is not None:
                self._behind.need(name)
            if name not in self._programs:
                self._make(name)
        return self._programs[name]

    def _make(self, name: str) -> None:
        self._add(self._load(name) or self._compile(name))

    def _add(self, program: Program) -> None:
        if self.recorder is not None:
            program = replace(program, run=self.recorder.wrap(program.name, program.run))
        with self._adding:
            self._programs[program.name] = program
            if not program.loaded:
                self._compiled.add(program.name)

    def _compile(self, name: str) -> Program:
        return compile_program(name, *self.build(name))

    def _load(self, name: str) -> Program | None:
        return None


@dataclass
class Programs(ProgramSet):
    """The programs of one engine. config: the model's. model: makes its module, for tracing. aux_layers: hidden states
    that models that draft read; None: there are none. whole_prompts: a step computes whole prompts, so that small
    steps cannot do the work of large ones.

    A program that `source` has is taken from there. What nobody compiled ahead is compiled when it is first needed.
    """

    config: ModelConfig
    model: "Callable[[], Decoder]"
    mesh: Mesh
    buckets: Buckets
    ops: Ops
    params: Any
    state: DeviceState
    source: ProgramSource | None = None
    aux_layers: tuple[int, ...] | None = None
    whole_prompts: bool = False
    _ready: tuple[frozenset[str], Buckets] | None = field(default=None, init=False)
    _compiles_behind: bool = field(default=False, init=False)

    def forward(self, bucket: Bucket) -> Program:
        """The step, or where the bucket is of steps by layers, a part of it."""
        return self.get(bucket.name)

    def choose(self, bucket: Bucket) -> Program:
        """Samples a token a row, or, where the bucket verifies, accepts drafts."""
        return self.get(sampler_name(bucket))

    def score(self, bucket: Bucket) -> Program:
        """Scores prompt positions from the hidden states of a mixed bucket."""
        return self.get(f"score_{bucket.tokens}")

    def place(self, value: np.ndarray | np.generic, spec: P) -> jax.Array:
        """A host array on the devices of the mesh."""
        sharding = NamedSharding(self.mesh, spec)
        if self.recorder is None:
            return jax.device_put(value, sharding)
        return self.recorder.place(np.asarray(value), sharding)

    @property
    def update_tables(self) -> Program:
        return self.get("update_tables")

    @property
    def init_slot(self) -> Program:
        return self.get("init_slot")

    def names(self) -> list[str]:
        """Every program an engine with these buckets may run, the steps first."""
        steps = [bucket.name for bucket in (*self.buckets.all, *self.buckets.layered)]
        chooses = [f"choose_{rows}" for rows in self.buckets.row_counts]
        scores = sorted({f"score_{bucket.tokens}" for bucket in self.buckets.mixed})
        chooses += dict.fromkeys(sampler_name(bucket) for bucket in self.buckets.verify)
        return [*chooses, *steps, "update_tables", "init_slot", "make_pools", *scores]

    def _programs_of(self, bucket: Bucket) -> list[str]:
        """What steps of a bucket run, beside what all do."""
        scores = [f"score_{bucket.tokens}"] if bucket in self.buckets.mixed else []
        return [sampler_name(bucket), bucket.name, *scores]

    def _by_need(self, buckets: Sequence[Bucket]) -> list[str]:
        """Programs of steps of these buckets, and of every step; those of a short prompt first, and of them the sampler
        that takes longest to load."""
        early = ["make_pools", sampler_name(buckets[0]), "update_tables", buckets[0].name, "init_slot"]
        return list(dict.fromkeys([*early, *(name for bucket in buckets for name in self._programs_of(bucket))]))

    def _every_by_need(self) -> list[str]:
        """After the first the smallest decode, for a single answer, and the largest step, for long prompts."""
        buckets = self.buckets
        first = buckets.first(self.whole_prompts)
        return self._by_need([first, *buckets.decode[:1], max(buckets.mixed), *buckets.all, *buckets.layered])

    def load_all(self, progress: Progress | None = None) -> None:
        """Takes what is missing from the source, as far as it goes; `progress` as for `compile_all`."""
        self._gather(self._load, self.names(), progress)

    def load_behind(self) -> None:
        """Has a thread take every program from the source, while the engine is made and after; whoever needs one waits
        for that one alone. What a first request takes comes first."""
        self._go_behind(Behind(self._every_by_need(), self._make, lambda: None))

    def compile_first(self, progress: Progress | None = None) -> None:
        """Compiles what a short prompt and its answer take: one step, that can do the work of all others too."""
        first = set(self._by_need([self.buckets.first(self.whole_prompts)]))
        self.compile_all(progress, [name for name in self.names() if name in first])

    def compile_behind(self, then: Callable[[], None]) -> None:
        """Has a thread compile what is missing, while steps get along with what is there (`ready`), and call `then`."""
        self._compiles_behind = True
        missing = [name for name in self._every_by_need() if name not in self._programs]
        self._compiled.update(missing)
        self._go_behind(Behind(missing, lambda name: self._add(self._compile(name)), then))

    @property
    def ready(self) -> Buckets:
        """The buckets of which no step has to wait for a compilation; the same object while nothing changes."""
        coming = self.coming if self._compiles_behind else frozenset()
        if self._ready is None or self._ready[0] != coming:
            found = self.buckets.among(lambda bucket: coming.isdisjoint(self._programs_of(bucket)))
            self._ready = (coming, found)
        return self._ready[1]

    @property
    def temp_bytes(self) -> int:
        coming = self.source.temp_bytes if self.coming and self.source is not None else 0
        return max(super().temp_bytes, coming)

    def _load(self, name: str) -> Program | None:
        if self.source is None:
            return None
        args, donated = self.arguments(name)
        return self.source.load(name, args, donated, self.mesh)

    def facts(self) -> dict[str, Any]:
        """Everything about this object that shapes its programs, as JSON, whatever the pools' pages."""
        config = replace(self.config, eos_ids=frozenset())
        arrays = []
        for path, leaf in jax.tree_util.tree_flatten_with_path((self.params, self.state))[0]:
            in_pool = any(leaf is part for part in jax.tree.leaves(self.state.kv_pools))
            shape = leaf.shape[:1] + leaf.shape[2:] if in_pool else leaf.shape
            arrays.append(
                (jax.tree_util.keystr(path), shape, str(leaf.dtype), str(leaf.sharding.spec), leaf.sharding.memory_kind)
            )
        return {
            "model": config.family,
            "config": _digest(config),
            "arrays": _digest(arrays),
            "buckets": _digest(replace(self.buckets, layered=())),
            "aux_layers": str(self.aux_layers),
            "ops": dataclasses.asdict(self.ops),
        }

    def build(self, name: str) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
        """Function, abstract arguments and donated arguments of a program."""
        return self.function(name), *self.arguments(name)

    def function(self, name: str) -> Callable[..., Any]:
        """What a program is traced from. The model's modules are imported here, since loading needs none of them."""
        if name == "update_tables":
            return update_tables
        if name == "make_pools":
            return MakePools(self.state.kv_pools, self.mesh)
        if name == "init_slot":
            return init_slot
        model = self.model()  # which imports flax as it should be
        from trillion_infer.engine import step

        slots = self.state.tables[0].shape[0] // self.mesh.shape["data"]
        if name.startswith("score_"):
            return step.make_score(model, self.mesh, self.ops, self.params)
        if name.startswith("choose_"):
            return step.make_choose(slots)
        if name.startswith("accept_"):
            return step.make_accept(slots)
        bucket = self._bucket(name)
        if bucket.by_layers:
            return step.make_layers(model, self.mesh, bucket, self.state, self.ops, self.params)
        return step.make_forward(model, self.mesh, bucket, self.state, self.ops, self.params, self.aux_layers)

    def arguments(self, name: str) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Abstract arguments of a program, and the numbers of those that are donated."""
        replicated = partial(abstract, NamedSharding(self.mesh, P()))
        by_data = NamedSharding(self.mesh, P("data"))
        state, data = self.state, self.mesh.shape["data"]
        if name == "update_tables":
            return (state.tables, replicated((TABLE_CHUNK, 4))), (0,)
        if name == "make_pools":
            return (), ()
        if name == "init_slot":
            return (state.sampler, replicated((3,)), replicated((3, SLOT_CHUNK))), (0,)
        if name.startswith("score_"):
            tokens = int(name.removeprefix("score_")) * data
            hidden = abstract(by_data, (tokens, self.config.width), self.ops.dtype)
            return (self.params, hidden, replicated(()), replicated((SCORE_ROWS,))), ()
        if name.startswith("choose_"):
            return self._sampler_arguments(Bucket(0, int(name.removeprefix("choose_")))), (0,)
        bucket = self._bucket(name)
        if name.startswith("accept_"):
            return self._sampler_arguments(bucket), (0,)
        packed = abstract(by_data, (data, BatchLayout(bucket).size))
        args = (self.params, state.pools, state.tables, state.sampler.last_token, packed)
        if bucket.by_layers:
            x = abstract(by_data, (data * bucket.tokens, self.config.width), self.ops.dtype)
            args = (*args, x, replicated((2,)))
        return args, (1,)

    def _bucket(self, name: str) -> Bucket:
        """The bucket of a step, or of the sampler after steps with drafts."""
        every = (*self.buckets.all, *self.buckets.layered)
        return next(b for b in every if name in (b.name, sampler_name(b)))

    def _sampler_arguments(self, bucket: Bucket) -> tuple[Any, ...]:
        layout, data = BatchLayout(bucket), self.mesh.shape["data"]
        replicated = partial(abstract, NamedSharding(self.mesh, P()))
        rows, vocab = data * bucket.sequences * bucket.width, self.state.sampler_vocab
        packed = abstract(NamedSharding(self.mesh, P("data")), (data, layout.row_fields, bucket.sequences))
        logits = abstract(NamedSharding(self.mesh, P("data", VOCAB_AXES)), (rows, vocab), jnp.float32)
        mask = replicated((rows, -(-vocab // 32)), jnp.uint32)
        return self.state.sampler, packed, logits, mask, replicated((), jnp.bool_)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def compile_program(name: str, fn: Callable[..., Any], args: tuple[Any, ...], donate: tuple[int, ...]) -> Program:
    """Traces, lowers and compiles `fn` for abstract arguments that carry shardings. Outputs keep the inputs' shardings
    where they are donated. It is traced once, for the shapes of its outputs, which jax keeps by the function."""

    @functools.wraps(fn)
    def own(*values: Any) -> Any:  # jax hands out what it compiled of the same function, which may not be fresh
        return fn(*values)

    start = time.perf_counter()
    shardings = fn.shardings if isinstance(fn, MakePools) else _output_shardings(own, args, donate)
    compiled = jax.jit(own, donate_argnums=donate, out_shardings=shardings).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return Program(
        name,
        compiled,
        seconds,
        memory.temp_size_in_bytes if memory else 0,
        float(cost.get("flops", 0.0)),
        float(cost.get("bytes accessed", 0.0)),
    )


def _output_shardings(fn: Callable[..., Any], args: tuple[Any, ...], donate: tuple[int, ...]) -> Any:
    """Donated state comes back as it went in, and first. What the next program reads keeps its split over `data` (and
    the vocabulary's axes); the rest is replicated, so that the host reads it from one device."""
    mesh = jax.tree.leaves(args)[0].sharding.mesh

    def of(spec: P) -> NamedSharding:
        return NamedSharding(mesh, spec)

    out = jax.eval_shape(fn, *args)
    if not donate:
        return jax.tree.map(lambda _: of(P()), out)
    kept = jax.tree.map(lambda leaf: leaf.sharding, args[donate[0]])
    if jax.tree.structure(out) == jax.tree.structure(args[donate[0]]):
        return kept
    if len(out) == 2:
        return kept, jax.tree.map(lambda _: of(P()), out[1])
    rest = jax.tree.map(lambda _: of(P("data")), out[4:])
    return kept, of(P("data")), of(P("data", VOCAB_AXES)), of(P("data")), *rest


def sampler_name(bucket: Bucket) -> str:
    """The program that chooses a bucket's tokens; buckets with equal rows share it."""
    return f"accept_{bucket.sequences}x{bucket.width}" if bucket.verifies else f"choose_{bucket.sequences}"


def abstract(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
