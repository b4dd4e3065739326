"""Small parts that every answer has."""

from typing import Any

from starlette.responses import Response

from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.fields import dump_json


def finish_reason(reason: str | None, calls: bool = False) -> str | None:
    """OpenAI's word for how a completion ended: stop, length or tool_calls."""
    if reason in (None, "length"):
        return reason
    return "tool_calls" if calls else "stop"


def json_reply(value: Any, request_id: str | None = None, status: int = 200) -> Response:
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    return Response(dump_json(value), status, headers, media_type="application/json")


def error_reply(error: ApiError) -> Response:
    return Response(dump_json(error.body()), error.status, error.headers(), media_type="application/json")
