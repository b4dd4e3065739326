"""Token counts before a worker has counted: bytes over a learned number of bytes per token."""

from trillion_infer.route.request import DEFAULT_OUTPUT_TOKENS, RequestView

_WEIGHT = 0.1


class TokenEstimator:
    """Estimates prompt and output tokens; learns from the usage that workers report."""

    def __init__(self, bytes_per_token: float = 4.0, output_tokens: float = DEFAULT_OUTPUT_TOKENS):
        self.bytes_per_token = bytes_per_token
        self.output_tokens = output_tokens

    def prompt(self, view: RequestView) -> int:
        """Tokens of the prompt, at least 1."""
        return view.prompt_ids or max(1, round(len(view.prompt) / self.bytes_per_token))

    def output(self, view: RequestView) -> int:
        """Tokens that the answer is expected to have, at least 1 and at most what the request allows."""
        expected = max(1, round(self.output_tokens))
        return min(expected, view.max_output) if view.max_output else expected

    def learn(self, view: RequestView, prompt_tokens: int, output_tokens: int) -> None:
        """Moves the estimates towards one finished request's counts."""
        if view.prompt_ids is None and prompt_tokens > 0:
            seen = min(max(len(view.prompt) / prompt_tokens, 0.25), 64.0)
            self.bytes_per_token += _WEIGHT * (seen - self.bytes_per_token)
        if output_tokens > 0:
            self.output_tokens += _WEIGHT * (output_tokens - self.output_tokens)
