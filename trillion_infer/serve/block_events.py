"""What a server tells routers of its prefix cache: which prefixes of its prompts are there, and which are not any more.

Prefixes go by names that routers compute themselves.
"""

import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from trillion_infer.core.prompt_prefix import BLOCK_BYTES

_LIMIT = 16384


class BlockEvents:
    """Stored and removed prefixes, numbered. The engine's thread owns it.

    holds: whether a KV block of that name is in the cache. limit: prefixes that are followed, and events kept; the
    oldest are given up first.
    """

    def __init__(self, holds: Callable[[bytes], bool], limit: int = _LIMIT):
        self.epoch = uuid.uuid4().hex
        self._holds, self._limit = holds, limit
        self._block_of: OrderedDict[bytes, bytes] = OrderedDict()
        self._events: deque[tuple[bytes, bool]] = deque(maxlen=limit)
        self._count = 0

    def stored(self, hashes: Sequence[bytes], names: Sequence[bytes], prompt_bytes: int, prompt_blocks: float) -> None:
        """A prompt of so many bytes, which make `prompt_blocks` KV blocks, was computed.

        `hashes` are of its prefixes, `names` of its whole blocks. A prefix ends in the block at its share of the bytes.
        """
        for number, each in enumerate(hashes, 1):
            last = int(number * BLOCK_BYTES / prompt_bytes * prompt_blocks) - 1
            if not 0 <= last < len(names):
                continue
            if each not in self._block_of:
                self._say(each, True)
            self._block_of[each] = names[last]
            self._block_of.move_to_end(each)
        while len(self._block_of) > self._limit:
            self._say(self._block_of.popitem(last=False)[0], False)

    def since(self, epoch: str, count: int) -> dict[str, Any]:
        """What changed after event number `count` of `epoch`; all there is, with `reset`, where that is not known."""
        for each, name in list(self._block_of.items()):
            if not self._holds(name):
                del self._block_of[each]
                self._say(each, False)
        missed = self._count - count
        is_known = epoch == self.epoch and 0 <= missed <= len(self._events)
        if is_known:
            last = dict(list(self._events)[len(self._events) - missed :])
        else:
            last = dict.fromkeys(self._block_of, True)
        return {
            "epoch": self.epoch,
            "count": self._count,
            "reset": not is_known,
            "stored": [each.hex() for each, there in last.items() if there],
            "removed": [each.hex() for each, there in last.items() if not there],
        }

    def _say(self, each: bytes, there: bool) -> None:
        self._events.append((each, there))
        self._count += 1
