"""The guard of path, host and headers: sizes, and forms that no honest client sends."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import Scope

from paceline.server.guards.check import BODILESS, Check, Refusal, has_body, values
from paceline.server.settings import Settings

HOST = re.compile(rb"([A-Za-z0-9](?:[A-Za-z0-9._-]{0,253})|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


class Headers(Check):
    def check(self, scope: Scope, settings: Settings) -> None:
        self._check_sizes(scope, settings)
        self._check_host(scope, settings)
        self._check_path(scope)
        self._check_framing(scope)

    def _check_framing(self, scope: Scope) -> None:
        """Refuse a body with two lengths: a proxy may believe the other one, and read its end as a new request."""
        if values(scope, b"content-length") and values(scope, b"transfer-encoding"):
            text = "a request has Content-Length or Transfer-Encoding, not both"
            raise Refusal(400, text, "ambiguous_length", {"Connection": "close"})
        if scope["method"] in BODILESS and has_body(scope):
            raise Refusal(400, f"a {scope['method']} request has no body", "unexpected_body")

    def _check_sizes(self, scope: Scope, settings: Settings) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if len(headers) > settings.max_headers or size > settings.max_header_bytes:
            raise Refusal(
                431,
                f"{len(headers)} headers of {size} bytes; {settings.max_headers} headers and "
                f"{settings.max_header_bytes} bytes are allowed",
                "headers_too_large",
            )
        target = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if target > settings.max_header_bytes:
            raise Refusal(414, f"the URL has {target} bytes, {settings.max_header_bytes} are allowed", "url_too_long")

    def _check_host(self, scope: Scope, settings: Settings) -> None:
        hosts = [HOST.fullmatch(value) for value in values(scope, b"host")]
        if len(hosts) > 1 or None in hosts:
            raise Refusal(400, "the Host header must be one name or address, with a port or without", "bad_host")
        if not all(settings.answers_to(host[1].decode()) for host in hosts if host):
            raise Refusal(400, "this server does not answer to this name; see its option allowed_hosts", "wrong_host")

    def _check_path(self, scope: Scope) -> None:
        path: str = scope["path"]
        if not path.startswith("/"):
            raise Refusal(400, "the path of a request begins with /", "bad_path")
        decoded = unquote(path)  # a second time: what is still encoded was encoded twice
        odd = decoded != path or "//" in path or "\\" in path or not path.isprintable()
        if odd or {".", ".."} & set(path.split("/")):
            raise Refusal(404, "there is no such route; paths are taken literally", "not_found")
