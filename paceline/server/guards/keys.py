"""The guard of API keys. It names the caller: `scope["caller"]` is a digest of the key, or the client's address.

`scope["tenant"]` is on whose behalf the engine serves: the digest, and nobody's where no keys are asked for. Addresses
are no tenants: behind a proxy all clients have one, and a client may have many.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NoReturn

from starlette.types import ASGIApp, Scope

from paceline.server.guards.check import Check, Refusal, values
from paceline.server.live import CurrentSettings
from paceline.server.problems import ADMIN_PREFIX
from paceline.server.settings import Settings

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/favicon.ico"})  # served without a key
OPEN_PREFIX = "/playground/"


class Keys(Check):
    def __init__(self, app: ASGIApp, live: CurrentSettings) -> None:
        super().__init__(app, live)
        self._digest(live.settings)
        live.listeners.append(self._digest)

    def check(self, scope: Scope, settings: Settings) -> None:
        path, control = scope["path"], scope["path"].startswith(ADMIN_PREFIX)
        scope["caller"], scope["tenant"] = (scope.get("client") or ("nobody",))[0], ""
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return
        if control and settings.admin_key is None:
            raise Refusal(403, "control routes are off: start the server with an admin key", "control_off")
        if control or settings.api_keys:
            scope["caller"] = scope["tenant"] = self._caller(scope, admin=control)

    def _caller(self, scope: Scope, *, admin: bool) -> str:
        """Name the caller by the first known key of the headers Authorization and x-api-key (Anthropic's)."""
        bearers, bare = values(scope, b"authorization"), values(scope, b"x-api-key")
        if not bearers and not bare:
            self._refuse("no key was given; send the header `Authorization: Bearer KEY`")
        keys = [
            key.strip(b" ") for scheme, _, key in (h.partition(b" ") for h in bearers) if scheme.lower() == b"bearer"
        ]
        owners = [self._owner(key, admin=admin) for key in (*keys, *bare)]
        owner = next(filter(None, owners), None)
        if len(bearers) > 1 or len(bare) > 1 or owner is None:
            self._refuse("this key is not known here, or not for this route; send `Authorization: Bearer KEY` once")
        return owner

    def _owner(self, key: bytes, *, admin: bool) -> str | None:
        """Name the owner of a key, in the same time for every key. None: the key is unknown."""
        given, found = hashlib.sha256(key).digest(), None
        for digest, is_admin in self._digests:
            if hmac.compare_digest(digest, given) and is_admin >= admin:
                found = digest.hex()[:12]
        return found

    def _digest(self, settings: Settings) -> None:
        keys = [(key, False) for key in settings.api_keys]
        keys += [] if settings.admin_key is None else [(settings.admin_key, True)]
        self._digests = [(hashlib.sha256(key.encode()).digest(), admin) for key, admin in keys]

    def _refuse(self, message: str) -> NoReturn:
        raise Refusal(401, message, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
