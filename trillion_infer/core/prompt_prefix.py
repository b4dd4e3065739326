"""Names of prompt prefixes that a router and its servers compute alike, from the bytes of a request alone."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

BLOCK_BYTES = 512


def prompt_of(body: Mapping[str, Any]) -> tuple[bytes, int | None]:
    """The bytes whose prefixes are compared (tools first, then the messages or the prompt), and the number of token ids
    if the prompt came as ids."""
    prompt = body.get("prompt", body.get("input"))
    head = _dump([body.get("model"), body.get("cache_salt"), body.get("tools"), body.get("instructions")])
    if isinstance(body.get("messages"), list):
        return head + b"".join(_dump(message) for message in body["messages"]), None
    if isinstance(prompt, str):
        return head + prompt.encode("utf-8", "surrogatepass"), None
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return head + _dump(prompt)[1:-1], len(prompt)
    if isinstance(prompt, list):
        return head + b"".join(_dump(item) for item in prompt), None
    return head, None


def tenant_of(authorization: str) -> str:
    """What keeps apart the prefixes of requests with different Authorization headers."""
    return hashlib.blake2b(authorization.encode("latin-1", "replace"), digest_size=16).hexdigest()


def prefix_hashes(prompt: bytes, salt: bytes = b"") -> list[bytes]:
    """A 16-byte hash for each whole block of `prompt`, chained: hash i stands for everything up to block i's end."""
    hashes, last = [], hashlib.blake2b(salt, digest_size=16).digest()
    view = memoryview(prompt)
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = hashlib.blake2b(last, digest_size=16)
        block.update(view[start : start + BLOCK_BYTES])
        last = block.digest()
        hashes.append(last)
    return hashes


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
