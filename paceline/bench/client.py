"""One streamed request to an OpenAI endpoint, with the times at which its chunks came.

Works with any server: Paceline, vLLM, SGLang, llama-server. A request that fails raises nothing: its outcome has the
error, and what had come until then. The first token is the first chunk with text in it. A chunk may hold several
tokens, so gaps are between chunks, not between tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from paceline.bench.counters import SpecCounters, read_counters
from paceline.bench.workloads import BenchPrompt
from paceline.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    import httpx

Endpoint = Literal["chat", "completions"]
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")  # fields of a chat's delta that hold text
MAX_ERROR_CHARS = 300  # length of a server's error message in the outcome


@dataclass(slots=True)
class RequestOutcome:
    """The answer to one request. Times are seconds; a failed request has those until it failed."""

    prompt: BenchPrompt
    started: float  # time by perf_counter
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between two chunks with text
    chunk_tokens: list[int] = field(default_factory=list)  # tokens of each chunk, if the server counts them
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0  # the server's count; otherwise the number of chunks with text
    counted: bool = False  # output_tokens is the server's count
    text: str = ""
    finish: str | None = None
    speculation: Mapping[str, Any] | None = None  # Paceline's statistics of the request
    error: str | None = None
    unreachable: bool = False

    @property
    def good(self) -> bool:
        return self.error is None

    @property
    def chunks(self) -> int:
        return len(self.gaps) + bool(self.ttft)

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None without a second token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Client:
    """An HTTP client of one server."""

    def __init__(
        self, url: str, *, endpoint: Endpoint = "chat", key: str | None = None, timeout: float = 600.0
    ) -> None:
        http = import_httpx("`paceline bench serve`")
        self.root = root_of(url)
        self.endpoint = endpoint
        self.errors: type[Exception] = http.HTTPError
        self._no_connection: tuple[type[Exception], ...] = (http.ConnectError, http.ConnectTimeout)
        try:
            self.http: httpx.AsyncClient = http.AsyncClient(
                base_url=self.root,
                headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {}),
                timeout=http.Timeout(timeout, connect=min(timeout, 10.0)),
                limits=http.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=False,  # a proxy would be measured, too
            )
        except http.InvalidURL as error:
            raise InvalidRequest(f"{url!r} is no address ({error}): give one such as http://127.0.0.1:8000") from error

    async def close(self) -> None:
        await self.http.aclose()

    async def first_model(self) -> str:
        """Name of the first model that the server has; raises if no server answers."""
        try:
            answer = await self.http.get("/v1/models")
            if answer.status_code == 200:
                return str(answer.json()["data"][0]["id"])
        except self.errors as error:
            raise InvalidRequest(
                f"no server answers at {self.root} ({_describe(error)}): start one there, or give another address"
            ) from error
        except (ValueError, LookupError, TypeError):
            pass
        raise InvalidRequest(
            f"{self.root}/v1/models answered {answer.status_code} and names no model: give its name with --model, or "
            "the --url of an OpenAI server"
        )

    async def counters(self) -> SpecCounters | None:
        """Counters of the server's /metrics; None if it has none or does not show them."""
        try:
            answer = await self.http.get("/metrics")
        except self.errors:
            return None
        return read_counters(answer.text) if answer.status_code == 200 else None

    async def send(self, prompt: BenchPrompt, fields: Mapping[str, Any]) -> RequestOutcome:
        """Send a prompt with further fields of the body, and read the answer to its end."""
        outcome = RequestOutcome(prompt, started=time.perf_counter())
        path = "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"
        try:
            async with self.http.stream("POST", path, json=body(prompt, self.endpoint, fields)) as answer:
                if answer.status_code != 200:
                    outcome.error = f"{answer.status_code}: {error_text(await answer.aread())}"
                    return outcome
                await _read_stream(outcome, answer)
        except self._no_connection as error:
            outcome.error, outcome.unreachable = f"no connection: {_describe(error)}", True
        except self.errors as error:
            outcome.error = f"the connection broke after {outcome.chunks} chunks: {_describe(error)}"
        return outcome


