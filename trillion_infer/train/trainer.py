"""The training loop: the target's states streamed into unrolled steps, and checkpoints to go on from."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from pallas_kernels.quantised_matmul import QuantisedTensor, dequantise
from trillion_infer.config.drafter import Eagle3Spec
from trillion_infer.core.errors import ConfigError
from trillion_infer.engine.engine import Engine
from trillion_infer.llm import LLM
from trillion_infer.train.answers import Answered
from trillion_infer.train.data import batches, drafted_vocabulary, padded, usable
from trillion_infer.train.features import Features
from trillion_infer.train.head import Batch, Ends, unrolled
from trillion_infer.train.start import first_weights, head_for, trained_before
from trillion_infer.train.target import TargetStates
from trillion_infer.weights.checkpoint import open_checkpoint

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class TrainConfig:
    """steps: updates. rows, length: of a batch, tokens. unroll: steps of the training-time test. drafted: size of the
    head's vocabulary. rate: peak learning rate, after a warm-up of a twentieth. save_every: updates a checkpoint.
    features: bytes of the target's states that may be kept in a file; where they are more they are made again for each
    batch."""

    steps: int = 400
    rows: int = 4
    length: int = 256
    unroll: int = 7
    drafted: int = 32_000
    rate: float = 5e-4
    save_every: int = 50
    seed: int = 0
    features: int = 2 * 2**30

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "length", "unroll", "drafted", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.length < self.unroll + 2:
            raise ConfigError(f"length is {self.length}; it must be above unroll + 1, which is {self.unroll + 1}.")
        if not 0 < self.rate < 1:
            raise ConfigError(f"rate is {self.rate}; it must be above 0 and below 1.")

    def schedule(self) -> optax.Schedule:
        """Linear warm-up, then a cosine to a tenth."""
        warm = max(1, self.steps // 20)
        return optax.warmup_cosine_decay_schedule(0.0, self.rate, warm, max(self.steps, warm + 1), self.rate / 10)


class Trainer:
    """Trains a head for a loaded LLM on answered conversations; everything it keeps lies under `folder`.

    A folder with a checkpoint is gone on with: the same losses follow as if the first run had not ended. start: an
    exported head to begin with, of whose shape and drafted vocabulary the new one is.
    """

    def __init__(
        self,
        llm: LLM,
        model: str,
        examples: Sequence[Answered],
        config: TrainConfig,
        folder: Path,
        heldout: Sequence[Answered] = (),
        start: Path | None = None,
    ):
        if not isinstance(llm.engine, Engine):
            raise ConfigError("disaggregate is given, and training runs on one mesh; leave it out.")
        self.config, self.folder = config, folder
        target = llm.model_config
        self.spec, self.kept, weights = self._first(llm, model, examples, start)
        assert self.spec.aux_layers is not None
        shards = llm.mesh.shape["data"]
        if config.rows % shards:
            raise ConfigError(f"rows is {config.rows}, which {shards} data shards do not divide; choose a multiple.")
        params = llm.engine.params
        self._target = TargetStates(llm.blueprint, params, self.spec.aux_layers, config.rows // shards, config.length)
        embed = _plain(params["embed.table"])
        head = embed if target.tied else _plain(params["head.table"])
        places = np.full(target.vocab, -1, np.int32)
        places[self.kept] = np.arange(len(self.kept))
        output = head[self.kept].astype(jnp.float32)
        self.ends = Ends(embed, output, jnp.asarray(places))
        self._optimiser = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(config.schedule(), b1=0.9, b2=0.95, weight_decay=0.0)
        )
        self.weights: Any = {name: jnp.asarray(value) for name, value in weights.items()}
        self._state = self._optimiser.init(self.weights)
        self._data = batches(
            examples, config.rows, config.length, config.seed, jax.process_index(), jax.process_count()
        )
        shard = jax.process_index(), jax.process_count()
        chosen, held = usable(examples, config.length, *shard), usable(heldout, config.length)
        self._features = self._features_of(chosen, model, f"features.{shard[0]}.bin")
        self._heldout = [padded(each, config.length, number) for number, each in enumerate(held)]
        self._heldout_features = self._features_of(held, model, "heldout.bin") if held else None
        window = max(min(len(each.ids), config.length) - len(each.prompt_ids) for each in (*chosen, *held))
        step = partial(_update, spec=self.spec, config=config, optimiser=self._optimiser, window=window)
        self._update = jax.jit(step, donate_argnums=(0, 1))
        self._try = jax.jit(partial(unrolled, spec=self.spec, steps=config.unroll, window=window))
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)
        self.step = self._resume()

    def run(self, tell: Callable[[dict[str, Any]], None] = lambda row: None) -> None:
        """Trains up to `config.steps`; `tell` gets each line of the metrics file."""
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            while self.step < self.config.steps:
                begun = time.perf_counter()
                row = {"step": self.step + 1, **self._one()}
                saves = (self.step + 1) % self.config.save_every == 0 or self.step + 1 == self.config.steps
                if saves and self._heldout:
                    row["heldout"] = self._measure()
                row["seconds"] = round(time.perf_counter() - begun, 3)
                file.write(json.dumps(row) + "\n")
                file.flush()
                self.step += 1
                tell(row)
                if saves:
                    self._save()
        self._manager.wait_until_finished()

    def batch(self, rows: dict[str, np.ndarray]) -> Batch:
        """What a head is trained with: these tokens and the target's states of them, computed now."""
        return _batch(rows, self._target(np.asarray(rows["tokens"])))

    def _first(
        self, llm: LLM, model: str, examples: Sequence[Answered], start: Path | None
    ) -> tuple[Eagle3Spec, np.ndarray, dict[str, np.ndarray]]:
        """The head before the first update: what it is, the ids it drafts, its weights."""
        target = llm.model_config
        if start is not None:
            return trained_before(start, target)
        kept = drafted_vocabulary(examples, target.vocab, min(self.config.drafted, target.vocab))
        spec = head_for(target, len(kept))
        names, checkpoint = llm.blueprint.family.names, open_checkpoint(model)
        return spec, kept, first_weights(spec, target, checkpoint, names, kept, self.config.seed)

    def _one(self) -> dict[str, Any]:
        rows = next(self._data)
        batch = _batch(rows, self._features(rows["index"]))
        self.weights, self._state, loss, drafted = self._update(self.weights, self._state, self.ends, batch)
        right = [round(float(x), 4) for x in drafted.right]
        return {"loss": float(loss), "right": right, "length": round(float(drafted.length), 4)}

    def _measure(self) -> dict[str, Any]:
        """Means over the batches of held-out conversations; the last is filled up with the first ones."""
        assert self._heldout_features is not None
        count, rows = len(self._heldout), self.config.rows
        right, lengths, walked = [], [], []
        for start in range(0, count, rows):
            chosen = [self._heldout[i % count] for i in range(start, start + rows)]
            made = {name: np.stack([each[name] for each in chosen]) for name in chosen[0]}
            batch = _batch(made, self._heldout_features(made["index"]))
            _, drafted = self._try(self.weights, ends=self.ends, batch=batch)
            right.append(drafted.right)
            lengths.append(drafted.length)
            walked.append(drafted.walked)
        shares = np.mean(np.asarray(right), axis=0)
        figures = {"length": np.mean(lengths), "walked": np.mean(walked)}
        return {"right": [round(float(x), 4) for x in shares], **{k: round(float(x), 4) for k, x in figures.items()}}

    def _features_of(self, examples: Sequence[Answered], model: str, name: str) -> Features:
        tokens = np.zeros((len(examples), self.config.length), np.int32)
        for row, each in zip(tokens, examples, strict=True):
            row[:] = padded(each, self.config.length, 0)["tokens"]
        return Features(self._target, model, tokens, self.folder / name, self.config.features)

    def _save(self) -> None:
        kept = {"weights": self.weights, "optimiser": self._state}
        self._manager.save(
            self.step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(kept), data=ocp.args.JsonSave(self._data.get_state())),
        )
        self._manager.wait_until_finished()

    def _resume(self) -> int:
        """The step that the newest checkpoint was written after; the metrics are cut to it."""
        step = self._manager.latest_step() or 0
        if step:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"weights": self.weights, "optimiser": self._state})
            found = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like), data=ocp.args.JsonRestore())
            )
            self.weights, self._state = found["state"]["weights"], found["state"]["optimiser"]
            self._data.set_state(found["data"])
        path = self.folder / METRICS
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()[:step]
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return step


