"""Compare the library's own list of its ABI (abi.c) with the mirror in Python, when the library is loaded.

A library is always compiled from the sources beside this file, so a mismatch means that abi.h and abi.py were not
changed together.
"""

from __future__ import annotations

import ctypes
from ctypes import sizeof
from typing import NamedTuple

from paceline.errors import AbiMismatch
from paceline.kernels.cpu import abi


class Entry(NamedTuple):
    """One fact: the value of a constant, the size of a structure, or the offset and size of a field."""

    value: int
    size: int = 0  # bytes of a field; 0 for constants and structures


def check_abi(library: ctypes.CDLL) -> None:
    """Raise AbiMismatch, naming every constant, structure and field that differs."""
    compiled, mirrored = compiled_entries(library), mirrored_entries()
    names = [*mirrored, *(name for name in compiled if name not in mirrored)]
    different = [name for name in names if compiled.get(name) != mirrored.get(name)]
    if different:
        problems = [_described(name, compiled.get(name), mirrored.get(name)) for name in different]
        raise AbiMismatch(f"abi.h and abi.py disagree: {'; '.join(problems)}; change both together")


def compiled_entries(library: ctypes.CDLL) -> dict[str, Entry]:
    """List the ABI as abi.c states it."""
    found: dict[str, Entry] = {}
    for entry in library.paceline_abi():  # an array of unknown length: an entry without a name ends it
        if entry.name is None:
            break
        found[entry.name.decode()] = Entry(entry.value, entry.size)
    return found


def mirrored_entries() -> dict[str, Entry]:
    """List the ABI as abi.py mirrors it; fields come before their structure, so that a message names them first."""
    found = {name: Entry(value) for name, value in abi.CONSTANTS.items()}
    found |= {member.name: Entry(member.value) for enum in abi.ENUMS for member in enum}
    for name, structure in abi.STRUCTURES.items():
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            found[f"{name}.{field}"] = Entry(place.offset, place.size)
        found[name] = Entry(sizeof(structure))
    return found


def _described(name: str, compiled: Entry | None, mirrored: Entry | None) -> str:
    structure, _, field = name.partition(".")
    if field:
        what = f"field {field} of struct {structure}"
    else:
        what = f"struct {name}" if name in abi.STRUCTURES else f"constant {name}"
    return f"{what} is {_seen(what, compiled)} in C and {_seen(what, mirrored)} in Python"


def _seen(what: str, entry: Entry | None) -> str:
    if entry is None:
        return "missing"
    if what.startswith("field"):
        return f"{entry.size} bytes at offset {entry.value}"
    return f"{entry.value} bytes" if what.startswith("struct") else str(entry.value)
