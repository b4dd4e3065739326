"""Measures the attention kernels on the device that is here, beside its limits.

Run:    python scripts/bench_kernels.py --spec=llama-3-8b
        python scripts/bench_kernels.py --spec=llama-3-8b --tune       # writes tuning/*.json of the operation
Expect: a JSON line a batch: seconds, bandwidth and FLOP/s, and their shares of the limits of the device. The
        goal is 85% of bandwidth in decode, 70% of FLOP/s in prefill. On CPU tiny batches are interpreted,
        without shares.
"""

import json
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import jax
from absl import app, flags

from pallas_kernels.common.backends import target_platform
from pallas_kernels.common.tuning import add_entry, device_name
from pallas_kernels.ragged_paged_attention import bench
from pallas_kernels.ragged_paged_attention.blocks import PACKAGE
from sharding.topologies import KINDS

SPEC = flags.DEFINE_string("spec", "llama-3-8b", "Shape, a name in arg_specs.py.")
TUNE = flags.DEFINE_bool(
    "tune", False, "Search block sizes, on GPU the prefill kernel too, and write the fastest down."
)
REPEATS = flags.DEFINE_integer("repeats", 10, "Calls of which the fastest counts.", lower_bound=1)
BACKENDS = flags.DEFINE_list("backends", None, "Of reference, tpu, gpu; the device's own if not given.")


def main(_: list[str]) -> None:
    platform, device = target_platform(), device_name()
    here = platform != "cpu"
    if not here and TUNE.value:
        raise app.UsageError("--tune measures; it needs a TPU or GPU.")
    if TUNE.value:
        entry = bench.tune(bench.tune_case(SPEC.value), platform, device)
        print(json.dumps(entry))
        add_entry(Path(str(resources.files(PACKAGE))) / "tuning" / f"{platform}.json", entry)
        return
    cases = list(bench.cases(SPEC.value, KINDS[device].memory // 2) if here else bench.tiny_cases())
    for case in cases:
        for backend in BACKENDS.value or ([platform] if here else ["reference", "tpu", "gpu"]):
            repeats = REPEATS.value if here else 1
            found = bench.measure(case, backend, repeats=repeats, interpret=not here)
            line = {
                "spec": case.spec.name,
                "sequences": len(case.lens),
                "lens": case.lens[0],
                "backend": backend,
            }
            line |= {"device": jax.devices()[0].device_kind, **asdict(found)}
            if here:
                line["bandwidth_share"] = found.bytes_per_second / KINDS[device].bandwidth
                line["flops_share"] = found.flops_per_second / KINDS[device].bf16_flops
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    app.run(main)
