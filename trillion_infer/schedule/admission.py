"""Whether a waiting request may start: by the pages that it and all running ones will really need."""

from collections.abc import Iterable

from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.request import Request
from trillion_infer.schedule.estimate import OutputLengths


class Admission:
    """Expected need = prompt + expected answer, in pages of every cache group.

    A windowed group is asked for its window only: a prefill chunk is shortened to the pages that are left beside it.
    """

    def __init__(self, cache: KVCache, lengths: OutputLengths, max_model_len: int):
        self._cache = cache
        self._lengths = lengths
        self._max_model_len = max_model_len

    def check(self, request: Request) -> None:
        """Bound `request.max_tokens` by the context and the pools; refuse what can never fit.

        Raises InvalidRequestError: empty or over-long prompt; or, if the user set max_tokens, too long an answer.
        """
        prompt = len(request.prompt_ids)
        if prompt == 0:
            raise InvalidRequestError("The prompt has no tokens; give at least one.", param="prompt")
        if prompt >= self._max_model_len:
            raise InvalidRequestError(
                f"The prompt has {prompt} tokens and max_model_len is {self._max_model_len}; the prompt must be "
                "shorter, so that at least one token can follow.",
                param="prompt",
            )
        self._bound(request, self._max_model_len, f"max_model_len is {self._max_model_len}")
        # The last token's own KV is never needed.
        fits = self._cache.longest_sequence(self._max_model_len) + 1
        sizes = ", ".join(f"{g.group.name} {g.pool.num_pages}" for g in self._cache.groups)
        held = f"all KV pages together hold {fits - 1} (pages of {self._cache.page_size} tokens: {sizes})"
        if prompt >= fits:
            raise InvalidRequestError(
                f"The prompt has {prompt} tokens, but {held}; shorten the prompt or give the KV cache more memory.",
                param="prompt",
            )
        self._bound(request, fits, held)

    def _bound(self, request: Request, length: int, why: str) -> None:
        room = length - len(request.prompt_ids)
        if request.max_tokens > room:
            if request.params.max_tokens is not None:
                raise InvalidRequestError(
                    f"The prompt has {len(request.prompt_ids)} tokens and max_tokens is {request.max_tokens}, but "
                    f"{why}; max_tokens may be at most {room}.",
                    param="max_tokens",
                )
            request.max_tokens = room

    def growth(self, request: Request) -> list[int]:
        """Pages of each group that a request is expected to need beyond those it holds."""
        output = self._lengths.expected(request.num_output, max(request.max_tokens, 1))
        length = max(len(request.prompt_ids) + output - 1, request.num_tokens)
        needed = self._cache.pages_needed(length, 1)
        return [max(0, n - h) for n, h in zip(needed, self._cache.pages_held(request), strict=True)]

    def total_growth(self, running: Iterable[Request]) -> list[int]:
        total = [0] * len(self._cache.groups)
        for request in running:
            total = [t + g for t, g in zip(total, self.growth(request), strict=True)]
        return total

    def fits(self, request: Request, hit: int, promised: list[int]) -> bool:
        """The request, with `hit` tokens of prefix to share, fits beside the growth promised to running ones."""
        shared = self._cache.pages_shared(request, hit)
        return all(
            group.pool.num_leased + promised[i] + new - shared[i] <= group.pool.num_pages
            for i, (group, new) in enumerate(zip(self._cache.groups, self.growth(request), strict=True))
        )
