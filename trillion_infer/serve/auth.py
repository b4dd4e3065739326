"""API keys and the tenants they stand for."""

import hashlib
import hmac
from collections.abc import Sequence

from trillion_infer.serve.errors import ApiError


class Keys:
    """The keys that open the server; without any it is open and everybody is the same tenant."""

    def __init__(self, keys: Sequence[str] = ()):
        self._digests = [_digest(key) for key in keys]

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an Authorization header. The time taken does not tell which key was nearly right.

        Raises ApiError 401.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "no API key; send the header Authorization: Bearer KEY.", code="missing_api_key")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise ApiError(401, "the API key is not one of this server's.", code="invalid_api_key")
        return hashlib.sha256(b"tenant" + given).hexdigest()[:32]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
