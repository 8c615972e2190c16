"""HTTP/1.1 byte by byte: requests that no client library would send, and hundreds at once.

Not a client for general use: it speaks to a server on this machine, one request a connection, and reads an answer to
its end. `seconds` of an answer is the time from the first byte sent to the last one read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
JSON = {"Content-Type": "application/json"}
PATIENCE = 300.0  # seconds for an answer
PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class Answer:
    status: int  # 0: the connection ended without one
    headers: dict[str, str]  # names in lower case
    body: bytes
    seconds: float
    whole: bool = True  # False: the connection ended before the body did

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Of a stream, as JSON, without [DONE]."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    fields = {"Host": "localhost", "Connection": "close", **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(path: str, body: bytes | Any, headers: dict[str, str] | None = None) -> bytes:
    """A whole request; a body that is not bytes becomes JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, {**JSON, "Content-Length": str(len(content)), **(headers or {})}) + content


def get(path: str, headers: dict[str, str] | None = None) -> bytes:
    return head("GET", path, headers or {})


async def send(port: int, request: bytes, *, patience: float = PATIENCE) -> Answer:
    """The answer to these bytes. A server may answer, and stop reading, before it has all of them."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 24)
    began = time.perf_counter()
    try:
        async with asyncio.timeout(patience):
            reading = asyncio.create_task(read(reader))
            writing = asyncio.create_task(_write(writer, request))
            reading.add_done_callback(lambda _: writing.cancel())
            await asyncio.gather(writing, return_exceptions=True)
            status, headers, body, whole = await reading
            return Answer(status, headers, body, time.perf_counter() - began, whole)
    finally:
        await leave(writer)


async def _write(writer: asyncio.StreamWriter, request: bytes) -> None:
    """In pieces, so that an answer that comes early is seen early."""
    for start in range(0, len(request), PIECE):
        writer.write(request[start : start + PIECE])
        await writer.drain()


async def leave(writer: asyncio.StreamWriter) -> None:
    """At once, whatever is still to be sent."""
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def read(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes, bool]:
    """Status, headers, body, and whether the body came to its end."""
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, {}, b"", False
    pairs = [line.partition(":") for line in lines if line]
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body = bytearray()
    try:
        whole = await _read_body(reader, headers, body)
    except (asyncio.IncompleteReadError, ConnectionError):
        whole = False
    return int(first.split()[1]), headers, bytes(body), whole


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str], body: bytearray) -> bool:
    if headers.get("transfer-encoding") != "chunked":
        body += await reader.readexactly(int(headers.get("content-length", 0)))
        return True
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return True
