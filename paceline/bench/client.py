"""One request to an OpenAI endpoint, streamed, with the moments at which its parts came.

Any server will do: Paceline, vLLM, SGLang, llama-server. Nothing is raised for a request that fails: its outcome says
what happened, and keeps what had come until then. What counts as the first token is the first chunk with text in it; a
chunk may hold several tokens, so the gaps are between chunks, not between tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from paceline.bench.counters import Counters, read_counters
from paceline.bench.workloads import Ask
from paceline.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    import httpx

Kind = Literal["chat", "completions"]
TEXTS = ("content", "reasoning_content", "reasoning")  # of a chat's delta
MOST_ERROR = 300  # characters of what a server says about a request it did not like


@dataclass(slots=True)
class Outcome:
    """What came of one ask. Times are seconds; those of a failed one go as far as it came."""

    ask: Ask
    started: float  # on this process's clock
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between two chunks with text
    bursts: list[int] = field(default_factory=list)  # tokens of each chunk, where the server says so
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0  # as the server counts; else the chunks with text
    counted: bool = False  # by the server
    text: str = ""
    finish: str | None = None
    speculation: Mapping[str, Any] | None = None  # what Paceline says about it
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
        """Seconds a token after the first; None where there is no second."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Client:
    """Of one server."""

    def __init__(self, url: str, *, kind: Kind = "chat", key: str | None = None, timeout: float = 600.0) -> None:
        http = _httpx()
        self.root = root_of(url)
        self.kind = kind
        self._errors: type[Exception] = http.HTTPError
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
        """What the server serves, and whether there is one at all."""
        try:
            answer = await self.http.get("/v1/models")
            if answer.status_code == 200:
                return str(answer.json()["data"][0]["id"])
        except self._errors as error:
            raise InvalidRequest(
                f"no server answers at {self.root} ({_said(error)}): start one there, or give another --url"
            ) from error
        except (ValueError, LookupError, TypeError):
            pass
        raise InvalidRequest(
            f"{self.root}/v1/models answered {answer.status_code} and names no model: give its name with --model, or "
            "the --url of an OpenAI server"
        )

    async def counters(self) -> Counters | None:
        """None where the server has none, or does not show them."""
        try:
            answer = await self.http.get("/metrics")
        except self._errors:
            return None
        return read_counters(answer.text) if answer.status_code == 200 else None

    async def ask(self, ask: Ask, fields: Mapping[str, Any]) -> Outcome:
        outcome = Outcome(ask, started=time.perf_counter())
        path = "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"
        try:
            async with self.http.stream("POST", path, json=body(ask, self.kind, fields)) as answer:
                if answer.status_code != 200:
                    outcome.error = f"{answer.status_code}: {_complaint(await answer.aread())}"
                    return outcome
                await _listen(outcome, answer)
        except self._no_connection as error:
            outcome.error, outcome.unreachable = f"no connection: {_said(error)}", True
        except self._errors as error:
            outcome.error = f"the connection broke after {outcome.chunks} chunks: {_said(error)}"
        return outcome


def root_of(url: str) -> str:
    """The server's address, whether it was given with or without /v1 or an endpoint."""
    bare = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions").removesuffix("/v1")
    if not bare.startswith(("http://", "https://")):
        raise InvalidRequest(f"an address such as http://127.0.0.1:8000 is needed, not {url!r}")
    return bare


def body(ask: Ask, kind: Kind, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` go before what an ask has."""
    if kind == "chat":
        if not ask.messages:
            raise InvalidRequest(f"{ask.id} is a recorded request of token ids: ask it with --endpoint completions")
        said: dict[str, Any] = {"messages": list(ask.messages)}
    else:
        said = {"prompt": list(ask.tokens) or ask.text}
    usual = {"max_tokens": ask.max_tokens, "seed": ask.seed, "stream": True, "stream_options": {"include_usage": True}}
    return said | usual | dict(fields)


async def _listen(outcome: Outcome, answer: httpx.Response) -> None:
    done, counted = False, 0
    async for moment, data in _events(answer):
        if data == "[DONE]":
            done = True
            break
        try:
            chunk = json.loads(data)
        except ValueError:
            outcome.error = f"the stream broke after {outcome.chunks} chunks: {data[:60]!r} is not JSON"
            return
        if not isinstance(chunk, dict) or chunk.get("error"):
            outcome.error = f"the server gave up: {_complaint(data.encode())}"
            return
        try:
            counted = _hear(outcome, chunk, moment - outcome.started, counted)
        except (TypeError, ValueError, AttributeError):
            outcome.error = f"the stream broke after {outcome.chunks} chunks: {data[:60]!r} is no chunk of OpenAI's"
            return
    if not done and outcome.finish is None:
        outcome.error = f"the stream ended after {outcome.chunks} chunks without saying that it was finished"
    elif not outcome.ttft:
        outcome.error = "the answer has no text"
    if not outcome.counted:
        outcome.output_tokens = outcome.chunks


def _hear(outcome: Outcome, chunk: Mapping[str, Any], now: float, counted: int) -> int:
    """Take a chunk in; gives the tokens that the server has counted so far."""
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
                outcome.bursts.append(outcome.output_tokens - counted)
                counted = outcome.output_tokens
    return counted


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    calls = delta.get("tool_calls")
    return "".join(str(delta.get(name) or "") for name in TEXTS) + (json.dumps(calls) if calls else "")


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[float, str]]:
    """The data of each event, and when it came. Comments and other fields of the protocol are passed over."""
    rest = b""
    async for part in answer.aiter_raw():
        moment = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line[5:].strip().decode("utf-8", errors="replace")


def _complaint(content: bytes) -> str:
    """What an error body says, in OpenAI's form or any other."""
    text = content.decode("utf-8", errors="replace")
    try:
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return " ".join(text.split())[:MOST_ERROR] or "no reason given"


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise MissingExtra("`paceline bench serve` needs httpx: pip install 'paceline[bench]'") from None
    return httpx
