"""Starting jax.distributed from the flags of a launch script."""

import jax

from trillion_infer.core.errors import ConfigError, GroupError

START_S = 300
"""Seconds to wait for the other processes."""


def start_processes(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Starts jax.distributed; nothing is done without arguments, or where a launcher has started it already.

    coordinator: HOST:PORT that process 0 listens on. Must be called before JAX is used. On CPU the processes talk by
    gloo. Raises ConfigError for arguments that do not go together, GroupError where the others are not found.
    """
    given = [value is not None for value in (coordinator, num_processes, process_id)]
    if not any(given) or jax.distributed.is_initialized():
        return
    if coordinator is None or num_processes is None or process_id is None:
        raise ConfigError("coordinator, num_processes and process_id go together; give all of them or none.")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"coordinator is {coordinator!r}; it must be HOST:PORT, as in 10.0.0.1:8476.")
    if not 0 <= process_id < num_processes:
        raise ConfigError(f"process_id is {process_id}; of {num_processes} processes it is 0 to {num_processes - 1}.")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=START_S)
    except (RuntimeError, ValueError) as error:
        raise GroupError(f"the processes did not find each other: {str(error).splitlines()[0]}") from error