def _plain(weight: jax.Array | QuantisedTensor) -> jax.Array:
    """The table of a target, decoded where it stays packed."""
    return dequantise(weight) if isinstance(weight, QuantisedTensor) else jnp.asarray(weight)


def _batch(rows: Mapping[str, np.ndarray], states: tuple[Any, Any]) -> Batch:
    tokens, answers, lengths = (jnp.asarray(rows[name]) for name in ("tokens", "answers", "lengths"))
    return Batch(tokens, *states, answers, lengths)


def _update(weights, state, ends: Ends, batch: Batch, *, spec: Eagle3Spec, config: TrainConfig, optimiser, window: int):
    def loss_of(weights):
        return unrolled(weights, spec, ends, batch, config.unroll, window)

    (loss, drafted), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
    updates, state = optimiser.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, loss, drafted


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of the metrics file: step, loss, right (share of right tokens a step of the unroll), length (mean tokens
    that a verification would give), seconds, and with each checkpoint right, length and walked (see head.Drafted) on
    held-out conversations."""
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]


def plot(folder: Path) -> Path:
    """loss.png: over the steps the loss, and the mean acceptance length of training and of held-out batches."""
    from matplotlib.figure import Figure

    rows = read_metrics(folder)
    figure = Figure((8, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [row["step"] for row in rows]
    left.plot(steps, [row["loss"] for row in rows])
    left.set(xlabel="step", ylabel="loss")
    right.plot(steps, [row["length"] for row in rows], label="training batch")
    held = [row for row in rows if "heldout" in row]
    right.plot([row["step"] for row in held], [row["heldout"]["length"] for row in held], "o-", label="held out")
    right.set(xlabel="step", ylabel=f"tokens a verification, k = {len(rows[0]['right'])}")
    right.legend()
    figure.savefig(folder / "loss.png")
    return folder / "loss.png"
