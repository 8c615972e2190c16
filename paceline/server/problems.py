"""Errors as clients expect them: a status, and a body in the form of the API that was called (`server.dialects`).

A fault of the server itself is logged, but the client gets a fixed message: none contains a path or a traceback.
"""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from paceline.errors import ContextTooLong, EngineDead, Failed, InvalidRequest, OutOfMemory, PacelineError
from paceline.server.dialects import ErrorDetail, dialect_of
from paceline.types import Finish, TokenEvent

logger = logging.getLogger(__name__)

ADMIN_PREFIX = "/admin/"  # of paths for callers with the admin key
MAX_MESSAGE = 1000  # characters: a message may quote what was sent
INTERNAL = "the server failed on this request; its log says why"

# The engine's name of a parameter → its field in a body, where the two differ.
FIELDS = {
    "stop_ids": "stop_token_ids",
    "allowed_tokens": "allowed_token_ids",
    "include_stop": "include_stop_str_in_output",
    **{name: f"speculation.{name}" for name in ("enabled", "drafter", "max_draft", "rule", "threshold", "p_min")},
    "target_tpot": "speculation.target_tpot_ms",
}
PROMPT_FIELDS = {  # path → field; others: prompt
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/api/chat": "messages",
    "/v1/embeddings": "input",
    "/infill": "input_prefix",
}


# Bad ends of a sequence → status, code and message for the client.
ENDINGS = {
    Finish.ABORT: (503, "aborted", "the server ended this request before it was complete; send it again"),
    Finish.DEADLINE: (504, "timeout", "the request took longer than this server allows; ask for fewer tokens"),
    Finish.ERROR: (500, "engine_error", "the engine stopped after an internal error; its log says why"),
}


def failure(event: TokenEvent, *, dead: bool) -> Failed | None:
    """Find why the sequence of this event ended badly. None: it goes on, or ended well.

    `dead`: the engine is dead; otherwise an error concerns this request alone."""
    if event.finish is Finish.ERROR and not dead:
        return Failed(400, "unanswerable", f"the answer could not be completed: {event.error}")
    return Failed(*ENDINGS[event.finish]) if event.finish in ENDINGS else None


def detail(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ErrorDetail:
    short = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
    sendable = short.encode(errors="replace").decode()  # a quoted half of a surrogate pair cannot be sent
    return ErrorDetail(message=sendable, type=kind(status), param=param, code=code, status=status)


def kind(status: int) -> str:
    special = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return special.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_response(
    status: int,
    message: str,
    *,
    path: str = "",
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Answer with an error, in the form of the API that `path` belongs to."""
    body = dialect_of(path).error(detail(status, message, param=param, code=code))
    return JSONResponse(body, status_code=status, headers=dict(headers or {}))


def describe(error: Exception, *, path: str = "") -> tuple[int, ErrorDetail]:
    """Find the status and body for an exception of a request to `path`. An unforeseen one is logged and becomes 500."""
    if isinstance(error, (InvalidRequest, Failed)) or (isinstance(error, PacelineError) and error.status < 500):
        message = error.for_client if isinstance(error, ContextTooLong) else str(error)
        return error.status, detail(error.status, message, param=_field(error, path), code=_code(error))
    if isinstance(error, PacelineError) and path.startswith(ADMIN_PREFIX):  # the operator may know internals
        return error.status, detail(error.status, str(error), param=_field(error, path), code=_code(error))
    if isinstance(error, EngineDead):
        return 503, detail(503, "the engine stopped after an internal error; its log says why", code="engine_dead")
    if isinstance(error, OutOfMemory):
        return 503, detail(503, "the server has no memory for this request; try again later", code="out_of_memory")
    if isinstance(error, PacelineError) and error.status == 503:  # the bridge is not ready, or no longer
        return 503, detail(503, str(error), code=_code(error))
    logger.error("a request failed", exc_info=error)
    return 500, detail(500, INTERNAL, code="internal_error")


def _field(error: PacelineError, path: str) -> str | None:
    """Find the field of the body that is at fault; errors raised by the server itself name it already."""
    param: str | None = getattr(error, "param", None)
    if param is None:
        return None
    return PROMPT_FIELDS.get(path, param) if param == "prompt" else FIELDS.get(param, param)


def respond(error: Exception, *, path: str = "") -> JSONResponse:
    status, said = describe(error, path=path)
    retry = getattr(error, "retry_after", None)
    headers = {} if retry is None else {"Retry-After": str(max(1, round(retry)))}
    return JSONResponse(dialect_of(path).error(said), status_code=status, headers=headers)


def install_problems(app: FastAPI) -> None:
    """Make every error of the app leave as an error body of the API that was called."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return respond(error, path=request.url.path)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        param, message = explain(error.errors())
        return error_response(400, message, path=request.url.path, param=param)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        messages = {404: f"there is no {request.url.path[:200]!r} here", 405: f"{request.method} is not allowed here"}
        message = messages.get(error.status_code, str(error.detail))
        return error_response(error.status_code, message, path=request.url.path, headers=error.headers)

    app.add_exception_handler(PacelineError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, known)


def explain(errors: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """Find which field of a body is wrong, and say what would be right."""
    first = errors[0]
    place = list(first["loc"][1:])  # without "body"
    if not place:
        return None, "the body must be a JSON object" if first["type"] != "missing" else "the body is missing"
    field = str(place[0])
    same = [error for error in errors if error["loc"][1:2] == (place[0],)]
    reasons = list(dict.fromkeys(str(error["msg"]).removeprefix("Value error, ") for error in same))
    if first["type"] == "missing":
        field = ".".join(map(str, place))
        return field, f"{field} is missing"
    nested = [str(part) for part in place[1:] if isinstance(part, int) or re.fullmatch(r"[a-z_]+", part)]
    where = field if len(same) > 1 else ".".join([field, *nested])
    return where, f"{where}: {' or '.join(reasons[:3])}, not {reprlib.repr(first.get('input'))}"


def _code(error: PacelineError) -> str | None:
    code: str | None = getattr(error, "code", None)
    return "context_length_exceeded" if isinstance(error, ContextTooLong) else code
