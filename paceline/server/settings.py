"""Every option of the server, with its default, its limits and its line of help.

`gather` finds the values. Needs nothing of the extra `serve`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Self, get_type_hints

from paceline.checks import check_flag, check_integer, check_number
from paceline.errors import InvalidRequest, UnknownOption
from paceline.rules import BUILT_IN, Rule
from paceline.server.canary.options import CanaryOptions
from paceline.types import POOLINGS

MAX_TIMEOUT = 1e6  # seconds

HELP = {
    "host": "address to listen on; 0.0.0.0 for everybody",
    "port": "0: any free one",
    "served_name": "what clients call the model (default: 'smollm2', the hub id, or the name of the file or directory)",
    "served_aliases": "other names for the model that clients may send; * stands for any text, as in claude-*",
    "api_keys": "who may use the server; none: everybody who reaches it",
    "admin_key": "who may use the control routes; none: nobody",
    "tls_cert": "a file with the certificate chain, for https",
    "tls_key": "a file with its key",
    "allowed_hosts": "names in the Host header that are answered, or * (default: this machine's where only it is "
    "listened to and there are no keys, else all)",
    "cors_origins": "web pages of which origins may call, such as https://example.org",
    "max_body_bytes": "largest body of a request",
    "max_bodies_bytes": "bodies of all open requests together; more are told to come again later",
    "max_json_depth": "how deep JSON in a request may be nested",
    "max_json_values": "how many values JSON in a request may hold, such as token ids of prompts",
    "max_tokenize_bytes": "longest text that /tokenize takes; texts of prompts are bounded by the context",
    "max_header_bytes": "all headers of a request together",
    "max_headers": "how many headers a request may have",
    "max_connections": "open at once; on further ones only /health, /ready and /metrics are answered",
    "max_concurrency_per_key": "requests of one key (or one address, without keys) at once; 0: no limit",
    "requests_per_minute_per_key": "of one key (or one address, without keys); 0: no limit",
    "max_waiting": "sequences that wait for a place in the batch; more are told to come again later. Each key has an "
    "equal share",
    "stream_interval": "seconds between two chunks of a stream; steps that are faster travel together. 0: each alone",
    "request_timeout": "seconds a request may take",
    "header_timeout": "seconds for the headers of a request to arrive",
    "read_timeout": "seconds for the body of a request to arrive",
    "write_timeout": "seconds after which a client that reads nothing is cut off",
    "drain_timeout": "seconds that running requests get to end after SIGTERM",
    "default_rule": "acceptance rule of requests that name none",
    "default_threshold": "its threshold, where it is a lossy rule (default: the rule's own)",
    "allowed_max_draft": "longest draft a request may ask for (default: the engine's)",
    "allowed_rules": "acceptance rules a request may ask for",
    "allowed_threshold": "lowest threshold of a lossy rule that a request may ask for",
    "allowed_p_min": "lowest p_min a request may ask for",
    "allowed_drafters": "drafters a request may ask for (default: all that are loaded)",
    "embedding_pooling": "hidden states that make an embedding: mean of all tokens, or that of the last",
    "log_json": "one JSON object a line",
    "otlp_endpoint": "where OpenTelemetry traces go, such as http://127.0.0.1:4318/v1/traces; none: no traces",
    "log_prompts": "prompts stand in the log",
    "canary": "a drafter to try on a share of the requests, such as 'drafter=eagle:./new share=0.05' (default: none)",
    "state_dir": "a folder for drafters, default and canary that outlive a restart; servers that share it share one "
    "canary (default: that of the model under ~/.local/state/paceline)",
    "record": "a file to which requests are added, PROMPTS included, for `paceline audit` and `paceline replay` "
    "(default: none)",
    "record_share": "of the requests that are recorded: 1 for all",
    "record_without_text": "record lengths and hashes alone, without token ids: enough for `paceline replay`",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the server. Those in RELOADABLE may change while it runs."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    served_aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    tls_cert: str | None = None
    tls_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_bodies_bytes: int = 1 << 30
    max_json_depth: int = 64
    max_json_values: int = 1 << 18
    max_tokenize_bytes: int = 1 << 20
    max_header_bytes: int = 16 << 10
    max_headers: int = 100
    max_connections: int = 1000
    max_concurrency_per_key: int = 0
    requests_per_minute_per_key: int = 0
    max_waiting: int = 256
    stream_interval: float = 0.02
    request_timeout: float = 600.0
    header_timeout: float = 10.0
    read_timeout: float = 30.0
    write_timeout: float = 60.0
    drain_timeout: float = 30.0
    default_rule: str = str(Rule.COUPLED)
    default_threshold: float | None = None
    allowed_max_draft: int | None = None
    allowed_rules: tuple[str, ...] = tuple(map(str, BUILT_IN))
    allowed_threshold: float = 0.0
    allowed_p_min: float = 0.0
    allowed_drafters: tuple[str, ...] = ()
    embedding_pooling: str = "mean"
    log_json: bool = False
    otlp_endpoint: str | None = None
    log_prompts: bool = False
    canary: CanaryOptions | None = None
    state_dir: str | None = None
    record: str | None = None
    record_share: float = 0.01
    record_without_text: bool = False

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Make settings; a misspelt option is an error that says what was probably meant."""
        for name in options:
            if name not in HINTS:
                raise UnknownOption("server option", name, HINTS)
        return cls(**options)

    def __post_init__(self) -> None:
        self._check_integers()
        for name in ("request_timeout", "header_timeout", "read_timeout", "write_timeout"):
            check_number(name, getattr(self, name), 0, MAX_TIMEOUT, open_low=True)
        check_number("drain_timeout", self.drain_timeout, 0, MAX_TIMEOUT)
        check_number("stream_interval", self.stream_interval, 0, 1)
        check_flag("log_json", self.log_json)
        check_flag("log_prompts", self.log_prompts)
        check_number("record_share", self.record_share, 0, 1, open_low=True)
        self._check_keys()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequest("tls_cert and tls_key belong together: give both, or neither")
        self._check_speculation()
        if self.embedding_pooling not in POOLINGS:
            raise InvalidRequest(f"embedding_pooling is {' or '.join(POOLINGS)}, not {self.embedding_pooling!r}")
        if self.otlp_endpoint is not None and not re.fullmatch(r"https?://\S+", self.otlp_endpoint):
            raise InvalidRequest(
                f"otlp_endpoint is an address such as http://127.0.0.1:4318/v1/traces, not {self.otlp_endpoint!r}"
            )
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise InvalidRequest(f"a CORS origin is such as https://example.org, not {origin!r}")

    def _check_speculation(self) -> None:
        for rule in (*self.allowed_rules, self.default_rule):
            Rule(rule)  # raises UnknownOption
        if self.default_rule not in self.allowed_rules:
            raise InvalidRequest(f"default_rule {self.default_rule!r} is not among allowed_rules: allow it")
        check_number("allowed_threshold", self.allowed_threshold, 0, 1)
        check_number("allowed_p_min", self.allowed_p_min, 0, 1)
        if self.default_threshold is not None:
            if Rule(self.default_rule).threshold is None:
                raise InvalidRequest(f"default_threshold is for a lossy default_rule, not for {self.default_rule!r}")
            check_number("default_threshold", self.default_threshold, self.allowed_threshold, 1, open_low=True)

    def _check_integers(self) -> None:
        check_integer("port", self.port, 0, 65535)
        for name in (
            "max_body_bytes",
            "max_bodies_bytes",
            "max_json_depth",
            "max_json_values",
            "max_tokenize_bytes",
            "max_header_bytes",
            "max_headers",
            "max_connections",
        ):
            check_integer(name, getattr(self, name), 1, 1 << 40)
        for name in ("max_concurrency_per_key", "requests_per_minute_per_key", "max_waiting"):
            check_integer(name, getattr(self, name), 0, 1 << 40)
        if self.allowed_max_draft is not None:
            check_integer("allowed_max_draft", self.allowed_max_draft, 1, 1024)

    def _check_keys(self) -> None:
        """Check keys without showing one in a message."""
        for key in (*self.api_keys, *([] if self.admin_key is None else [self.admin_key])):
            if not isinstance(key, str) or not re.fullmatch(r"[\x21-\x7e]+", key):
                raise InvalidRequest("a key is made of visible ASCII characters, at least one, without spaces")
        if self.admin_key in self.api_keys:
            raise InvalidRequest("the admin key is also an API key: choose another")

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}:{self.port}"

    def answers_to(self, host: str) -> bool:
        """True if a request for this host (without a port) is meant for this server.

        By default a server without keys that listens on this machine only answers to local names alone: a web page
        could otherwise reach it under a name of its own that resolves to this machine."""
        if self.allowed_hosts:
            return "*" in self.allowed_hosts or host.lower() in map(str.lower, self.allowed_hosts)
        return bool(self.api_keys) or not is_local(self.host) or is_local(host)

    def is_alias(self, name: str) -> bool:
        """True if a request may call the model so, beside its own name."""
        return any(fnmatchcase(name, alias) for alias in self.served_aliases)

    def changes(self, other: Settings) -> list[str]:
        return [name for name in HINTS if getattr(self, name) != getattr(other, name)]


def is_local(host: str) -> bool:
    """True for a name or an address that every machine resolves to itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


HINTS: Mapping[str, Any] = get_type_hints(Settings)
RELOADABLE = frozenset(HINTS) - {
    "host",
    "port",
    "served_name",
    "tls_cert",
    "tls_key",
    "cors_origins",
    "max_connections",
    "header_timeout",
    "write_timeout",
    "log_json",
    "otlp_endpoint",
    "canary",
    "state_dir",
    "record",
    "record_share",
    "record_without_text",
}
