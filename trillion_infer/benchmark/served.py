"""The process that the serve workload measures: an LLM behind HTTP.

python -m trillion_infer.benchmark.served '{"options": {"model": …}, "port": 8000}'
"""

import json
import sys


def main() -> None:
    """Serves until SIGTERM."""
    from trillion_infer import LLM
    from trillion_infer.benchmark.serving import MODEL
    from trillion_infer.serve.options import ServerOptions
    from trillion_infer.serve.run import serve

    request = json.loads(sys.argv[1])
    llm = LLM(**request["options"])
    serve(llm.generator, ServerOptions(MODEL), "127.0.0.1", request["port"], drain_s=5)


if __name__ == "__main__":
    main()
