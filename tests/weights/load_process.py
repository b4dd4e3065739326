"""One of two processes that load a checkpoint together: python load_process.py RANK PORT FOLDER

Prints one line of JSON: bytes read by this process, and whether its shards hold what the files hold. Its two devices
are those that `tests/environment.py` gave its environment.
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from trillion_infer.weights import ParamSpec, Source, load_params, open_checkpoint


def main(rank: int, port: int, folder: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    checkpoint = open_checkpoint(folder)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    specs = {
        "stack": ParamSpec((4, 16, 8), None, (None,) * 3, tuple(Source(f"w.{i}", (i,)) for i in range(4))),
        "same": ParamSpec((8,), None, (None,), (Source("n"),)),
    }
    shardings = {"stack": NamedSharding(mesh, PartitionSpec("x")), "same": NamedSharding(mesh, PartitionSpec())}
    arrays, report = load_params(specs, checkpoint, shardings, dtype="float32")
    right = all(
        np.array_equal(s.data[0], checkpoint.read(f"w.{s.index[0].start}")) for s in arrays["stack"].addressable_shards
    )
    right &= all(np.array_equal(s.data, checkpoint.read("n")) for s in arrays["same"].addressable_shards)
    print(json.dumps({"bytes": report.bytes, "right": bool(right), "shape": arrays["stack"].shape}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
