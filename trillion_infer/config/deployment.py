"""Deployments: a name for a set of options, one small file each in configs/."""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trillion_infer.core.errors import ConfigError


@dataclass(frozen=True)
class Deployment:
    """How to serve a model on some hardware.

    options: keywords of LLM. topology: the devices it is meant for ("v5p:2x2x2", "h100:8"), "" for any.
    hf_config: the model's config.json numbers, so that programs can be compiled where the weights are not.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    topology: str = ""
    hf_config: Mapping[str, Any] | None = None


def find_deployment(name: str) -> Deployment:
    """The deployment of a name in configs/, or of a path to such a file. Raises ConfigError listing the names."""
    path = Path(name)
    if path.suffix == ".py" and path.exists():
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"config {name!r} cannot be read as Python.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        names = deployment_names()
        if name not in names:
            raise ConfigError(f"config {name!r} is not in configs/ and is no file; there are {', '.join(names)}.")
        module = importlib.import_module(f"configs.{name}")
    deployment = getattr(module, "DEPLOYMENT", None)
    if not isinstance(deployment, Deployment):
        raise ConfigError(f"config {name!r} defines no DEPLOYMENT of type Deployment.")
    return deployment


def deployment_names() -> list[str]:
    """Names of the deployments that come with the library."""
    import configs

    folder = Path(configs.__path__[0])
    return sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))
