"""Errors as OpenAI's clients expect them."""

from typing import Any

from trillion_infer.core.errors import (
    EngineDeadError,
    HandoffError,
    InvalidRequestError,
    QueueFullError,
    UnknownSessionError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error. `retry_after`: whole seconds after which a client may try again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """The JSON of the error."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        challenge = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return challenge if self.retry_after is None else {**challenge, "Retry-After": str(self.retry_after)}


def as_api_error(error: BaseException, retry_after: int = 1) -> ApiError:
    """The answer to an error raised anywhere below; what is unexpected becomes 500 without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnknownSessionError):
        return ApiError(404, str(error), param="session_id", code="session_not_found")
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=retry_after)
    if isinstance(error, HandoffError):
        return ApiError(503, str(error), code="handoff_failed", retry_after=retry_after)
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error), code="engine_dead")
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply.")
    return ApiError(500, f"an internal error ended this request ({type(error).__name__}).", code="internal_error")
