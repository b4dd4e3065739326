"""Weights: checkpoints of several formats, checked and streamed to their shards on a mesh."""

from trillion_infer.weights.checkpoint import Checkpoint, open_checkpoint
from trillion_infer.weights.load import LoadReport, init_params, load_params
from trillion_infer.weights.spec import ParamSpec, Source

__all__ = ["Checkpoint", "LoadReport", "ParamSpec", "Source", "init_params", "load_params", "open_checkpoint"]
