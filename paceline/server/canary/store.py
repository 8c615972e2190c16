"""The state on disk: drafters that were loaded while the server ran, the default, the canary and those before it.

One folder belongs to one deployment. Its servers share one canary: each adds its own sums to those in the file under a
lock, and follows what the file says. The folder is made when there is something to keep, for its owner alone (0700, the
files 0600). A file is replaced as a whole, so that a crash leaves the old one or the new one. A file that is damaged or
of another version is never overwritten.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import StorageError
from paceline.server.canary.trial import Trial

VERSION = 1
FILE, LOCK = "drafters.json", "drafters.lock"
MAX_PAST = 20  # canaries that are remembered


@dataclass(slots=True)
class State:
    """The content of the state file. `default`: "" where nobody has chosen one."""

    drafters: dict[str, str] = field(default_factory=dict)  # name → words
    default: str = ""
    canary: Trial | None = None
    past: list[Trial] = field(default_factory=list)  # the latest last

    def end_canary(self) -> None:
        if self.canary is not None:
            self.past = [*self.past, self.canary][-MAX_PAST:]
            self.canary = None


def state_folder(given: str | None, model: str) -> Path:
    """Return the folder of a deployment: the given one, or that of its model under the user's state."""
    if given is not None:
        return Path(given).expanduser()
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return home / "paceline" / (re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-") or "model")


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / FILE

    def stamp(self) -> int:
        """Return a number that changes with the file; 0: there is none."""
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0

    def read(self) -> State:
        """Read the state; an empty one if there is no file. Raises StorageError if the file cannot be used."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return State()
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"the state file {self._path} cannot be read: {error}") from None
        return self._parse(text)

    def change(self, edit: Callable[[State], None]) -> State:
        """Change the state under the lock of all servers, and return it. What `edit` raises changes nothing."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                state = self.read()
                edit(state)
                self._write(state)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"the state folder {self.folder} cannot be written ({error.strerror or error}): "
                "choose another one with state_dir"
            ) from None
        return state

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _write(self, state: State) -> None:
        beside = self.folder / f"{FILE}.{os.getpid()}"
        fields = {"version": VERSION, **asdict(state)}
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(file, "w", encoding="utf-8") as out:
            json.dump(fields, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, self._path)

    def _parse(self, text: str) -> State:
        try:
            given: dict[str, Any] = json.loads(text)
            version = given.pop("version")
            if version == VERSION:
                canary = given.pop("canary")
                past = [Trial.read(each) for each in given.pop("past")]
                return State(**given, canary=None if canary is None else Trial.read(canary), past=past)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StorageError(
                f"the state file {self._path} is damaged ({type(error).__name__}: {error}): move it away to begin anew"
            ) from None
        raise StorageError(
            f"the state file {self._path} has version {version!r}, and this Paceline reads {VERSION}: "
            "use the Paceline that wrote it, or move the file away to begin anew"
        )
