"""The Python API: `LLM` loads a model onto a mesh and answers."""

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from sharding.mesh import make_mesh, sub_meshes
from trillion_infer.config.deployment import find_deployment
from trillion_infer.config.engine import EngineConfig
from trillion_infer.config.hf import eos_union
from trillion_infer.core.errors import ConfigError, InvalidRequestError, ModelLoadError
from trillion_infer.core.importing import without_scan
from trillion_infer.core.outputs import RequestOutput
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.core.timeline import Timeline
from trillion_infer.engine.build import BuildReport, build_engine, plan_engine
from trillion_infer.engine.compile_cache import enable_compile_cache
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.memory import with_unaccounted
from trillion_infer.engine.ops import multiplies_blocks, platform_of
from trillion_infer.generation import batches
from trillion_infer.generation.generator import Generator, TextStream
from trillion_infer.generation.prompts import Prompt, PromptReader
from trillion_infer.generation.session_files import SessionFolder
from trillion_infer.generation.sessions import Sessions
from trillion_infer.models import read_family
from trillion_infer.text.tokenizer import Tokenizer
from trillion_infer.weights.checkpoint import Checkpoint, open_checkpoint
from trillion_infer.weights.load import LoadReport, load_params
from trillion_infer.weights.packing import Packing, choose_packing
from trillion_infer.weights.random_init import RandomCheckpoint, init_params
from trillion_infer.weights.shards import in_files

if TYPE_CHECKING:
    from trillion_infer.distributed.group import Group
    from trillion_infer.engine.disaggregated import DisaggregatedEngine
    from trillion_infer.engine.many_hosts import FollowingEngine

Progress = Callable[[str, int, int], None]


