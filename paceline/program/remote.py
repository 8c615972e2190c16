"""The backend of an OpenAI server: Paceline, or any other. One thread with an event loop talks to it.

A server of Paceline's gets everything that an LLM gets, and gives the same texts for the same seeds. Another server
gets OpenAI's own fields alone, since it might ignore others: a program that needs more gets an error which names the
field. `select` needs the field `prompt_logprobs`, which vLLM has, too: an answer without scores is an error.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.bench.client import error_text, events_of, import_httpx, root_of
from paceline.errors import Failed, InvalidRequest, PacelineError
from paceline.llm import Sample
from paceline.program.bodies import check_fields, gen_body, score_body
from paceline.program.call import Call, Usage
from paceline.program.expressions import Gen, Select
from paceline.program.selection import option_scores, prefix_length
from paceline.types import Finish

if TYPE_CHECKING:
    import httpx

OWNER = "paceline"  # owner of the models of a server of Paceline's
FINISHES = {"length": Finish.LENGTH, "stop": Finish.STOP}
AT_ONCE = 64  # requests that a server gets at the same time
Scored = list[tuple[int, float | None]]  # tokens of a prompt with their log-probabilities


class Remote:
    """A server that programs run on. `model`: by default the first one that it names."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        timeout: float = 600.0,
        at_once: int = AT_ONCE,
    ) -> None:
        """`timeout`: seconds without an answer after which a request fails. `at_once`: requests at the same time."""
        self._http = import_httpx("a program on a Remote")
        self.root = root_of(url)
        self._model, self._key, self._timeout, self._at_once = model, key, timeout, at_once
        self._lock = threading.Lock()
        self._users = 0
        self._loop: _Loop | None = None

    def open(self) -> None:
        with self._lock:
            if self._loop is None:
                self._loop = _Loop(self._client(), self._at_once)
            self._users += 1

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._loop is not None:
                self._loop.end()
                self._loop = None

    def submit(self, call: Call) -> None:
        if (loop := self._loop) is not None:  # None: the call has ended with its run
            loop.begin(call, partial(self._answer, loop))

    def cancel(self, call: Call) -> None:
        if (loop := self._loop) is not None:
            loop.cancel(call)

    def _client(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = self._http.Timeout(self._timeout, connect=min(self._timeout, 10.0))
        made: httpx.AsyncClient = self._http.AsyncClient(base_url=self.root, headers=headers, timeout=timeout)
        return made

    # On the loop's thread.

    async def _answer(self, loop: _Loop, call: Call) -> None:
        """Run a call to its end, whatever happens."""
        try:
            async with loop.places:
                server = await self._server(loop)
                await (self._gen if isinstance(call.ask, Gen) else self._select)(loop.client, call, server)
        except self._http.HTTPError as error:
            call.fail(Failed(502, "no_answer", f"{self.root} did not answer: {error or type(error).__name__}"))
        except BaseException as error:  # of any kind: nobody may wait for the call for ever
            call.fail(error)

    async def _server(self, loop: _Loop) -> tuple[str, bool]:
        """Ask for the name of the model, and whether the server is one of Paceline's; once in a session."""
        if loop.server is None:
            answer = await loop.client.get("/v1/models")
            _check(answer.status_code, answer.content, self.root)
            cards = answer.json().get("data") or [{}]
            name = self._model or cards[0].get("id")
            if not isinstance(name, str):
                raise InvalidRequest(f"{self.root}/v1/models names no model: give one with Remote(url, model=…)")
            loop.server = name, cards[0].get("owned_by") == OWNER
        return loop.server

    async def _gen(self, client: httpx.AsyncClient, call: Call, server: tuple[str, bool]) -> None:
        model, ours = server
        assert isinstance(call.ask, Gen)
        prompt = call.prompt
        path, body = gen_body(call.ask, prompt, seed=call.seed, cache_salt=call.cache_salt)
        check_fields(body, ours=ours, root=self.root)
        sample, usage = Sample(), Usage()
        async with client.stream("POST", path, json=body | {"model": model}) as answer:
            if answer.status_code != 200:
                _check(answer.status_code, await answer.aread(), self.root)
            async for _, data in events_of(answer):
                if data != "[DONE]":
                    usage = _add(call, sample, _chunk(data, self.root), usage)
        if sample.finish is None:
            raise Failed(502, "no_end", f"the answer of {self.root} broke off after {len(sample.text)} characters")
        call.end_gen(sample, usage)

    async def _select(self, client: httpx.AsyncClient, call: Call, server: tuple[str, bool]) -> None:
        ask, prompt, (model, ours) = call.ask, call.prompt, server
        assert isinstance(ask, Select)
        if not prompt.text and not prompt.messages:
            raise InvalidRequest("select needs text before it: the first token of a text has no log-probability")
        texts = [prompt, *map(prompt.followed_by, ask.options)]
        before, *scored = await asyncio.gather(
            *(
                self._scores(client, score_body(text, cache_salt=call.cache_salt), model=model, ours=ours)
                for text in texts
            )
        )
        first = prefix_length(_tokens(before), [_tokens(each) for each in scored])
        logprobs = [[logprob for _, logprob in each[first:] if logprob is not None] for each in scored]
        usage = Usage(prompt_tokens=sum(map(len, [before, *scored])))
        call.end_select(option_scores(ask, logprobs), usage)

    async def _scores(
        self, client: httpx.AsyncClient, request: tuple[str, dict[str, Any]], *, model: str, ours: bool
    ) -> Scored:
        path, body = request
        check_fields(body, ours=ours, root=self.root, besides=("prompt_logprobs",))
        answer = await client.post(path, json=body | {"model": model})
        _check(answer.status_code, answer.content, self.root)
        found = answer.json()
        scores = found.get("prompt_logprobs") or found["choices"][0].get("prompt_logprobs")
        if not scores:
            raise InvalidRequest(
                f"select needs prompt_logprobs, and {self.root} gives none: run the program on an LLM or a server that "
                "has them, or use gen with choices",
                param="select",
            )
        return [_own(each) for each in scores]


class _Loop:
    """An event loop on a thread of its own, and what lives on it."""

    def __init__(self, client: httpx.AsyncClient, at_once: int) -> None:
        self.client = client
        self.places = asyncio.Semaphore(at_once)
        self.server: tuple[str, bool] | None = None  # name of the model, and whether the server is one of Paceline's
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote", daemon=True)
        self._thread.start()

    def begin(self, call: Call, work: Any) -> None:
        self._loop.call_soon_threadsafe(self._start, call, work)

    def cancel(self, call: Call) -> None:
        self._loop.call_soon_threadsafe(self._cancel, call)

    def end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start(self, call: Call, work: Any) -> None:
        if not call.ended:
            task = self._tasks[call] = self._loop.create_task(work(call))
            task.add_done_callback(lambda _: self._tasks.pop(call))

    def _cancel(self, call: Call) -> None:
        if call in self._tasks:
            self._tasks[call].cancel()

    async def _end(self) -> None:
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.aclose()


def _check(status: int, content: bytes, root: str) -> None:
    """Raise for an answer that is an error: the server's own words."""
    if status != 200:
        said = error_text(content)
        made: PacelineError = Failed(status, "refused", f"{root} answered {status}: {said}")
        raise InvalidRequest(str(made)) if 400 <= status < 500 and status != 429 else made


def _chunk(data: str, root: str) -> Mapping[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise Failed(502, "no_json", f"{root} sent {data[:60]!r}, which is no chunk of OpenAI's") from None
    if not isinstance(chunk, dict) or chunk.get("error"):
        raise Failed(502, "gave_up", f"{root} gave up: {error_text(data.encode())}")
    return chunk


def _add(call: Call, sample: Sample, chunk: Mapping[str, Any], usage: Usage) -> Usage:
    """Add a chunk to the sample, and return what is known of its tokens."""
    for choice in chunk.get("choices") or ():
        text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        sample.text += text or ""
        call.add(text or "")
        if choice.get("finish_reason") is not None:
            sample.finish = FINISHES.get(choice["finish_reason"], Finish.STOP)
            sample.stop = choice.get("stop_reason")
    counted, drafts = chunk.get("usage") or {}, chunk.get("speculation") or {}
    details = counted.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=counted.get("prompt_tokens", usage.prompt_tokens),
        cached_tokens=details.get("cached_tokens") or usage.cached_tokens,
        output_tokens=counted.get("completion_tokens", usage.output_tokens),
        drafted=drafts.get("num_draft_tokens", usage.drafted),
        accepted=drafts.get("num_accepted_tokens", usage.accepted),
    )


def _own(score: Mapping[str, Mapping[str, Any]] | None) -> tuple[int, float | None]:
    """Read the score of a token: by its id, the only one; None for the first."""
    if score is None:
        return -1, None
    [(token, known)] = score.items()
    return int(token), float(known["logprob"])


def _tokens(scored: Scored) -> list[int]:
    return [token for token, _ in scored]