def root_of(url: str) -> str:
    """The server's address, given with or without /v1 or an endpoint."""
    bare = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions").removesuffix("/v1")
    if not bare.startswith(("http://", "https://")):
        raise InvalidRequest(f"an address such as http://127.0.0.1:8000 is needed, not {url!r}")
    return bare


def body(prompt: BenchPrompt, endpoint: Endpoint, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON body of a request; `fields` take precedence over those of the prompt."""
    if endpoint == "chat":
        if not prompt.messages:
            raise InvalidRequest(f"{prompt.id} is a recorded request of token ids: ask it with --endpoint completions")
        said: dict[str, Any] = {"messages": list(prompt.messages)}
    else:
        said = {"prompt": list(prompt.tokens) or prompt.text}
    said |= {"max_tokens": prompt.max_tokens, "seed": prompt.seed}
    said |= {"stream": True, "stream_options": {"include_usage": True}}
    return said | dict(prompt.fields) | dict(fields)


async def _read_stream(outcome: RequestOutcome, answer: httpx.Response) -> None:
    """Read all events of a stream into the outcome."""
    done, counted = False, 0
    async for moment, data in events_of(answer):
        if data == "[DONE]":
            done = True
            break
        try:
            chunk = json.loads(data)
        except ValueError:
            outcome.error = f"the stream broke after {outcome.chunks} chunks: {data[:60]!r} is not JSON"
            return
        if not isinstance(chunk, dict) or chunk.get("error"):
            outcome.error = f"the server gave up: {error_text(data.encode())}"
            return
        try:
            counted = _add_chunk(outcome, chunk, moment - outcome.started, counted)
        except (TypeError, ValueError, AttributeError):
            outcome.error = f"the stream broke after {outcome.chunks} chunks: {data[:60]!r} is no chunk of OpenAI's"
            return
    if not done and outcome.finish is None:
        outcome.error = f"the stream ended after {outcome.chunks} chunks without saying that it was finished"
    elif not outcome.ttft:
        outcome.error = "the answer has no text"
    if not outcome.counted:
        outcome.output_tokens = outcome.chunks


def _add_chunk(outcome: RequestOutcome, chunk: Mapping[str, Any], now: float, counted: int) -> int:
    """Add a chunk that came at `now`; return the tokens that the server has counted so far."""
    usage = chunk.get("usage") or {}
    if "completion_tokens" in usage:
        outcome.output_tokens, outcome.counted = int(usage["completion_tokens"]), True
        outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    outcome.speculation = chunk.get("speculation") or outcome.speculation
    for choice in chunk.get("choices") or ():
        outcome.finish = choice.get("finish_reason") or outcome.finish
        text = _text(choice)
        if text:
            if outcome.ttft:
                outcome.gaps.append(now - outcome.latency)
            else:
                outcome.ttft = now
            outcome.text += text
            outcome.latency = now
            if usage:
                outcome.chunk_tokens.append(outcome.output_tokens - counted)
                counted = outcome.output_tokens
    return counted


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    calls = delta.get("tool_calls")
    return "".join(str(delta.get(name) or "") for name in TEXT_FIELDS) + (json.dumps(calls) if calls else "")


async def events_of(answer: httpx.Response) -> AsyncIterator[tuple[float, str]]:
    """Yield the time and the data of each server-sent event. Comments and other fields of the protocol are skipped."""
    rest = b""
    async for part in answer.aiter_raw():
        moment = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line[5:].strip().decode("utf-8", errors="replace")


def error_text(content: bytes) -> str:
    """The message of an error body, in OpenAI's form or any other."""
    text = content.decode("utf-8", errors="replace")
    try:
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return " ".join(text.split())[:MAX_ERROR_CHARS] or "no reason given"


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


def import_httpx(what: str) -> Any:
    """Import httpx. `what` needs it, and is named where it is not installed."""
    try:
        import httpx
    except ImportError:
        raise MissingExtra(f"{what} needs httpx", extra="bench") from None
    return httpx