class LLM:
    """A model on a mesh, ready to answer.

    Args:
      model: Hugging Face directory, .gguf file, Orbax directory, or hub id; or what a config.json says, as a dict, for
        a model of that shape with random weights.
      config: name of a deployment in configs/, or a path to such a file; keywords given here win over it.
      dtype: float32 | bfloat16 | auto (the checkpoint's own).
      mesh: "data=1,tensor=4", a dict, or a jax.sharding.Mesh.
      disaggregate: "prefill=4,decode=4" or "prefill=2x2,decode=4" (groups x devices): each role on its own devices.
      prefill_options: what prefill meshes have different, as "max_running=8,prefill_chunk=2048,kv_dtype=bfloat16".
      max_model_len: prompt and answer together, in tokens; None: the model's own limit.
      max_running: requests computed at once (a data shard). prefill_chunk: prompt tokens a step.
      page_size: tokens a KV page. kv_memory: bytes, or a fraction of what is free; None: all that the compiled
        programs leave (on CPU at most 512 MiB).
      kv_dtype: float32 | bfloat16; int8 | fp8, with a scale for each position and head; None: as dtype.
      quantize: int8 | int4 | int4_64 | fp8: round the weights of products while loading; activations stay as they are.
        keep: blocks of a GGUF stay packed (CPU); none: nothing is packed; None: experts stay as they were stored, and
        blocks of a GGUF where native CPU kernels multiply them.
      expert_memory: host | disk, or either with :BYTES: routed experts stay in host memory or in a mapped file (CPU),
        the hot ones in BYTES of the devices'.
      host_kv: bytes of host memory, disk_kv: "FOLDER:BYTES", for KV that the device gives up. What disk_kv holds is
        found again by the next LLM of the same model and dtype; `close` stores what is still on the device.
      store: "mooncake://HOST:PORT", or a folder as fsspec names it ("file:///mnt/kv"), for KV that LLMs share.
      sessions: folder of saved sessions; None: beside the blocks of disk_kv. keep_alive: seconds for which a session's
        KV is pinned on the device after a turn.
      speculate: drafters of speculative decoding, joined by commas: ngram | suffix | grammar | draft:PATH (a smaller
        model of the same vocabulary) | eagle3:PATH (a head trained for this model) | mtp (layers of the checkpoint).
      draft_len: most drafts of a request in one step, 1 to 15, or 7 where several run; None: 15, 3 if models draft.
      seed: of requests that name none.
      attention: backend of the attention ops: auto | reference | pallas | tpu | gpu | cpu.
      interpret: run the Pallas kernels of `attention` (pallas: TPU's) on CPU in interpret mode, for tests.
      debug_kernels: check page tables and lengths before every step and raise KernelInputError, at some cost.
      cpu_isa: instruction set of this process's native CPU kernels: auto (the best there is) | avx2 | avx512 | neon.
      int8_activations: on CPU with dtype bfloat16, round what meets packed weights to 8 bits: faster, less exact.
      precompile: compile every program without being asked; False: when a request first needs it. On CPU those of a
        first request are compiled before the LLM is ready, in which all others can be served too, and the rest while
        it answers; elsewhere, and with `speculate`, all before. compile_cache: folder for compiled programs, "" for
        none; None: the user's cache folder.
      bundle: folder of executable bundles (scripts/compile.py --bundle writes them): programs are loaded from the one
        that fits model, mesh, devices, versions and code, without tracing; what it lacks is compiled and added. "" for
        none; None: the user's cache folder on CPU, none elsewhere. A bundle is machine code: use only your own.
      prefix_caching: reuse KV of equal prefixes. chunked_prefill: False computes each prompt in one step.
      startup_trace: file for a Chrome trace of the start-up; `llm.report.timeline.bars()` shows the same as text.
      max_waiting: most requests that may queue. progress: called with (phase, done, total) while loading.
      group_key_file: file with the secret by which processes of one program know each other; None: one made for them.

    Raises ConfigError, ModelLoadError or OutOfMemoryError with one sentence that says what to change.
    """

    def __init__(
        self,
        model: str | Path | Mapping[str, Any],
        config: str | None = None,
        dtype: str = "auto",
        mesh: str | Mapping[str, int] | Mesh | None = None,
        disaggregate: str | None = None,
        prefill_options: str | None = None,
        max_model_len: int | None = None,
        max_running: int = 64,
        prefill_chunk: int = 512,
        page_size: int | None = None,
        kv_memory: float | None = None,
        kv_dtype: str | None = None,
        quantize: str | None = None,
        expert_memory: str | None = None,
        host_kv: float = 0,
        disk_kv: str | None = None,
        store: str | None = None,
        sessions: str | None = None,
        keep_alive: float = 300.0,
        speculate: str | None = None,
        draft_len: int | None = None,
        seed: int = 0,
        attention: str = "auto",
        debug_kernels: bool = False,
        cpu_isa: str = "auto",
        int8_activations: bool = False,
        interpret: bool = False,
        precompile: bool = True,
        compile_cache: str | None = None,
        bundle: str | None = None,
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
        max_waiting: int | None = None,
        group_key_file: str | None = None,
        startup_trace: str | None = None,
        progress: Progress | None = None,
    ):
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        timeline = Timeline.of_process()
        options = _with_deployment(options)
        engine_fields = EngineConfig.__dataclass_fields__
        engine_config = EngineConfig(**{name: value for name, value in options.items() if name in engine_fields})
        if engine_config.sessions:
            SessionFolder(engine_config.session_folder).check()
        if engine_config.compile_cache_folder:
            enable_compile_cache(engine_config.compile_cache_folder)
        with timeline.phase("open checkpoint"):
            checkpoint = RandomCheckpoint(model, seed) if isinstance(model, Mapping) else open_checkpoint(model)
        pool = ThreadPoolExecutor(1)
        loading = pool.submit(load_tokenizer, checkpoint, timeline)  # while the devices' runtime starts, too
        pool.shutdown(wait=False)
        try:
            with without_scan():  # which jax would do when it is first asked for devices
                roles = sub_meshes(options["disaggregate"]) if options["disaggregate"] else None
                self.mesh = roles["decode"][0] if roles else make_mesh(options["mesh"])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if roles and options["mesh"] is not None:
            raise ConfigError("mesh and disaggregate are both given; disaggregate makes its own meshes.")
        if options["prefill_options"] and not roles:
            raise ConfigError("prefill_options are those of prefill meshes of their own; give disaggregate too.")
        self._group = _join(self.mesh, options)
        self.load_report: LoadReport | None = None
        packing = Packing()
        if not isinstance(checkpoint, RandomCheckpoint):
            native = multiplies_blocks(self.mesh, engine_config.attention)
            packing = choose_packing(checkpoint, engine_config.quantize, platform_of(self.mesh), native)
        family = read_family(checkpoint.config, checkpoint.generation_config)

        def load(specs: dict[str, Any], shardings: dict[str, Any], dtype: str) -> dict[str, jax.Array]:
            files = engine_config.expert_files
            if isinstance(checkpoint, RandomCheckpoint):
                params = init_params(specs, shardings, dtype, checkpoint.seed, engine_config.quantize)
                return params if files is None else in_files(params, files)
            tell = None if progress is None else partial(progress, "load")
            tied = {family.names.head: family.names.embed}
            params, self.load_report = load_params(
                specs,
                checkpoint,
                shardings,
                dtype=dtype,
                ignore=family.ignore,
                tied=tied,
                progress=tell,
                mapped=files,
                **packing.options,
            )
            return params

        fingerprint = checkpoint.fingerprint() + (engine_config.quantize or packing.name).encode()
        self.fingerprint = fingerprint
        self.engine: Engine | DisaggregatedEngine | FollowingEngine
        target = None if isinstance(checkpoint, RandomCheckpoint) else checkpoint
        drafters = ()
        if engine_config.speculate:
            from trillion_infer.engine.draft_plan import open_drafters

            drafters = open_drafters(engine_config.speculate, target)
        if roles is None:
            with timeline.phase("plan"):
                blueprint = plan_engine(family, self.mesh, engine_config, packing.abstract, drafters)
            if self._group is not None:
                from trillion_infer.engine.many_hosts import plan_of

                self._group.require_equal(plan_of(blueprint, fingerprint))
            self.engine, self.report = build_engine(
                blueprint, load, fingerprint, progress, group=self._group, timeline=timeline
            )
        else:
            from trillion_infer.engine.build_disaggregated import build_disaggregated

            self.engine, blueprint, self.report = build_disaggregated(
                family, engine_config, roles, load, fingerprint, progress, packing.abstract, timeline, drafters
            )
        self.tokenizer: Tokenizer | None = loading.result()
        self.blueprint = blueprint
        self.model_config = family.config
        reader = PromptReader(
            self.tokenizer,
            vocab_size=family.config.vocab,
            eos_ids=eos_union(checkpoint.config, checkpoint.generation_config) | family.config.eos_ids,
            max_model_len=blueprint.max_model_len,
            seed=engine_config.seed,
            penalties=engine_config.penalties,
        )
        self.sessions = Sessions(
            self.engine,  # pyright: ignore[reportArgumentType]
            self.tokenizer,
            fingerprint.hex(),
            engine_config.session_folder,
            engine_config.keep_alive,
        )
        self.generator = Generator(self.engine, reader, self.sessions)  # pyright: ignore[reportArgumentType]
        self._ids = itertools.count()
        self._template = None
        if startup_trace:
            timeline.write_trace(startup_trace)

    @property
    def max_model_len(self) -> int:
        return self.blueprint.max_model_len

    @property
    def leads(self) -> bool:
        """This process takes requests: the only one, or process 0 of a mesh over several."""
        return self._group is None or self._group.leads

    def follow(self) -> None:
        """Takes part in what the leading process computes until that closes its LLM; for every other process.

        Raises GroupError where the leader is lost or computes something else.
        """
        if self.leads:
            raise ConfigError("follow is for processes of a mesh over several, except process 0, which takes requests.")
        self.engine.follow()  # pyright: ignore[reportAttributeAccessIssue]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        session_id: str | Sequence[str] | None = None,
        tenant: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Completes one prompt or many, batched; outputs come in the order of the prompts.

        A prompt is text, a list of token ids, or {"prompt": …} | {"prompt_token_ids": …}. `sampling_params` is one
        for all or one each. `session_id`: of one prompt, or one each: the sessions whose next turns they are; a text
        that goes on from a session's turns extends their exact ids. `tenant`: of all prompts, or one each: no KV and
        no session of one tenant is found by another; "NAME/PART" sets parts of a tenant apart, too.
        `llm.sessions.delete_tenant` deletes what a tenant left in every tier. Raises InvalidRequestError (a ValueError)
        before anything runs if a prompt is refused.
        """
        batch = batches.as_batch(prompts)
        params, tenants = batches.params_for(batch, sampling_params), batches.tenants_for(batch, tenant)
        sessions = batches.sessions_for(batch, session_id, tenants)
        prepared = [
            self.generator.prepare(f"generate-{next(self._ids)}", prompt, each, session_id=session, cache_salt=salt)
            for prompt, each, session, salt in zip(batch, params, sessions, tenants, strict=True)
        ]
        ids = [state.request_id for state, _ in prepared]
        try:
            for each in prepared:
                self.generator.submit(each)
            while any(not self.generator.output(request_id).finished for request_id in ids):
                self.generator.step()
        except BaseException:
            for request_id in ids:
                self.generator.abort(request_id)
            raise
        return [self.generator.take(request_id) for request_id in ids]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session_id: str | Sequence[str] | None = None,
        tenant: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, rendered by the model's own chat template."""
        if not messages:
            raise InvalidRequestError("messages is empty; give at least one message.", param="messages")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        rendered = [self.render_chat(each, **options) for each in conversations]
        return self.generate(rendered, sampling_params, session_id, tenant)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt text of a conversation; `options` as ChatTemplate.render."""
        if self._template is None:
            if self.tokenizer is None:
                raise InvalidRequestError("chat needs a tokenizer with a chat template, and the model has none.")
            from trillion_infer.text.chat import chat_template

            self._template = chat_template(self.tokenizer)
        return self._template.render([dict(message) for message in messages], **options)

    def generate_each(
        self,
        prompts: Iterable[tuple[int, Callable[[], tuple[Prompt, SamplingParams]]]],
        in_flight: int | None = None,
    ) -> Iterator[tuple[int, RequestOutput | InvalidRequestError]]:
        """Completes (index, function that gives prompt and parameters); yields (index, output) in the order given.

        A prompt that is refused, or whose function raises InvalidRequestError, yields that error; the others run.
        in_flight: most prompts read whose output is not yielded yet, so that `prompts` may be endless; None: all.
        """
        queue: deque[tuple[int, str | InvalidRequestError]] = deque()
        source = iter(prompts)
        try:
            while True:
                room = None if in_flight is None else in_flight - len(queue)
                queue.extend((index, self._add_each(read)) for index, read in itertools.islice(source, room))
                if not queue:
                    return
                index, entry = queue[0]
                if isinstance(entry, str):
                    while not self.generator.output(entry).finished:
                        self.generator.step()
                    entry = self.generator.take(entry)
                queue.popleft()
                yield index, entry
        finally:
            for _, entry in queue:
                if isinstance(entry, str):
                    self.generator.abort(entry)

    def _add_each(self, read: Callable[[], tuple[Prompt, SamplingParams]]) -> str | InvalidRequestError:
        request_id = f"each-{next(self._ids)}"
        try:
            self.generator.add(request_id, *read())
        except InvalidRequestError as error:
            return error
        return request_id

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        session_id: str | None = None,
        tenant: str = "",
    ) -> TextStream:
        """An iterator over the completion's text as it comes; together the pieces are the text `generate` gives.

        The prompt is checked at once; leaving the iterator early ends the request.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise InvalidRequestError(f"stream gives one completion and n is {params.n}; use generate.", param="n")
        request_id = f"stream-{next(self._ids)}"
        self.generator.add(request_id, prompt, params, session_id=session_id, cache_salt=tenant)
        return TextStream(self.generator, request_id)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        session_id: str | None = None,
        tenant: str = "",
        **options: Any,
    ) -> TextStream:
        """`stream` of a conversation; `options` as ChatTemplate.render."""
        return self.stream(self.render_chat(messages, **options), sampling_params, session_id, tenant)

    def stats(self) -> dict[str, float]:
        """Counters: requests by state, steps, compilations, pages, prefix hits, drafts and what stood of them."""
        return self.engine.stats()

    def memory(self) -> dict[str, int]:
        """Bytes by holder: weights, KV pools, page tables and sampler over the whole mesh, program temporaries (of one
        device), KV in host memory and on disk, and what is in use beside them, where the system tells."""
        report: BuildReport = self.report
        engine = {"weights": report.weights_bytes, **self.engine.memory()}
        experts = self.blueprint.expert_memory
        on_host = {} if experts is None else {f"experts_on_{experts.place}": report.host_bytes}
        return on_host | with_unaccounted({**engine, "program_temporaries": report.temp_bytes}, self.mesh, on_host)

    def wait_for_programs(self) -> None:
        """Waits until what is compiled behind the engine is there (see `precompile`): before something is measured, or
        so that the whole bundle is written."""
        if self.leads:
            self.engine.wait_for_programs()  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        """Ends what is in flight, lets followers go, and frees the arrays."""
        self.engine.close()


