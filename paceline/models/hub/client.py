"""A client of the hub: the files of a repository with their digests, and downloads that go on where they broke off.

HF_ENDPOINT is the hub's address. HF_TOKEN, or the file that `hf auth login` writes, opens private and gated
repositories; it is sent to the hub alone, not to where the hub redirects.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from paceline.errors import ModelError, ModelFileError, ModelNotFound, StorageError
from paceline.models.hub.store import hugging_face_home

TIMEOUT_SECONDS = 30.0  # of a silent connection
PAUSE_SECONDS = 1.0  # before the second attempt; doubles with each that brings nothing
MAX_ATTEMPTS = 5  # in a row that bring nothing
MAX_LISTING = 1 << 26  # bytes of a repository's list of files
CHUNK = 1 << 20  # bytes

Tick = Callable[[int], None]  # bytes of a file that are here


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. `digest`: SHA-256 of a large one, else the SHA-1 that Git gives its blob."""

    path: str
    size: int
    digest: str
    url: str

    def is_at(self, path: Path) -> bool:
        """True if the file at `path` has these bytes."""
        return path.is_file() and path.stat().st_size == self.size and self._digest_of(path) == self.digest

    def part_of(self, target: Path) -> Path:
        """Name the file that has the beginning of `target` until all of it is here."""
        return target.with_name(f"{target.name}.{self.digest[:12]}.part")

    def _digest_of(self, path: Path) -> str:
        large = len(self.digest) == 64
        digest = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        return digest.hexdigest()


class Hub:
    def __init__(self) -> None:
        self.endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self._token = _token()

    def files(self, id: str) -> dict[str, RemoteFile]:
        """List the files of the main branch of a repository, at one commit."""
        try:
            with self._open(f"{self.endpoint}/api/models/{id}?blobs=true") as answer:
                listing = json.loads(answer.read(MAX_LISTING))
        except (OSError, http.client.HTTPException) as error:
            raise self._problem(id, error) from None
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{id}: the hub's list of files is not readable ({error})") from None
        try:
            files = [self._file(id, listing["sha"], entry) for entry in listing["siblings"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelFileError(f"{id}: the hub's list of files is not understood ({error})") from None
        return {file.path: file for file in files}

    def fetch(self, file: RemoteFile, target: Path, tick: Tick) -> None:
        """Fetch a file to `target`. What a broken download left is continued; the digest is checked at the end."""
        part = file.part_of(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("ab") as out:
                _lock(out, target)
                resumed = out.tell() > 0
                self._complete(file, out, tick)
                if resumed and not file.is_at(part):  # the old beginning may be at fault
                    _empty(out)
                    self._complete(file, out, tick)
                if not file.is_at(part):
                    part.unlink()
                    raise ModelFileError(f"{file.path}: the bytes that came have another digest than the hub states")
                os.replace(part, target)
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error.strerror or error}") from None

    def _complete(self, file: RemoteFile, out: IO[bytes], tick: Tick) -> None:
        """Append to `out` until it is as long as the file. Connections that break are made anew."""
        failures = 0
        while out.tell() < file.size:
            before = out.tell()
            try:
                for start, chunk in self._chunks(file, before):
                    if start != out.tell():  # the server sends everything anew
                        _empty(out)
                    out.write(chunk)
                    tick(out.tell())
            except _Broken as broken:
                failures = 1 if out.tell() > before else failures + 1
                if failures >= MAX_ATTEMPTS or not broken.may_pass:
                    raise self._problem(file.path, broken.problem) from None
                time.sleep(PAUSE_SECONDS * 2 ** (failures - 1))
        out.flush()

    def _chunks(self, file: RemoteFile, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield bytes of a file and where they begin, from `start` on if the server can. Raises _Broken."""
        try:
            with self._open(file.url, {"Range": f"bytes={start}-"} if start else {}) as answer:
                at = start if str(answer.headers["Content-Range"]).startswith(f"bytes {start}-") else 0
                while at < file.size:
                    chunk = answer.read(min(CHUNK, file.size - at))
                    if not chunk:
                        raise ConnectionError(f"the connection ended at byte {at} of {file.size}")
                    yield at, chunk
                    at += len(chunk)
        except (OSError, http.client.HTTPException) as problem:
            raise _Broken(problem) from None

    def _open(self, url: str, headers: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(url, headers={"User-Agent": "paceline", **(headers or {})})
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)

    def _file(self, id: str, commit: str, entry: dict[str, Any]) -> RemoteFile:
        path, large = entry["rfilename"], entry.get("lfs") or {}
        size, digest = large.get("size", entry["size"]), large.get("sha256") or entry["blobId"]
        parts = PurePosixPath(path).parts
        if PurePosixPath(path).is_absolute() or ".." in parts or "\0" in path or "\\" in path or not parts:
            raise ModelFileError(f"{id}: the file name {path!r:.200} leads out of the repository")
        if type(size) is not int or size < 0 or type(digest) is not str or len(digest) not in (40, 64):
            raise ModelFileError(f"{id}: the hub states no size and digest of {path!r:.200}")
        url = f"{self.endpoint}/{id}/resolve/{urllib.parse.quote(commit, safe='')}/{urllib.parse.quote(path)}"
        return RemoteFile(path, size, digest, url)

    def _problem(self, what: str, error: Exception) -> ModelError:
        status = error.code if isinstance(error, urllib.error.HTTPError) else None
        if status in (401, 403):
            given = "HF_TOKEN is not allowed to read it" if self._token else "set HF_TOKEN"
            return ModelNotFound(f"{what}: not there, private or gated ({status}); check the name, or {given}")
        if status == 404:
            return ModelNotFound(f"{what}: not found on {self.endpoint}; check the name")
        reason = getattr(error, "reason", None) or error or type(error).__name__
        return ModelNotFound(f"{what}: could not be fetched from {self.endpoint} ({reason}); try again to go on")


class _Broken(Exception):
    """A connection that failed or ended early."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(problem)
        self.problem = problem
        status = problem.code if isinstance(problem, urllib.error.HTTPError) else 500
        self.may_pass = status >= 500 or status in (408, 429)  # another attempt may not meet it


def _empty(out: IO[bytes]) -> None:
    out.truncate(0)
    out.seek(0)


def _lock(out: IO[bytes], target: Path) -> None:
    if sys.platform == "win32":
        return  # an open file cannot be opened for writing there
    import fcntl

    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ModelFileError(f"{target}: another process is fetching it; wait for that one") from None


def _token() -> str | None:
    given = os.environ.get("HF_TOKEN")
    if given is not None:
        return given.strip() or None
    try:
        path = os.environ.get("HF_TOKEN_PATH") or hugging_face_home() / "token"
        return Path(path).expanduser().read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None
