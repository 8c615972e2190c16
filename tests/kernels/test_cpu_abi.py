"""The mirror of the C kernels in Python: what differs is refused by name, whichever side is wrong."""

from __future__ import annotations

import re
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_uint32, c_void_p
from enum import IntEnum
from itertools import pairwise

import pytest

from paceline.errors import AbiMismatch
from paceline.kernels.cpu import abi, build
from paceline.kernels.cpu.abi_check import check_abi, compiled_entries
from tests.kernels.tiny_forward import RUNNABLE

HEADER = re.sub(r"/\*.*?\*/", "", (build.SOURCES / "abi.h").read_text(encoding="utf-8"), flags=re.DOTALL)
NEIGHBOURS = [
    (name, first, second)
    for name, structure in abi.STRUCTURES.items()
    for (first, *_), (second, *_) in pairwise(structure._fields_)
]


def refused() -> str:
    with pytest.raises(AbiMismatch) as error:
        check_abi(build.load_library())
    return str(error.value)


def with_fields(monkeypatch: pytest.MonkeyPatch, name: str, fields: list[tuple[str, type]]) -> None:
    changed = type(name, (Structure,), {"_fields_": fields})
    monkeypatch.setitem(abi.STRUCTURES, name, changed)


def fields_of(name: str) -> list[tuple[str, type]]:
    return [(field, kind) for field, kind, *_ in abi.STRUCTURES[name]._fields_]


@pytest.mark.parametrize("variant", RUNNABLE)
def test_the_mirror_is_the_one_of_every_variant(variant: str) -> None:
    check_abi(build.Library(variant))


@pytest.mark.parametrize(("name", "first", "second"), NEIGHBOURS)
def test_two_swapped_fields_are_refused(name: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = fields_of(name)
    at = [field for field, _ in fields].index(first)
    fields[at], fields[at + 1] = fields[at + 1], fields[at]
    with_fields(monkeypatch, name, fields)
    said = refused()
    assert f"field {first} of struct {name}" in said
    assert f"field {second} of struct {name}" in said


def test_a_library_is_refused_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with_fields(monkeypatch, "batch", fields_of("batch")[::-1])
    with pytest.raises(AbiMismatch, match="field rows of struct batch"):
        build.Library(build.choose_variant())


def test_a_field_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_fields(monkeypatch, "order", [*fields_of("order")[:-1], ("child_acceptance", c_int64)])
    said = refused()
    assert (
        "field child_acceptance of struct order is 4 bytes at offset 152 in C and 8 bytes at offset 152 in Python"
        in said
    )


def test_a_field_that_one_side_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_fields(monkeypatch, "draws", fields_of("draws")[:-1])
    said = refused()
    assert "field tokens of struct draws is 8 bytes at offset 24 in C and missing in Python" in said
    assert "struct draws is 32 bytes in C and 24 bytes in Python" in said


@pytest.mark.parametrize("name", ["PAGE", "GROUP", "TILE", "BEAM", "WIDTH_MAX"])
def test_another_constant_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = abi.CONSTANTS[name]
    monkeypatch.setitem(abi.CONSTANTS, name, right + 1)
    assert f"constant {name} is {right} in C and {right + 1} in Python" in refused()


def test_another_order_of_an_enumeration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = IntEnum("Format", {"CHANNEL8": 0, "GROUP4": 1, "GROUP8": 2, "HALF": 3})
    monkeypatch.setattr(abi, "ENUMS", tuple(swapped if enum is abi.Format else enum for enum in abi.ENUMS))
    said = refused()
    assert "constant GROUP4 is 2 in C and 1 in Python" in said
    assert "constant GROUP8 is 1 in C and 2 in Python" in said


# ── the list of abi.c against its header ──


def test_the_list_has_every_field_of_the_header() -> None:
    """A field that only the header has could hide in the padding of its structure."""
    declared = set()
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", HEADER, flags=re.DOTALL):
        fields = re.findall(r"(\w+)(?:\[\w+\])?;", body)
        assert len(fields) == body.count(";"), f"one field a declaration in struct {name}"
        declared |= {f"{name}.{field}" for field in fields} if name != "abi_entry" else set()
    listed = {name for name in compiled_entries(build.load_library()) if "." in name}
    assert listed == declared


def test_the_list_has_every_constant_of_the_header() -> None:
    defined = {name for name, value in re.findall(r"#define (\w+) (\S+)", HEADER) if value.isdecimal()}
    enumerated = {name for body in re.findall(r"enum \{(.*?)\};", HEADER) for name in re.findall(r"\w+", body)}
    structures = set(abi.STRUCTURES)
    assert {name for name in compiled_entries(build.load_library()) if "." not in name} == (
        defined | enumerated | structures
    )


def ctype(declared: str) -> type | None:
    """The type that ctypes passes for a parameter or result of the header."""
    words = declared.replace("EXPORT", "").replace("const", "").split()
    if "*" in declared:
        return POINTER(abi.AbiEntry) if words[0] == "abi_entry" else c_void_p
    return {"void": None, "int": c_int, "float": c_float, "int64_t": c_int64, "uint32_t": c_uint32}[words[0]]


def test_functions_are_those_of_the_header() -> None:
    declared = {}
    for result, name, parameters in re.findall(r"(EXPORT [\w *]*?)(paceline_\w+)\((.*?)\);", HEADER, flags=re.DOTALL):
        each = [] if parameters == "void" else [ctype(parameter) for parameter in parameters.split(",")]
        declared[name] = ctype(result), tuple(each)
    assert declared == abi.FUNCTIONS
