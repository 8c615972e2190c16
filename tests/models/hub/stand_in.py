"""A stand-in of the hub on this machine: repositories in memory, with the faults that a network has."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"
LARGE = 64  # bytes from which a file has a SHA-256


@dataclass
class StandIn:
    """Repositories by id, each a mapping from paths to bytes. Faults are used up one a request."""

    repositories: Mapping[str, Mapping[str, bytes]]
    token: str | None = None  # None: everybody may read
    breaks_at: list[int] = field(default_factory=list)  # bytes after which the next connections end
    statuses: list[int] = field(default_factory=list)  # the next downloads fail with these
    ranges: bool = True  # False: Range is ignored
    lies: Mapping[str, Any] = field(default_factory=dict)  # fields of the listing that are not true
    spoils: int = 0  # how many downloads have a wrong byte
    redirects_to: str | None = None  # the address of another stand-in, which has the bytes
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # (path, headers) of every request
    url: str = ""

    def listing(self, id: str) -> dict[str, Any]:
        return {"sha": COMMIT, "siblings": [_entry(path, data) for path, data in self.repositories[id].items()]} | dict(
            self.lies
        )


def _entry(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob}
    if len(data) >= LARGE:
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


@contextmanager
def running(stand_in: StandIn) -> Iterator[StandIn]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": stand_in}))
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: StandIn

    def do_GET(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.asked.append((path, dict(self.headers)))
        if hub.token is not None and self.headers["Authorization"] != f"Bearer {hub.token}":
            self.send_error(401)
        elif path.startswith("/api/models/"):
            self._list(path.removeprefix("/api/models/"))
        else:
            self._send_file(*path.lstrip("/").split(f"/resolve/{COMMIT}/"))

    def _list(self, id: str) -> None:
        if id not in self.hub.repositories:
            self.send_error(404)
            return
        text = json.dumps(self.hub.listing(id)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _send_file(self, id: str, path: str) -> None:
        hub = self.hub
        if hub.redirects_to is not None:
            self.send_response(302)
            self.send_header("Location", hub.redirects_to + self.path)
            self.end_headers()
            return
        if hub.statuses:
            self.send_error(hub.statuses.pop(0))
            return
        data = hub.repositories[id][path]
        if hub.spoils:
            hub.spoils -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if "Range" in self.headers else 0
        start = start if hub.ranges else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(data[start : start + hub.breaks_at.pop(0)] if hub.breaks_at else data[start:])

    def log_message(self, format: str, *args: object) -> None:
        pass
