"""Block identity: a chained SHA-256 over everything that the KV of a block depends on."""

import hashlib
import struct
from collections.abc import Sequence


def _digest(domain: bytes, *parts: bytes) -> bytes:
    """SHA-256 of length-prefixed parts, so that no two lists of parts give the same bytes."""
    sha = hashlib.sha256(domain)
    for part in parts:
        sha.update(struct.pack("<Q", len(part)))
        sha.update(part)
    return sha.digest()


class BlockNamer:
    """Names blocks of `page_size` tokens. Equal in every process; 32 bytes a name.

    fingerprint: what identifies the weights and their dtype.
    layout: what identifies the shape, dtype and quantisation of the pages.
    """

    def __init__(self, fingerprint: bytes, layout: bytes, page_size: int):
        self.page_size = page_size
        self._base = _digest(b"trillion_infer/kv/model/1", fingerprint, layout, struct.pack("<Q", page_size))
        self._pack = struct.Struct(f"<{page_size}I").pack

    def root(self, salt: str = "", adapter: str = "", multimodal: bytes = b"") -> bytes:
        """The parent of a first block. `adapter` names the adapter's content, not only its label."""
        return _digest(b"trillion_infer/kv/root/1", self._base, salt.encode(), adapter.encode(), multimodal)

    def next(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The name of the block of exactly `page_size` token ids that follows `parent`."""
        return hashlib.sha256(b"trillion_infer/kv/block/1" + parent + self._pack(*token_ids)).digest()
