"""Inference of very large language models on TPU and GPU meshes."""

import importlib
from typing import Any

_EXPORTS = {
    "LLM": "trillion_infer.llm",
    "SamplingParams": "trillion_infer.core.sampling_params",
    "StructuredOutput": "trillion_infer.core.sampling_params",
    "RequestOutput": "trillion_infer.core.outputs",
    "CompletionOutput": "trillion_infer.core.outputs",
    "TrillionInferError": "trillion_infer.core.errors",
    "InvalidRequestError": "trillion_infer.core.errors",
    "ConfigError": "trillion_infer.core.errors",
    "ModelLoadError": "trillion_infer.core.errors",
    "OutOfMemoryError": "trillion_infer.core.errors",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Imports on first use, so that a script's --help does not wait for JAX."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'trillion_infer' has no attribute {name!r}")
    from trillion_infer.core.importing import quick_imports

    with quick_imports():
        return getattr(importlib.import_module(_EXPORTS[name]), name)
