"""The process that start-up is measured with: loads an LLM, prints its first token's id and ends.

python -m trillion_infer.benchmark.first_token '{"options": {"model": …}, "prompt_token_ids": [1, 2, 3]}'
"""

import json
import sys


def main() -> None:
    """Reads the request from the command line; imports are part of what is measured."""
    from trillion_infer import LLM, SamplingParams

    request = json.loads(sys.argv[1])
    llm = LLM(**request["options"])
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": request["prompt_token_ids"]}], params)[0]
    print(output.outputs[0].token_ids[0], flush=True)
    llm.wait_for_programs()  # so that the next start finds a whole bundle


if __name__ == "__main__":
    main()
