"""Starts one JAX program on every host of a TPU pod.

Run, on every host (gcloud compute tpus tpu-vm ssh NAME --worker=all --command="…"):
        python deploy/tpu_pod.py                            # TPU: hosts find each other; the check alone
        python deploy/tpu_pod.py -- my_program.py --flag=1  # then my_program.py runs on every host
        python deploy/tpu_pod.py --coordinator=HOST:PORT --processes=4 --process_id=0   # elsewhere, or by hand
Expect: "process I of N: D devices, all answered" from every host; a host or device that is missing ends every
process with one line and a non-zero status.

The program finds jax.distributed started and must be one SPMD program, the same on every host.
"""

import runpy
import sys

from absl import app, flags

COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0; found by itself on a TPU pod.")
PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes; with --coordinator.", lower_bound=1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "This process, from 0; with --coordinator.", lower_bound=0)
DEVICES = flags.DEFINE_integer("devices", None, "Devices there must be over all hosts.", lower_bound=1)
TIMEOUT_S = flags.DEFINE_integer("timeout_s", 300, "Seconds to wait for the other processes.", lower_bound=1)


def main(argv: list[str]) -> None:
    program = argv[1:]
    given = [flag.value is not None for flag in (COORDINATOR, PROCESSES, PROCESS_ID)]
    if any(given) != all(given):
        sys.exit("tpu_pod.py: give all of --coordinator, --processes and --process_id, or none of them on a TPU pod.")
    if all(given) and PROCESS_ID.value >= PROCESSES.value:
        sys.exit(f"tpu_pod.py: --process_id={PROCESS_ID.value} must be below --processes={PROCESSES.value}.")

    import jax
    from jax.experimental import multihost_utils

    try:
        jax.distributed.initialize(
            COORDINATOR.value, PROCESSES.value, PROCESS_ID.value, initialization_timeout=TIMEOUT_S.value
        )
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
