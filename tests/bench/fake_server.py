"""A raw HTTP server in a thread that answers as it is told to, well or badly: what a load generator may meet."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

Body = dict[str, Any]
Answer = Callable[[Body, int], Iterator[bytes | None]]  # pieces of what is sent; None: hang up here and now
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(fields: Any) -> bytes:
    return piece(b"data: %b\n\n" % (fields if isinstance(fields, bytes) else json.dumps(fields).encode()))


def delta(text: str, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} | more)


def good(words: int = 4, *, length: Callable[[Body], int] = lambda body: 7) -> Answer:
    """Two tokens a chunk, as the last chunk's usage tells. `length`: of the prompt."""

    def answer(body: Body, number: int) -> Iterator[bytes]:
        yield STREAM + event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(words):
            yield delta(f"w{i} ")
        yield event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        yield event({"choices": [], "usage": {"prompt_tokens": length(body), "completion_tokens": 2 * words}})
        yield event(b"[DONE]") + END

    return answer


def plain(status: int, text: str) -> bytes:
    data = text.encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data)


class FakeServer:
    """`answer` is asked for each POST, with its body and its number from 0 on. `dead`: nobody listens any more."""

    def __init__(self, answer: Answer, *, metrics: Callable[[], str] | None = None, models: str | None = None) -> None:
        self.answer, self.metrics = answer, metrics
        self.models = json.dumps({"data": [{"id": "m"}]}) if models is None else models
        self.asked: list[Body] = []
        self.open = self.most_open = 0
        self.url = ""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self.exchange(reader, writer):
                    pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether another may follow."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, *_ = head.split(" ")
        sizes = [line.partition(":")[2] for line in head.lower().splitlines() if line.startswith("content-len")]
        body = await reader.readexactly(int(sizes[0])) if sizes else b""
        return await self.post(writer, body) if method == "POST" else await self.get(writer, path)

    async def get(self, writer: asyncio.StreamWriter, path: str) -> bool:
        if path == "/metrics":
            writer.write(plain(200, self.metrics()) if self.metrics else plain(404, ""))
        else:
            writer.write(plain(200, self.models))
        await writer.drain()
        return True

    async def post(self, writer: asyncio.StreamWriter, body: bytes) -> bool:
        number = len(self.asked)
        self.asked.append(json.loads(body))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        pieces = list(self.answer(self.asked[-1], number))
        for left, sent in zip(reversed(range(len(pieces))), pieces, strict=True):
            self.open -= sent is None or not left  # before it is sent: whoever has the end may ask again at once
            if sent is None:
                return False
            writer.write(sent)
            await writer.drain()
            await asyncio.sleep(0.002)
        return True

    def die(self) -> None:
        self.listener.close()


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        server.listener = await asyncio.start_server(server.talk, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{server.listener.sockets[0].getsockname()[1]}"

    async def end() -> None:
        server.listener.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    loop.run_until_complete(begin())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(timeout=100)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=100)
        loop.close()
