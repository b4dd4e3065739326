"""Starts one JAX program on every host of a TPU pod.

Run, on every host (gcloud compute tpus tpu-vm ssh NAME --worker=all --command="…"):
        python deploy/tpu_pod.py                            # TPU: hosts find each other; the check alone
        python deploy/tpu_pod.py -- scripts/serve.py --model=MODEL --mesh=stage=2,tensor=8   # one server over all hosts
        python deploy/tpu_pod.py --coordinator=HOST:PORT --num_processes=4 --process_id=0    # elsewhere, or by hand
Expect: "process I of N: D devices, all answered" from every host; a host or device that is missing ends every
process with one line and a non-zero status.

The program finds jax.distributed started and must be one SPMD program, the same on every host; generate.py, serve.py
and benchmark.py are (see docs/hosts.md).
"""

import runpy
import sys

from absl import app, flags

from trillion_infer.cli.hosts import define_host_flags
from trillion_infer.core.errors import TrillionInferError

join_hosts = define_host_flags()
DEVICES = flags.DEFINE_integer("devices", None, "Devices there must be over all hosts.", lower_bound=1)
TIMEOUT_S = flags.DEFINE_integer("timeout_s", 300, "Seconds to wait for the other hosts of a pod.", lower_bound=1)


def main(argv: list[str]) -> None:
    program = argv[1:]

    import jax
    from jax.experimental import multihost_utils

    try:
        join_hosts()
        if not jax.distributed.is_initialized():
            jax.distributed.initialize(initialization_timeout=TIMEOUT_S.value)
    except TrillionInferError as error:
        sys.exit(f"tpu_pod.py: {error}")
    except (RuntimeError, ValueError) as error:
        sys.exit(f"tpu_pod.py: the processes did not find each other: {str(error).splitlines()[0]}")
    count = jax.device_count()
    if DEVICES.value is not None and count != DEVICES.value:
        sys.exit(f"tpu_pod.py: {count} devices answer where --devices={DEVICES.value} are wanted; check every host.")
    heard = int(multihost_utils.process_allgather(jax.numpy.asarray(jax.local_device_count())).sum())
    if heard != count:
        sys.exit(f"tpu_pod.py: {heard} devices answered a collective of {count}; check the links between hosts.")
    print(f"process {jax.process_index()} of {jax.process_count()}: {count} devices, all answered", flush=True)
    if program:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    app.run(main)
