"""Where a setting comes from, and what is said of one that is wrong."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import build_parsers
from paceline.cli.options import drafters_of
from paceline.cli.serve import _for_loading, options_of
from paceline.config import EngineConfig
from paceline.errors import InvalidRequest, UnknownOption
from paceline.server.canary.options import CanaryOptions
from paceline.server.gather import gather
from paceline.server.launch import LOADING
from paceline.server.settings import HELP, HINTS, RELOADABLE, Settings

# A text as in a flag or a variable → what it means.
PARSER = build_parsers()[0]
VALUES: dict[str, tuple[str, Any]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("9000", 9000),
    "served_name": ("a/b", "a/b"),
    "served_aliases": ("claude-*", ("claude-*",)),
    "api_keys": ("sk-1", ("sk-1",)),
    "admin_key": ("sk-2", "sk-2"),
    "tls_cert": ("c.pem", "c.pem"),
    "tls_key": ("k.pem", "k.pem"),
    "allowed_hosts": ("example.org", ("example.org",)),
    "cors_origins": ("https://a.example", ("https://a.example",)),
    "max_body_bytes": ("1.5M", 3 << 19),
    "max_bodies_bytes": ("64M", 64 << 20),
    "max_json_depth": ("5", 5),
    "max_json_values": ("1000", 1000),
    "max_tokenize_bytes": ("2000", 2000),
    "max_header_bytes": ("32K", 32 << 10),
    "max_headers": ("7", 7),
    "max_connections": ("8", 8),
    "max_concurrency_per_key": ("2", 2),
    "requests_per_minute_per_key": ("60", 60),
    "max_waiting": ("0", 0),
    "stream_interval": ("0", 0.0),
    "request_timeout": ("1.5", 1.5),
    "header_timeout": ("2", 2.0),
    "read_timeout": ("3", 3.0),
    "write_timeout": ("4", 4.0),
    "drain_timeout": ("0", 0.0),
    "default_rule": ("rejection", "rejection"),
    "default_threshold": ("0.2", 0.2),
    "allowed_max_draft": ("4", 4),
    "allowed_rules": ("coupled", ("coupled",)),
    "allowed_threshold": ("0.1", 0.1),
    "allowed_p_min": ("0.25", 0.25),
    "allowed_drafters": ("ngram", ("ngram",)),
    "embedding_pooling": ("last", "last"),
    "log_json": ("true", True),
    "log_prompts": ("on", True),
    "otlp_endpoint": ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
    "canary": ("drafter=eagle:./new,max_draft=3 share=0.1", CanaryOptions("eagle:./new,max_draft=3", share=0.1)),
    "state_dir": ("/var/lib/p", "/var/lib/p"),
    "record": ("served.jsonl", "served.jsonl"),
    "record_share": ("0.5", 0.5),
    "record_without_text": ("true", True),
}
NAMES = [field.name for field in fields(Settings)]


def said(*argv: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    return options_of(PARSER.parse_args(["serve", *argv]), environ or {})


def flag(name: str, text: str) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    return [option] if HINTS[name] is bool else [option, text]


@pytest.mark.parametrize("name", NAMES)
def test_a_flag_a_variable_or_a_line(name: str, tmp_path: Path) -> None:
    text, value = VALUES[name]
    assert said(*flag(name, text))[name] == value
    assert said(environ={f"PACELINE_{name.upper()}": text})[name] == value
    file = tmp_path / "settings.yaml"
    file.write_text(f"{name}: {text}\n")
    assert said("--config", str(file))[name] == value
    assert said(environ={"PACELINE_CONFIG": str(file)})[name] == value
    assert getattr(Settings(), name) != value


def test_every_setting_is_described() -> None:
    assert list(HELP) == NAMES


def test_names_do_not_collide() -> None:
    engine = {field.name for field in fields(EngineConfig)}
    assert not engine & set(NAMES)
    assert not set(LOADING) & (engine | set(NAMES))


def test_the_nearest_to_the_user_counts(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\nhost: file\nmax_waiting: 1\nread_timeout: 1\n")
    environ = {"PACELINE_PORT": "2", "PACELINE_HOST": "environment", "PACELINE_MAX_WAITING": "2", "OTHER": "x"}
    given = said("--config", str(file), "--port", "3", "--host", "flag", environ=environ)
    assert (given["port"], given["host"], given["max_waiting"], given["read_timeout"]) == (3, "flag", 2, 1.0)


def test_models_and_the_engine_travel_the_same_way(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: a\ndrafter: [ngram, b]\nkv_memory: 2G\nmax_sequences: 3\nprefix_cache: false\n")
    given = said("--config", str(file), environ={"PACELINE_MAX_SEQUENCES": "4", "PACELINE_DEVICE": "cpu"})
    assert given == {
        "model": "a",
        "drafter": ("ngram", "b"),
        "kv_memory": 2 << 30,
        "max_sequences": 4,
        "prefix_cache": False,
        "device": "cpu",
        "format": "auto",
    }
    assert said("c", "--config", str(file))["model"] == "c"
    assert said(environ={"PACELINE_DRAFTER": "ngram:min_ngram=1,max_ngram=2 b"})["drafter"] == (
        "ngram:min_ngram=1,max_ngram=2",
        "b",
    )
    assert said() == {"model": "smollm2", "format": "auto", "device": "auto"}


@pytest.mark.parametrize(
    ("text", "drafters"),
    [
        ("drafter: []", []),
        ("drafter: none", []),
        ("drafter: [none]", []),
        ("drafter: [b, ngram]", ["b", "ngram", "portfolio"]),
        ("model: other", ["suffix"]),  # where nothing is said of them
    ],
)
def test_an_empty_list_of_drafters_is_none(text: str, drafters: list[str], tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    args = PARSER.parse_args(["serve", "--config", str(file)])
    assert drafters_of(_for_loading(args, options_of(args, {}))) == drafters


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "did you mean 'port'"),
        ("port: x", "port in .* must be a whole number, not 'x'"),
        ("port: 1.5", "a whole number"),
        ("port: true", "a whole number"),
        ("port: [1]", "a whole number"),
        ("request_timeout: soon", "must be a number"),
        ("request_timeout: false", "must be a number"),
        ("log_json: 3", "must be true or false"),
        ("host: 3", "must be a text"),
        ("api_keys: [3]", "must be a list of texts, not that"),
        ("max_body_bytes: lots", "a size such as 512M, not 'lots'"),
        ("port: null", "a whole number"),
        ("- port", "not a list"),
        ("{", "is not YAML"),
        ("? [a]\n: 1", "is not YAML"),
        ("1: 2", "unknown option in .* '1'"),
    ],
)
def test_files_that_say_something_wrong(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        said("--config", str(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        said("--config", str(tmp_path / "none.yaml"))


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("# nothing\n")
    assert gather(HINTS, flags={}, environ={}, file=str(file)) == {}


def test_a_misspelt_variable() -> None:
    with pytest.raises(UnknownOption, match="did you mean 'PACELINE_PORT'"):
        said(environ={"PACELINE_PROT": "1"})


def test_an_empty_variable_says_nothing() -> None:
    assert said(environ={"PACELINE_ADMIN_KEY": "", "PACELINE_API_KEYS": "", "PACELINE_PORT": ""}) == said()


def test_variables_that_kubernetes_sets_are_not_ours() -> None:
    environ = {"PACELINE_PORT": "tcp://10.0.0.1:8000", "PACELINE_PORT_8000_TCP": "x", "PACELINE_SERVICE_HOST": "y"}
    assert "port" not in said(environ=environ)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prot": 1}, "did you mean 'port'"),
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"stream_interval": 1.5}, "stream_interval"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"request_timeout": float("nan")}, "request_timeout"),
        ({"drain_timeout": -1}, "drain_timeout"),
        ({"allowed_max_draft": 0}, "allowed_max_draft"),
        ({"allowed_rules": ("couple",)}, "did you mean 'coupled'"),
        ({"default_rule": "couple"}, "did you mean 'coupled'"),
        ({"default_rule": "typical", "allowed_rules": ("coupled",)}, "not among allowed_rules"),
        ({"default_threshold": 0.5}, "not for 'coupled'"),
        ({"default_rule": "typical", "default_threshold": 0.1, "allowed_threshold": 0.2}, "default_threshold"),
        ({"allowed_threshold": 2.0}, "allowed_threshold"),
        ({"allowed_p_min": -1.0}, "allowed_p_min"),
        ({"tls_cert": "a"}, "belong together"),
        ({"cors_origins": ("example.org",)}, "CORS origin"),
        ({"cors_origins": ("https://example.org/path",)}, "CORS origin"),
        ({"api_keys": ("",)}, "a key is"),
        ({"api_keys": ("a b",)}, "a key is"),
        ({"admin_key": "é"}, "a key is"),
        ({"api_keys": ("a",), "admin_key": "a"}, "choose another"),
        ({"log_json": 1}, "log_json"),
        ({"otlp_endpoint": "collector:4318"}, "otlp_endpoint"),
    ],
)
def test_values_that_are_not_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Settings.of(**options)


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(Settings(api_keys=("secret",), admin_key="secret-too"))
    with pytest.raises(InvalidRequest) as caught:
        Settings(api_keys=("secret key",))
    assert "secret" not in str(caught.value)


def test_what_may_be_reloaded() -> None:
    assert set(NAMES) > RELOADABLE > {"api_keys", "admin_key", "max_waiting", "requests_per_minute_per_key"}
    assert not RELOADABLE & {"host", "port", "tls_cert", "tls_key"}
    assert Settings().changes(Settings(port=1, max_waiting=2)) == ["port", "max_waiting"]


def test_urls() -> None:
    assert Settings(port=1).url == "http://127.0.0.1:1"
    assert Settings(host="::1", tls_cert="a", tls_key="b").url == "https://[::1]:8000"


@pytest.mark.parametrize(
    ("options", "host", "expected"),
    [
        ({}, "localhost", True),
        ({}, "127.0.0.1", True),
        ({}, "[::1]", True),
        ({}, "app.localhost", True),
        ({}, "evil.example", False),
        ({}, "10.0.0.1", False),
        ({"host": "localhost"}, "evil.example", False),
        ({"api_keys": ("a",)}, "evil.example", True),
        ({"host": "0.0.0.0"}, "example.org", True),
        ({"allowed_hosts": ("example.org",)}, "Example.org", True),
        ({"allowed_hosts": ("example.org",)}, "localhost", False),
        ({"allowed_hosts": ("*",)}, "example.org", True),
    ],
)
def test_names_that_are_answered(options: dict[str, Any], host: str, expected: bool) -> None:
    assert Settings(**options).answers_to(host) == expected
