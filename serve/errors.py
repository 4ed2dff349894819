"""Answers that are errors, in OpenAI's form."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from outrider.errors import OutriderError, UsageError
from outrider.runtime.scheduler import QueueFullError
from outrider.serve.protocol import ChatRequest, CompletionRequest
from outrider.serve.worker import NotReadyError, TimedOutError

LOGGER = logging.getLogger("outrider.serve")
# Our names of what a request asks for, and the API's.
NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "the": "prompt", "every": "stop_token_ids"}
CHAT_NAMES = {"max_new_tokens": "max_completion_tokens", "logprobs": "top_logprobs", "the": "messages"}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        message = str(self).encode("utf-8", "replace").decode()  # what a client sent may be no text
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        LOGGER.info("refused", extra={"status": self.status, "reason": self.code or self.param})
        return JSONResponse(self.body(), self.status, headers)


def api_error(error: OutriderError, chat: bool = False) -> ApiError:
    """What one of ours is over HTTP."""
    if isinstance(error, UsageError):
        fields = ChatRequest.model_fields if chat else CompletionRequest.model_fields
        names = NAMES | (CHAT_NAMES if chat else {})
        name = str(error).split(" ", 1)[0]
        param, message = names.get(name, name), f"{error}; {error.hint}"
        for ours, theirs in names.items():
            message = message.replace(ours, theirs) if "_" in ours else message
        return ApiError(400, message, param if param in fields else None)
    for kind, status, code in (
        (QueueFullError, 429, "queue_full"),
        (NotReadyError, 503, "not_ready"),
        (TimedOutError, 504, "timeout"),
    ):
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    return ApiError(500, str(error), code="engine_error")


async def http_error(_: Request, error: Exception) -> Response:
    """What the framework itself refuses, in our form."""
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, str(error.detail)).response()
    answer.headers.update(error.headers or {})
    return answer


def invalid(error: RequestValidationError) -> ApiError:
    """What is wrong with a body, by the name of the parameter."""
    first = error.errors()[0]
    place = [str(each) for each in first["loc"] if each != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON")
    name = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"this server has no parameter {name}", name, "unsupported_parameter")
    return ApiError(400, f"{name or 'the body'}: {first['msg']}", place[0] if place else None)
