"""The process that the serve workload measures: an LLM behind HTTP.

python -m trillion_infer.benchmark.served '{"options": {"model": …}, "port": 8000}'

"handoff": fields of HandoffOptions, for a worker of a pool. "cores": those it may use.
"""

import json
import os
import sys


def main() -> None:
    """Serves until SIGTERM."""
    request = json.loads(sys.argv[1])
    if request.get("cores"):
        os.sched_setaffinity(0, request["cores"])
    from trillion_infer import LLM
    from trillion_infer.benchmark.serving import MODEL
    from trillion_infer.engine.handoff.build import HandoffOptions, make_worker_of
    from trillion_infer.serve.options import ServerOptions
    from trillion_infer.serve.run import serve

    llm = LLM(**request["options"])
    llm.wait_for_programs()
    if request.get("handoff"):
        handoff = request["handoff"]
        make_worker_of(llm, HandoffOptions(**{**handoff, "peers": tuple(handoff.get("peers", ()))}))
    serve(llm.generator, ServerOptions(MODEL), "127.0.0.1", request["port"], drain_s=5)


if __name__ == "__main__":
    main()
