"""Collect the values of options: from a flag, the environment, a file, or the default, in this order.

    paceline serve --port 9000        PACELINE_PORT=9000        port: 9000        8000

Options of the server and of the engine are collected alike: the caller of `gather` passes their names and types. An
unknown name is an error, and so is a value of the wrong type. Reading a file needs PyYAML.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from paceline.errors import InvalidRequest, MissingExtra, UnknownOption
from paceline.server.canary.options import CanaryOptions
from paceline.sizes import parse_size

PREFIX = "PACELINE_"
# Prefixes and names of variables that are no options; Kubernetes sets those with the last two prefixes.
FOREIGN = ("PACELINE_CPU_", "PACELINE_CACHE", "PACELINE_SERVICE_", "PACELINE_PORT_")
FOREIGN_NAMES = frozenset({"PACELINE_GPU", "PACELINE_COMMIT", "PACELINE_DATA", "PACELINE_SMOLLM2", "PACELINE_CONFIG"})
FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def gather(
    hints: Mapping[str, Any], *, flags: Mapping[str, Any], environ: Mapping[str, str], file: str | None
) -> dict[str, Any]:
    """Find the values of the options in `hints` (name → type). Flags override the environment, and that the file."""
    found = {} if file is None else read_options(hints, read_yaml(file), where=file)
    found |= from_environment(hints, environ)
    given = {name: value for name, value in flags.items() if name in hints and value is not None}
    return found | {name: convert(_flag_of(name), value, hints[name], name=name) for name, value in given.items()}


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_options(hints: Mapping[str, Any], given: Mapping[Any, Any], *, where: str) -> dict[str, Any]:
    """Convert options that a file or a mapping gives. `where` names it in errors."""
    for name in given:
        if name not in hints:
            raise UnknownOption(f"option in {where}", str(name), hints)
    return {name: convert(f"{name} in {where}", value, hints[name], name=name) for name, value in given.items()}


def read_yaml(path: str) -> dict[Any, Any]:
    """Read a file whose lines are `name: value`."""
    try:
        import yaml
    except ImportError:
        raise MissingExtra("a file of settings needs PyYAML", extra="serve") from None
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise InvalidRequest(f"{path} is not YAML: {error}") from None
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest(f"{path} must hold lines such as `port: 9000`, not a {type(given).__name__}")
    return given or {}


def from_environment(hints: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Convert options that variables such as PACELINE_PORT give."""
    found = {}
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or variable.startswith(FOREIGN) or variable in FOREIGN_NAMES:
            continue
        if name == "port" and "://" in text:  # set by Kubernetes for a service called paceline
            continue
        if name not in hints:
            raise UnknownOption("environment variable", variable, [PREFIX + known.upper() for known in hints])
        if text:  # shells and compose files leave an option out by an empty variable
            found[name] = convert(variable, text, hints[name], name=name)
    return found


def convert(where: str, value: Any, hint: Any, *, name: str) -> Any:
    """Convert a value, which may be a text, to the type of its option. `where` names its origin in errors."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        [hint] = [kind for kind in get_args(hint) if kind is not type(None)]
    if hint is CanaryOptions:
        return CanaryOptions.read(value)
    try:
        return _reader(hint, name)(value)
    except (ValueError, KeyError, TypeError):
        shown = "that" if "key" in name else repr(value)
        raise InvalidRequest(f"{where} must be {_wanted(hint, name)}, not {shown}") from None


def _reader(hint: Any, name: str) -> Callable[[Any], Any]:
    if hint is int and is_size(name):
        return _size
    if name == "drafter":  # its options contain commas
        return lambda value: tuple(value.split()) if isinstance(value, str) else _texts(value)
    return {bool: _flag, int: _integer, float: _float, str: _text}.get(hint, _texts)


def is_size(name: str) -> bool:
    return name.endswith("_bytes") or name == "kv_memory"


def _wanted(hint: Any, name: str) -> str:
    if hint is int and is_size(name):
        return "a size such as 512M"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return words.get(hint, "a list of texts")


def _flag(value: Any) -> bool:
    return value if isinstance(value, bool) else FLAGS[value.lower()] if isinstance(value, str) else _refuse()


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        _refuse()
    return int(value)


def _float(value: Any) -> float:
    return _refuse() if isinstance(value, bool) else float(value)


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        _refuse()
    size = parse_size(str(value))
    return _refuse() if size is None else size


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _refuse()


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return tuple(map(_text, value))


def _refuse() -> Any:
    raise ValueError
