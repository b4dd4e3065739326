"""Block identity: a chained SHA-256 over everything that the KV of a block depends on."""

import hashlib
import struct
from collections.abc import Sequence

TAG_BYTES = 8
"""Leading bytes of a name that tell its tenant."""


def _digest(domain: bytes, *parts: bytes) -> bytes:
    """SHA-256 of length-prefixed parts, so that no two lists of parts give the same bytes."""
    sha = hashlib.sha256(domain)
    for part in parts:
        sha.update(struct.pack("<Q", len(part)))
        sha.update(part)
    return sha.digest()


class BlockNamer:
    """Names blocks of `page_size` tokens. Equal in every process; 32 bytes a name.

    A name is the tag of its tenant and 24 bytes of a chained SHA-256: so everything that a tenant left in any tier can
    be found by the tag, which tells nothing of the tenant to those who do not know its salt.

    fingerprint: what identifies the weights and their dtype.
    layout: what identifies the shape, dtype and quantisation of the pages.
    """

    def __init__(self, fingerprint: bytes, layout: bytes, page_size: int):
        self.page_size = page_size
        self._base = _digest(b"trillion_infer/kv/model/1", fingerprint, layout, struct.pack("<Q", page_size))
        self._pack = struct.Struct(f"<{page_size}I").pack

    def tag(self, salt: str = "") -> bytes:
        """The first TAG_BYTES of every name under a salt: those of its part before the first slash, the tenant."""
        tenant = salt.partition("/")[0]
        return _digest(b"trillion_infer/kv/tenant/1", self._base, tenant.encode())[:TAG_BYTES]

    def root(self, salt: str = "", adapter: str = "", multimodal: bytes = b"") -> bytes:
        """The parent of a first block. `adapter` names the adapter's content, not only its label."""
        name = _digest(b"trillion_infer/kv/root/1", self._base, salt.encode(), adapter.encode(), multimodal)
        return self.tag(salt) + name[TAG_BYTES:]

    def next(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The name of the block of exactly `page_size` token ids that follows `parent`."""
        name = hashlib.sha256(b"trillion_infer/kv/block/1" + parent + self._pack(*token_ids)).digest()
        return parent[:TAG_BYTES] + name[TAG_BYTES:]
