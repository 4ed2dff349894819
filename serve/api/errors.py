"""Error responses, in the form of OpenAI's API."""

from __future__ import annotations

import logging
import re
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from outrider.errors import OutriderError, UsageError
from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.request_queue import QueueFullError
from outrider.serve.api.chat_protocol import ChatRequest
from outrider.serve.api.completions_protocol import CompletionRequest
from outrider.serve.api.protocol import Common
from outrider.serve.api.responses_protocol import ResponsesRequest
from outrider.serve.deliveries import TimedOutError
from outrider.serve.engine import NotReadyError
from outrider.serve.workers.grammars import GrammarBusyError

LOGGER = logging.getLogger("outrider.serve")
CHAT_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/responses"
BODIES: dict[str, type[Common]] = {CHAT_PATH: ChatRequest, RESPONSES_PATH: ResponsesRequest}
TYPE_NAME = re.compile(
    r"str|int|list\[.+\]|constrained-.+|function-.+|literal\[.+\]|Named\w+"
)  # pydantic's names for the types of a union, in a location


class ApiError(HTTPException):
    """An error response. It is an `HTTPException` so that FastAPI lets it pass when it is raised while a body is read."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        """Describe the error; `param` is the field of the request at fault."""
        super().__init__(status, message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        message = self.detail.encode("utf-8", "replace").decode()  # it may quote a client's invalid text
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the response, and log it."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        LOGGER.info("refused", extra={"status": self.status, "reason": self.code or self.param})
        return JSONResponse(self.body(), self.status, headers)


def api_error(error: OutriderError, path: str) -> ApiError:
    """Return the HTTP error for an error of the library; `path` is the request's path."""
    if isinstance(error, UsageError):
        fields = BODIES.get(path, CompletionRequest).fields_by_param()
        message = f"{error}; {error.hint}"
        for param, field in fields.items():  # a message may name several parameters
            message = re.sub(rf"\b{param}\b", field, message) if "_" in param else message
        return ApiError(400, message, fields.get(error.param or ""))
    for kind, status, code in (
        (QueueFullError, 429, "queue_full"),
        (NotReadyError, 503, "not_ready"),
        (TimedOutError, 504, "timeout"),
        (GrammarBusyError, 503, "grammars_busy"),
        (GrammarError, 400, "grammar_failed"),
    ):
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    return ApiError(500, str(error), code="engine_error")


def unknown_model(name: str, model: str) -> ApiError:
    """Return the error for a request for a model that the server does not have."""
    return ApiError(404, f"the model {name!r} does not exist; this server has {model!r}", "model", "model_not_found")


async def on_library_error(request: Request, error: Exception) -> Response:
    """Handle an error of the library."""
    assert isinstance(error, OutriderError)
    return api_error(error, request.url.path).response()


async def on_http_error(_: Request, error: Exception) -> Response:
    """Handle an `ApiError`, or an error of the framework, such as an unknown path."""
    if isinstance(error, ApiError):
        return error.response()
    assert isinstance(error, HTTPException)
    response = ApiError(error.status_code, str(error.detail)).response()
    response.headers.update(error.headers or {})
    return response


async def on_bug(_: Request, error: Exception) -> Response:
    """Handle an unexpected exception. The server's log has the traceback."""
    return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error").response()


async def on_invalid_body(_: Request, error: Exception) -> Response:
    """Handle a body that is not a valid request, naming the first field at fault."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    # A union has an error for each of its types. The most useful one is not about a type, or has the longest location.
    same_field = [each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]]
    first = max(same_field, key=lambda each: (not each["type"].endswith("_type"), len(each["loc"])))
    location = [str(each) for each in first["loc"] if each != "body" and not TYPE_NAME.fullmatch(str(each))]
    name = ".".join(location) or None
    if first["type"] == "json_invalid":
        refusal = ApiError(400, "the body is not JSON")
    elif first["type"] == "extra_forbidden":
        refusal = ApiError(400, f"this server has no parameter {name}", name, "unsupported_parameter")
    else:
        refusal = ApiError(400, f"{name or 'the body'}: {first['msg']}", location[0] if location else None)
    return refusal.response()
