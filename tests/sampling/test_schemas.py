"""Schemas as pydantic and others write them: each compiles, its answers validate, and what is not held is named."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import uuid
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from paceline.engine.admission import grammars_of
from paceline.errors import InvalidRequest
from paceline.sampling.grammar import Grammar, Grammars
from paceline.sampling.schema_rewrites import FORMATS, LARGEST, closed, ignored_keywords, rewritten
from paceline.types import Finish
from tests.text.vocabularies import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


@cache
def grammars() -> Grammars:
    return grammars_of(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_ids=TOKENIZER.eos_ids)


def fits(schema: Any, value: Any) -> bool:
    ids = TOKENIZER.encode(value if isinstance(value, str) else json.dumps(value), add_bos=False)
    state = grammars().start(Grammar.json_schema(schema))
    taken, finish = state.fits(ids)
    after = state.allowed(ids) if taken == len(ids) else None
    return after is not None and finish is not Finish.ERROR and bool(after[list(TOKENIZER.eos_ids)].any())


def answers(schema: Any, count: int = 4) -> list[str]:
    """Random answers that end: fond of what closes and of digits, averse to white space."""
    rng = np.random.default_rng(3)
    fond = np.zeros(TOKENIZER.vocab_size)
    fond[[TOKENIZER.encode(character, add_bos=False)[0] for character in '}]"0123456789Tt']] = 12
    fond[TOKENIZER.encode(" \n\t\r", add_bos=False)] = -40
    fond[[TOKENIZER.encode(character, add_bos=False)[0] for character in "eE+\\,"]] = -14
    ended = []
    for _ in range(count):
        state, said = grammars().start(Grammar.json_schema(schema)), []
        while len(said) < 400:
            allowed = state.allowed(())
            assert allowed is not None
            mask = allowed.numpy()[: TOKENIZER.vocab_size]
            scores = np.where(mask, fond + rng.gumbel(size=len(mask)) * 5, -np.inf)
            if any(mask[token] for token in TOKENIZER.eos_ids):
                ended.append(TOKENIZER.decode(said))
                break
            said.append(int(scores.argmax()))
            assert state.fits(said[-1:])[1] is not Finish.ERROR
            if state.fits(said[-1:])[1] is Finish.STOP:
                ended.append(TOKENIZER.decode(said))
                break
            state.advance(said[-1:])
    return ended


# ── what pydantic writes ──


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog", "puppy"]
    good: bool = True


class Node(BaseModel):
    value: int = Field(ge=0, le=9)
    left: Node | None = None


class Point(NamedTuple):
    x: float
    y: float


class Order(BaseModel):
    """A model such as agents have, with most of what pydantic knows."""

    model_config = ConfigDict(extra="forbid")

    id: uuid.UUID
    placed: datetime.datetime
    colours: set[Colour] = Field(max_length=2)
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    tags: dict[Literal["a", "b"], Annotated[int, Field(ge=0, le=9)]]
    size: tuple[Literal["S", "M"], Annotated[int, Field(ge=0, le=99)]]
    note: Annotated[str, StringConstraints(pattern=r"^[a-z ]+$", max_length=9)] | None = None
    count: int = Field(ge=-(2**63), le=2**63 - 1)


WRITTEN: Mapping[str, Any] = {
    "integer": int,
    "int64": Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    "uint64": Annotated[int, Field(ge=0, le=2**64 - 1)],
    "positive": pydantic.PositiveInt,
    "float": Annotated[float, Field(gt=0, lt=1, multiple_of=0.25)],
    "boolean": bool,
    "none": None,
    "optional": int | None,
    "literal": Literal["a", 1, True, None],
    "enum": Colour,
    "list": Annotated[list[Annotated[int, Field(ge=0, le=9)]], Field(min_length=1, max_length=3)],
    "set": Annotated[set[Annotated[int, Field(ge=0, le=9)]], Field(max_length=3)],
    "set of literals": Annotated[set[Literal["a", "b", "c"]], Field(min_length=2)],
    "frozenset of enums": frozenset[Colour],
    "set of flags": set[bool],
    "tuple": tuple[Annotated[int, Field(ge=0, le=9)], bool],
    "named tuple": tuple[Annotated[int, Field(ge=0, le=9)], Annotated[int, Field(ge=0, le=9)]],
    "dict": dict[Literal["x"], Annotated[int, Field(ge=0, le=9)]],
    "dict of enums": dict[Colour, bool],
    "dict by length": dict[Annotated[str, StringConstraints(min_length=1, max_length=2)], bool],
    "dict of dicts": dict[Literal["k"], dict[Literal["l"], bool | None]],
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "uuid": uuid.UUID,
    "uuid4": pydantic.UUID4,
    "ipv4": ipaddress.IPv4Address,
    "pattern": Annotated[str, StringConstraints(pattern=r"^[a-z]+$", max_length=5)],
    "secret": Annotated[pydantic.SecretStr, Field(max_length=4)],
    "path": pathlib.Path | None,
    "bytes": bytes,
    "union of models": Cat | Dog,
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "recursive": Node,
    "everything": Order,
}
# Types that pydantic checks beyond their schema: the schema is followed, and what is not held is named.
ANNOTATED: Mapping[str, tuple[Any, str]] = {
    "ipv4network": (ipaddress.IPv4Network, "format"),
    "ipv6interface": (ipaddress.IPv6Interface, "format"),
    "any address": (pydantic.IPvAnyAddress, "format"),
    "base64": (pydantic.Base64Str, "format"),
    "dsn": (pydantic.PostgresDsn, "format"),
    "fraction": (fractions.Fraction, "anyOf[1].format"),
    "point": (Point, ""),
    "decimal": (Annotated[decimal.Decimal, Field(ge=0, max_digits=8, decimal_places=2)], ""),
    "duration": (datetime.timedelta, ""),
    "dict by pattern": (dict[Annotated[str, StringConstraints(pattern="^x[0-9]$")], bool], ""),
    "url": (pydantic.HttpUrl, ""),
    "json": (pydantic.Json, ""),
    "set of texts": (set[str], "uniqueItems"),
    "dict of uuids": (dict[uuid.UUID, int], "propertyNames"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_answers_to_schemas_of_pydantic_validate(name: str) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(WRITTEN[name])
    made = answers(adapter.json_schema())
    assert made
    for text in made:
        adapter.validate_json(text.replace(":60", ":59"))  # a leap second, which Python's clocks do not know


@pytest.mark.parametrize("name", ANNOTATED)
def test_annotations_are_named(name: str) -> None:
    kind, path = ANNOTATED[name]
    schema = TypeAdapter(kind).json_schema()
    grammars().compile(Grammar.json_schema(schema))
    assert ignored_keywords(schema) == ([path] if path else [])


def test_models_for_serialisation_compile() -> None:
    grammars().compile(Grammar.json_schema(Order.model_json_schema(mode="serialization")))


# ── rewrites ──


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_formats_that_are_held(format: str) -> None:
    schema = {"type": "string", "format": format}
    assert rewritten(schema) == schema
    grammars().compile(Grammar.json_schema(schema))
    assert not fits(schema, "?? ??")


LOOK_AHEAD = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # of a Decimal's text, by pydantic 2.12
CAT, DOG = Cat.model_json_schema(), Dog.model_json_schema()
# schema → a value that fits, one that does not, and the keywords that are named
REWRITES: Mapping[str, tuple[dict[str, Any], Any, Any, list[str]]] = {
    "format": ({"type": "string", "format": "phone", "maxLength": 3}, "12", "1234", ["format"]),
    "format of an integer": ({"type": "integer", "format": "int32"}, 5, "5x", ["format"]),
    "look-ahead": (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": LOOK_AHEAD}]},
        1.5,
        '"x"',
        ["anyOf[1]"],
    ),
    "int64": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, LARGEST, 2**63, []),
    "between floats": ({"type": "integer", "maximum": 2**53 + 3}, 2**53 + 2, 2**53 + 4, []),
    "far": ({"type": "number", "minimum": -1e300, "maximum": 1e300}, 1e9, '"x"', []),
    "set": ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3]}, "minItems": 2}, [1, 3], [1, 1], []),
    "set by reference": (
        {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/c"}, "$defs": {"c": {"enum": ["a", "b"]}}},
        ["a", "b"],
        ["a", "a"],
        [],
    ),
    "no set": ({"type": "array", "uniqueItems": False, "items": {"const": 1}}, [1, 1], [2], []),
    "large set": ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, [1, 2], ["a"], ["uniqueItems"]),
    "names": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        {"a": 1, "b": 2},
        {"c": 1},
        [],
    ),
    "names in vain": (
        {"type": "object", "properties": {"a": {"const": 1}}, "propertyNames": {"maxLength": 2}},
        {"a": 1, "abc": 2},
        {"a": 2},
        ["propertyNames"],
    ),
    "oneOf of constants": ({"oneOf": [{"const": 1}, {"const": 2}, {"enum": ["a", "b"]}]}, '"b"', 3, []),
    "oneOf of ranges": (
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 3.5}, {"type": "string"}]},
        3,
        3.2,
        [],
    ),
    "oneOf that touches": (
        {"oneOf": [{"type": "number", "exclusiveMaximum": 3}, {"type": "number", "minimum": 3}]},
        3,
        '"x"',
        [],
    ),
    "oneOf by discriminator": ({"oneOf": [CAT, DOG]}, {"kind": "puppy", "good": True}, {"kind": "cow"}, []),
    "oneOf by a deep discriminator": (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": pet}, "required": ["a"], "additionalProperties": False}
                for pet in (CAT, DOG)
            ]
        },
        {"a": {"kind": "dog"}},
        {"a": {"kind": "cow"}},
        [],
    ),
    "unknown keywords": (
        {"properties": {"a": {"type": "integer", "nullable": True}}, "type": "object", "x-order": 1},
        {"a": 1},
        {"a": None},
        ["properties.a.nullable", "x-order"],
    ),
    "data is left alone": (
        {"const": {"$ref": "#/x", "format": "phone", "uniqueItems": True}, "default": {"$ref": "#/y", "oneOf": []}},
        {"$ref": "#/x", "format": "phone", "uniqueItems": True},
        {},
        [],
    ),
    "draft": ({"$schema": "https://example.org/mine", "type": "integer"}, 5, '"5"', ["$schema"]),
    "id": (
        {"$id": "https://example.org/a.json", "$ref": "#/$defs/x", "$defs": {"x": {"const": 1}}},
        1,
        2,
        [],
    ),
    "id within": (
        {
            "properties": {"a": {"$ref": "urn:b"}},
            "$defs": {
                "colours": {"enum": [1, 2, 3, 4, 5, 6, 7, 8, 9]},
                "b": {
                    "$id": "urn:b",
                    "type": "array",
                    "uniqueItems": True,
                    "items": {"$ref": "#/$defs/colours"},
                    "$defs": {"colours": {"enum": [1, 2]}},
                },
            },
            "required": ["a"],
        },
        {"a": [1, 2]},
        {"a": [1, 1]},
        [],
    ),
    "a property called like a keyword": (
        {
            "type": "object",
            "properties": {"format": {"type": "string"}, "uniqueItems": {"const": True}},
            "required": [],
        },
        {"format": "phone", "uniqueItems": True},
        {"uniqueItems": 1},
        [],
    ),
}


@pytest.mark.parametrize("name", REWRITES)
def test_rewrites(name: str) -> None:
    schema, good, bad, named = REWRITES[name]
    before = json.dumps(schema)
    assert fits(schema, good if isinstance(good, str) and good.startswith('"') else json.dumps(good))
    assert not fits(schema, bad if isinstance(bad, str) else json.dumps(bad))
    assert ignored_keywords(schema) == named
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 5}]},
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"oneOf": [{"properties": {"k": {"const": 1}}, "required": ["k"]}, {"properties": {"k": {"const": 2}}}]},
        {"not": {"type": "string"}},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "integer", "minimum": 2**63},
    ],
    ids=str,
)
def test_what_cannot_be_decided_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest):
        grammars().compile(Grammar.json_schema(schema))


def test_expansions_are_bounded() -> None:
    """A thousand sets, and a thousand names of large properties: the rewrite stays near the size of the schema."""
    colours = {"type": "array", "uniqueItems": True, "items": {"enum": [f"colour {i}" for i in range(8)]}}
    sets = {"properties": {f"p{i}": colours for i in range(1000)}}
    large = {"enum": [f"value {i}" for i in range(1000)]}
    names = {"propertyNames": {"enum": [f"name {i}" for i in range(1000)]}, "additionalProperties": large}
    for schema, path in ((sets, "properties.p999.uniqueItems"), (names, "propertyNames")):
        assert len(json.dumps(rewritten(schema))) < len(json.dumps(schema)) + (1 << 19)
        assert ignored_keywords(schema)[-1] == path


def test_comparisons_are_bounded() -> None:
    """Two kinds of trees with ten branches each would take ten to the eighth comparisons."""
    trees = {
        name: {
            "type": "object",
            "properties": {f"b{i}": {"$ref": f"#/$defs/{name}"} for i in range(10)},
            "required": [f"b{i}" for i in range(10)],
        }
        for name in ("fir", "oak")
    }
    schema = {"oneOf": [{"$ref": "#/$defs/fir"}, {"$ref": "#/$defs/oak"}], "$defs": trees}
    assert "oneOf" in rewritten(schema)


# ── strict ──


def test_closed_schemas_list_their_properties() -> None:
    schema = Order.model_json_schema()
    made = closed(schema)
    assert made["$defs"]["Cat"]["additionalProperties"] is False
    assert fits(made["$defs"]["Cat"], {"kind": "cat", "lives": 3})
    assert not fits(made["$defs"]["Cat"], {"kind": "cat", "lives": 3, "more": 1})
    assert schema == Order.model_json_schema()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"const": {"properties": {"a": {}}}},
        {"type": "object", "additionalProperties": {"type": "integer"}},
    ],
    ids=str,
)
def test_other_schemas_stay_open(schema: Any) -> None:
    assert closed(schema) == schema
