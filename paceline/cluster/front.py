"""The front of a replica: what a request and its answer need in a cluster, around the server's own app.

Names the replica in every answer, refuses a request that is meant for another, and notes beginnings of prompts for the
routers. Tokens of a stream pass through nothing but their `Pace`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.cluster.door import IMPORT_PATH, VARIABLE
from paceline.cluster.headers import PREFIX, REPLICA, value_of
from paceline.cluster.pace import Pace
from paceline.server import logs
from paceline.server.guards.trace import DIRECT_SEND
from paceline.server.problems import error_response
from paceline.server.sse import PACING


class Front:
    """An app. `note` gets the beginnings of every prompt."""

    def __init__(self, app: ASGIApp, *, name: str, note: Callable[[list[str]], None]) -> None:
        self.app, self.name, self._note = app, name, note
        self._pace = Pace()
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (REPLICA, self.name.encode())]}
            await send(message)

        scope = _below_root(scope)
        wanted = value_of(scope["headers"], REPLICA)
        if wanted is not None and wanted != self.name:
            text = f"the header {REPLICA.decode()} names a replica that is gone; leave it out, or name another"
            await error_response(421, text, path=scope["path"], code="wrong_replica")(scope, receive, named)
            return
        self._take(scope)
        with self._pace.stream() as pacing:
            await self.app({**scope, DIRECT_SEND: send, PACING: pacing}, receive, named)

    def _take(self, scope: Scope) -> None:
        said = value_of(scope["headers"], PREFIX)
        if said:
            self._note(said.split(","))
        if said is None and not self._warned:
            self._warned = True
            hint = f"start Ray with {VARIABLE}={IMPORT_PATH}"
            logs.say("proxy without a door", level=logging.WARNING, effect="no routing by prefix", hint=hint)


def _below_root(scope: Scope) -> Scope:
    """Take the application's own prefix off the path: guards and routes know their paths alone."""
    root = scope.get("root_path") or ""
    return {**scope, "path": scope["path"].removeprefix(root) or "/", "root_path": ""} if root else scope
