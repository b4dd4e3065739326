"""Measured block sizes, kept as JSON beside an operation: a list of shapes, each with what served it best."""

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jax

from sharding.topologies import kind_of


def device_name() -> str:
    """Name in `sharding.topologies.KINDS` of the device of the mesh in context, else of the default device.

    Empty for a device that is not in the table.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    name = getattr(device, "device_kind", None) or jax.devices()[0].device_kind
    kind = kind_of(name)
    return kind.name if kind else ""


def tuned(package: str, platform: str, shape: dict[str, int | str]) -> dict[str, Any] | None:
    """The measured block sizes for a shape, or None.

    Args:
      package: of the operation, for example `pallas_kernels.ragged_paged_attention`.
      platform: name of the JSON file in its folder `tuning`.
      shape: `device` and whatever else the entries of the file are keyed by.
    """
    for entry in _entries(package, platform):
        if entry["shape"] == shape:
            return dict(entry["blocks"])
    return None


def add_entry(path: Path, entry: dict) -> None:
    """Writes a measured entry into a file of `tuning/`, in place of the one for its shape if there is one."""
    entries = [old for old in json.loads(path.read_text()) if old["shape"] != entry["shape"]]
    path.write_text("[\n" + ",\n".join(json.dumps(one) for one in [*entries, entry]) + "\n]\n")


@cache
def _entries(package: str, platform: str) -> tuple[dict, ...]:
    file = resources.files(package).joinpath("tuning", f"{platform}.json")
    return tuple(json.loads(file.read_text()))
