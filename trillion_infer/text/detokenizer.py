"""Token ids to text as they arrive."""

import codecs
from collections.abc import Iterable

from trillion_infer.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns a stream of ids into pieces of text that hold whole characters only.

    For every way of cutting `ids` into pushes, the pieces and `finish()` together equal
    `tokenizer.decode(ids, skip_special_tokens, continuation=continuation)`. The cost of a push is proportional
    to its own ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continuation: bool = False):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._drop_space = tokenizer.drops_leading_space and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; may be empty. An unfinished character waits for the next push."""
        read, skip = self._tokenizer.id_to_bytes, self._skip
        return self._trim(self._decoder.decode(b"".join([read(id, skip) for id in ids])))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed, else nothing."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if not (self._drop_space and text):
            return text
        self._drop_space = False
        return text[1:] if text[0] == " " else text
