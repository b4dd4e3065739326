"""Loads a synthetic sharded checkpoint on eight CPU devices and prints memory and speed as one line of JSON.

Run:    python tests/weights/load_big.py FOLDER 4.0      (FOLDER is filled on the first run; gigabytes)
Expect: "beyond_arrays_gib" below 1, "ratio" (to reading the files and copying them once) at 0.7 or more.
"""

import json
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trillion_infer.testing.checkpoints import write_hf_directory
from trillion_infer.weights import ParamSpec, Source, load_params, open_checkpoint
from trillion_infer.weights.shards import aligned_zeros

OUT, IN, LAYERS = 4096, 2048, 8
PER_LAYER = OUT * IN * 2


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(folder: Path, gigabytes: float) -> None:
    experts = round(gigabytes * 1e9 / PER_LAYER / LAYERS)
    block = np.random.default_rng(0).standard_normal((OUT, IN)).astype(ml_dtypes.bfloat16)
    tensors = {}
    for layer in range(LAYERS):
        for expert in range(experts):
            tensors[f"l.{layer}.e.{expert}.w"] = np.broadcast_to(block, block.shape)
    write_hf_directory(folder, tensors, {"experts": experts}, shards=8)


def specs_of(experts: int) -> dict[str, ParamSpec]:
    sources = tuple(Source(f"l.{i}.e.{e}.w", (i, e)) for i in range(LAYERS) for e in range(experts))
    return {"w": ParamSpec((LAYERS, experts, OUT, IN), None, (None,) * 4, sources)}


def read_and_copy(folder: Path, threads: int) -> float:
    """Seconds to read every file once and copy what was read once, into memory not yet touched."""
    begun = time.perf_counter()

    def one(path: Path) -> int:
        target, at = aligned_zeros((path.stat().st_size,), np.dtype(np.uint8)), 0
        block = memoryview(bytearray(32 << 20))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                target[at : at + count] = block[:count]
                at += count
        return at

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, sorted(folder.glob("*.safetensors"))))
    return time.perf_counter() - begun


def main(folder: Path, gigabytes: float) -> None:
    if not (folder / "config.json").exists():
        write(folder, gigabytes)
        os.execv(sys.executable, [sys.executable, *sys.argv])  # the writer's memory is not the loader's
    checkpoint = open_checkpoint(folder)
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("x",))
    specs = specs_of(checkpoint.config["experts"])
    shardings = {"w": NamedSharding(mesh, PartitionSpec(None, None, "x"))}
    before = peak_bytes()
    params, report = load_params(specs, checkpoint, shardings, dtype="bfloat16")
    beyond = peak_bytes() - before - params["w"].nbytes
    first = params["w"].addressable_shards[3]
    same = np.array_equal(np.asarray(first.data)[1, 1], checkpoint.read("l.1.e.1.w")[first.index[2]])
    del params, first
    reference = report.bytes / read_and_copy(folder, os.cpu_count() or 1) / 1e9
    result = {
        "gb": report.bytes / 1e9,
        "beyond_arrays_gib": beyond / 2**30,
        "gb_s": report.gb_s,
        "reference_gb_s": reference,
        "ratio": report.gb_s / reference,
        "same": bool(same),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
