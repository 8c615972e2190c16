"""The settings in force. Those in `RELOADABLE` change while the server runs: by `POST /admin/reload`, or SIGHUP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.errors import InvalidRequest
from paceline.server import logs
from paceline.server.settings import RELOADABLE, Settings

Source = Callable[[], Settings]


class CurrentSettings:
    """`settings` is replaced, never changed: whoever reads it once per request sees one consistent record."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.source: Source | None = None  # reads the settings anew
        self.listeners: list[Callable[[Settings], None]] = []  # called with the new settings after each reload

    def reload(self) -> dict[str, list[str]]:
        """Read the settings anew. Return the names that changed, and those that would only with a restart.

        Raises InvalidRequest and changes nothing if something is wrong with the new ones."""
        if self.source is None:
            raise InvalidRequest("this server was started without a source of settings: restart it with new ones")
        wanted = self.source()
        changed = self.settings.changes(wanted)
        now = [name for name in changed if name in RELOADABLE]
        later = [name for name in changed if name not in RELOADABLE]
        self.settings = replace(self.settings, **{name: getattr(wanted, name) for name in now})
        for listener in self.listeners:
            listener(self.settings)
        logs.say("settings reloaded", changed=now, needs_restart=later)
        return {"changed": now, "needs_restart": later}
