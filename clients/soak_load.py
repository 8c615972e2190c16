"""Requests of a soak: long texts of every kind, and a mix of what clients send, by a seeded choice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

from bad_cases import Case, cases
from checks import ASK_PERSON, ASK_WEATHER, PERSON, QUESTION, WEATHER
from prompts import CHAT, COMPLETIONS, request
from wire import HOST, Answer, leave, post, send

SIZES = (8_000_000, 1_000_000, 400_000)  # bytes; texts of the last one may fit by their size
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _random_letters(size: int) -> str:
    return "".join(random.Random(size).choices(LETTERS, k=size))


TEXTS: dict[str, Callable[[int], str]] = {
    "words": lambda size: "a " * (size // 2),
    "one word": lambda size: "a" * size,
    "emoji": lambda size: "\U0001f600" * (size // 12),  # twelve bytes in JSON
    "lines": lambda size: "\n" * (size // 2),
    "letters": _random_letters,
}
PLACES: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "prompt": lambda text: (COMPLETIONS, {"prompt": text, "max_tokens": 1}),
    "message": lambda text: (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
    "tokenize": lambda text: ("/tokenize", {"prompt": text}),
    "prediction": lambda text: (
        CHAT,
        {"messages": QUESTION, "max_tokens": 1, "prediction": {"type": "content", "content": text}},
    ),
}


def long_requests() -> Iterator[tuple[str, bytes]]:
    """Yield every kind of long request with its name: by size, text and place."""
    for size in SIZES:
        for kind, text in TEXTS.items():
            for place, body in PLACES.items():
                yield f"{size // 1000} kB, {kind}, {place}", post(*body(text(size)))


class Mix:
    """A client that never stops asking: what, and whether it leaves early, follows from its seed."""

    def __init__(self, port: int, seed: int, long: list[bytes]) -> None:
        self.port = port
        self.random = random.Random(seed)
        self.long = long
        self.bad: list[Case] = [case for case in cases() if not case.waits and b"sk-of-an-admin" not in case.request]
        self.done: dict[str, int] = {}
        self.wrong: list[str] = []

    async def run(self, until: Callable[[], bool]) -> None:
        kinds: list[tuple[str, Callable[[], Any], int]] = [
            ("chat", self._plain, 4),
            ("stream", self._stream, 4),
            ("leave", self._leave, 3),
            ("long", self._long, 2),
            ("form", self._form, 2),
            ("tools", self._tools, 2),
            ("bad", self._bad, 6),
            ("samples", self._samples, 2),
        ]
        names, plays, weights = zip(*kinds, strict=True)
        while not until():
            index = self.random.choices(range(len(names)), weights)[0]
            try:
                await plays[index]()
            except (AssertionError, OSError, TimeoutError, ValueError, KeyError) as error:
                self.wrong.append(f"{names[index]}: {type(error).__name__}: {error}"[:300])
            self.done[names[index]] = self.done.get(names[index], 0) + 1

    async def _ask(self, path: str, body: dict[str, Any], allowed: tuple[int, ...] = (200,)) -> Answer:
        return self._check(await send(self.port, post(path, body)), allowed)

    def _check(self, answer: Answer, allowed: tuple[int, ...]) -> Answer:
        if answer.status not in (*allowed, 429) or not answer.whole:
            raise AssertionError(f"{answer.status}: {answer.body[:150]!r}")
        return answer

    async def _plain(self) -> None:
        path, body = request(self.random.randrange(300), tokens=24)
        await self._ask(path, body)

    async def _stream(self) -> None:
        path, body = request(self.random.randrange(300), tokens=48)
        await self._ask(path, body | {"stream": True, "stream_options": {"include_usage": True}})

    async def _leave(self) -> None:
        """Leave in the middle of a stream, after a random number of bytes."""
        path, body = request(self.random.randrange(300), tokens=400)
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(post(path, body | {"stream": True, "ignore_eos": True}))
            await writer.drain()
            await asyncio.wait_for(reader.read(self.random.choice((1, 500, 5000))), timeout=60)
        finally:
            await leave(writer)

    async def _long(self) -> None:
        self._check(await send(self.port, self.random.choice(self.long)), (200, 400))

    async def _form(self) -> None:
        bounds = {"minimum": 0, "maximum": self.random.randrange(1, 50)}  # many different grammars
        schema = PERSON | {"properties": {**PERSON["properties"], "age": {"type": "integer", **bounds}}}
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        await self._ask(CHAT, {"messages": ASK_PERSON, "max_tokens": 60, "response_format": form})

    async def _tools(self) -> None:
        choice = self.random.choice(("auto", "required"))
        await self._ask(CHAT, {"messages": ASK_WEATHER, "max_tokens": 40, "tools": [WEATHER], "tool_choice": choice})

    async def _bad(self) -> None:
        case = self.random.choice(self.bad)
        self._check(await send(self.port, case.request), (*case.statuses, 200, 400, 401, 403, 404))

    async def _samples(self) -> None:
        path, body = request(self.random.randrange(300), tokens=16)
        await self._ask(path, body | {"n": 3, "logprobs": True if path == CHAT else 2, "temperature": 1})
