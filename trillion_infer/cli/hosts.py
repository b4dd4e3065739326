"""Flags of scripts that may run as one program over several processes, and what those do that do not lead."""

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import flags

from trillion_infer.distributed.start import start_processes

if TYPE_CHECKING:
    from trillion_infer.llm import LLM


def define_host_flags() -> Callable[[], None]:
    """--coordinator, --num_processes, --process_id; returns a function that joins the processes they describe.

    They may be defined once more, by a script that a launcher with the same flags runs.
    """
    flags.DEFINE_string("coordinator", None, "HOST:PORT that process 0 of several listens on.", allow_override=True)
    flags.DEFINE_integer("num_processes", None, "Processes of the program, started alike.", 1, allow_override=True)
    flags.DEFINE_integer("process_id", None, "This process, from 0, which leads.", 0, allow_override=True)
    return lambda: start_processes(flags.FLAGS.coordinator, flags.FLAGS.num_processes, flags.FLAGS.process_id)


def follows(llm: "LLM") -> bool:
    """False at once in the process that leads; any other takes part until that is done, and then True.

    SIGTERM, which an orchestrator sends to all at once, is left to the leader: it may have requests to finish.
    """
    if llm.leads:
        return False
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    llm.follow()
    return True