def load_tokenizer(checkpoint: Checkpoint | RandomCheckpoint, timeline: Timeline | None = None) -> Tokenizer | None:
    """The checkpoint's tokenizer; None where it has none (token ids only)."""
    if isinstance(checkpoint, RandomCheckpoint):
        return None
    with (timeline or Timeline()).phase("load tokenizer"):
        return _read_tokenizer(checkpoint.path)


def _read_tokenizer(path: Path) -> Tokenizer | None:
    if path.is_file():
        return Tokenizer.from_gguf(path)
    if (path / "tokenizer.gguf").exists():
        return Tokenizer.from_gguf(path / "tokenizer.gguf")
    known = any((path / name).exists() for name in ("tokenizer.json", "tiktoken.model"))
    return Tokenizer.from_hf(path) if known else None


def _with_deployment(options: dict[str, Any]) -> dict[str, Any]:
    """Options left at their defaults take the deployment's values."""
    name = options.pop("config")
    if name is None:
        return options
    defaults = {k: p.default for k, p in inspect.signature(LLM.__init__).parameters.items()}
    deployment = find_deployment(name)
    unknown = set(deployment.options) - set(defaults)
    if unknown:
        raise ConfigError(f"config {name!r} sets {sorted(unknown)}, which LLM does not know.")
    given = {k: v for k, v in deployment.options.items() if options[k] == defaults[k]}
    return {**options, **given}


def _join(mesh: Mesh, options: Mapping[str, Any]) -> "Group | None":
    """The processes of a mesh that lies over several, connected; None for a mesh of this process alone."""
    if jax.process_count() == 1:
        return None
    from trillion_infer.distributed.joining import form_group, processes_of

    if isinstance(options["mesh"], Mesh) and processes_of(mesh) == [jax.process_index()]:
        return None
    from trillion_infer.engine.many_hosts import check_options

    check_options(options)
    return form_group(mesh, options["group_key_file"])


__all__ = ["LLM", "ConfigError", "ModelLoadError"]
