"""What the scripts here share: an address, named checks with a line for each, and an exit status.

A script goes on after a check that failed. Its last line is JSON, for run.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NoReturn

KEY = "none"  # the server under test has no keys; the clients insist on one
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
ASK_PERSON = [{"role": "user", "content": "Invent a person: name and age, as JSON."}]


class Tally:
    """Named checks: each is a line, and one that fails does not stop the next."""

    def __init__(self, name: str, version: str | None = None) -> None:
        self.name, self.version = name, version
        self._passed: list[str] = []
        self._failed: dict[str, str] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._failed[what] = said = f"{type(error).__name__}: {error}"
            print(f"FAILED  {what}: {said}", flush=True)
        else:
            self._passed.append(what)
            print(f"ok      {what} ({time.perf_counter() - began:.1f} s)", flush=True)

    def end(self) -> NoReturn:
        outcome = {"client": self.name, "version": self.version, "passed": self._passed}
        print(json.dumps(outcome | {"failed": self._failed}))
        sys.exit(bool(self._failed))


class Checks(Tally):
    """Of a client, at the address that was given."""

    def __init__(self, package: str, options: argparse.ArgumentParser | None = None) -> None:
        super().__init__(package, version(package))
        parser = options or argparse.ArgumentParser()
        parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the base URL (default: %(default)s)")
        self.options = parser.parse_args()
        self.url: str = self.options.url.rstrip("/")
        self.root = self.url.removesuffix("/v1")
        self.model: str = get(f"{self.url}/models")["data"][0]["id"]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def expect(holds: object, what: str) -> None:
    if not holds:
        raise AssertionError(what)
