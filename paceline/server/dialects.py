"""The APIs that are spoken here, told apart by path: OpenAI's, Anthropic's (/v1/messages) and Ollama's (/api/).

All share routes' code, guards and the engine. A dialect is what differs where no route has run yet: the body of an
error, and the headers that name a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    status: SkipJsonSchema[int] = Field(500, exclude=True)  # of HTTP; not part of the body


class ErrorBody(BaseModel):
    """Every answer that is not a success."""

    error: ErrorDetail


class AnthropicDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """Every answer of Anthropic's API that is not a success."""

    type: Literal["error"] = "error"
    error: AnthropicDetail


class OllamaError(BaseModel):
    """Every answer of Ollama's API that is not a success."""

    error: str


ANTHROPIC_TYPES = {  # status → type of an error; other 4xx: invalid_request_error, other 5xx: api_error
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def openai_error(error: ErrorDetail) -> dict[str, Any]:
    return ErrorBody(error=error).model_dump()


def anthropic_error(error: ErrorDetail) -> dict[str, Any]:
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(error.status, usual)
    return AnthropicError(error=AnthropicDetail(type=kind, message=error.message)).model_dump()


def ollama_error(error: ErrorDetail) -> dict[str, Any]:
    return OllamaError(error=error.message).model_dump()


@dataclass(frozen=True, slots=True)
class Dialect:
    error: Callable[[ErrorDetail], dict[str, Any]]
    error_model: type[BaseModel]
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    untyped: bool = False  # bodies are JSON whatever their content type says

    @property
    def errors(self) -> dict[int | str, dict[str, Any]]:
        """The refusals of an endpoint, for the OpenAPI document."""
        return {
            "4XX": {"model": self.error_model, "description": "The request cannot be served as it stands"},
            "5XX": {"model": self.error_model, "description": "The server cannot serve the request now"},
        }


OPENAI = Dialect(openai_error, ErrorBody)
ANTHROPIC = Dialect(anthropic_error, AnthropicError, (b"x-request-id", b"request-id"))
OLLAMA = Dialect(ollama_error, OllamaError, untyped=True)
ERRORS = OPENAI.errors


def dialect_of(path: str) -> Dialect:
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return ANTHROPIC
    return OLLAMA if path.startswith("/api/") else OPENAI
