"""The settings in force. `POST /admin/reload` and SIGHUP reload those in `RELOADABLE` while the server runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.errors import InvalidRequest
from paceline.server import logs
from paceline.server.settings import RELOADABLE, Settings

Source = Callable[[], Settings]


class CurrentSettings:
    """Holder of the settings. A reload replaces `settings` as a whole: read it once per request for consistency."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.source: Source | None = None  # reads the settings anew
        self.listeners: list[Callable[[Settings], None]] = []  # called with the new settings after each reload

    def reload(self) -> dict[str, list[str]]:
        """Read the settings anew. Return the names that changed, and those that need a restart to change.

        Raises InvalidRequest and changes nothing if the new settings are invalid."""
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
