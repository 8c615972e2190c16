"""Checked access to the values of an untrusted mapping: a config.json or the metadata of a GGUF file.

The error of every getter says which file, which field, what was found and what is allowed. null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ModelFileError


class Fields:
    """An untrusted mapping. `source` names its file in messages; `prefix` is put before every key."""

    def __init__(self, values: Mapping[str, Any], *, source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self._present(key, default, f"a whole number from {low} to {high}")
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"is {value!r:.100}; allowed: a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 1e-12, high: float = 1e12) -> float:
        value = self._present(key, default, f"a number from {low:g} to {high:g}")
        if type(value) not in (int, float) or not low <= value <= high:  # False for NaN
            raise self.error(key, f"is {value!r:.100}; allowed: a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._present(key, default, "true or false")
        if type(value) is not bool:
            raise self.error(key, f"is {value!r:.100}; allowed: true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._present(key, default, "a text")
        if type(value) is not str:
            raise self.error(key, f"is {value!r:.100}; allowed: a text")
        return value

    def inner(self, key: str) -> Fields:
        """Return the mapping under `key`; an empty one if it is absent."""
        value = self._present(key, {}, "a mapping")
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {value!r:.100}; allowed: a mapping")
        return Fields(value, source=f"{self.source}: {self.prefix}{key}")

    def agree(self, key: str, other: Fields, other_key: str, *, inside: str = "") -> None:
        """Raise if a key here and one of another mapping are both there, with different values. `inside`: the key that
        has the other mapping."""
        mine, theirs = self.get(key), other.get(other_key)
        if mine is not None and theirs is not None and mine != theirs:
            there = f"{inside}.{other_key}" if inside else other_key
            raise self.error(key, f"is {mine!r:.100}, but {there} is {theirs!r:.100}; keep the right one")

    def error(self, key: str, what: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {self.prefix}{key} {what}")

    def _present(self, key: str, default: Any, allowed: str) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, f"is missing; needed: {allowed}")
        return value
