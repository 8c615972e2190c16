"""Instructor: every mode that works over an OpenAI-compatible server, whole and streamed.

python clients/with_instructor.py --url http://127.0.0.1:8000/v1

The model is too small to write JSON by itself. In the modes that only ask for it in words, the check adds the form.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import instructor
from checks import KEY, Checks, expect
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

ASK = [{"role": "user", "content": "Invent a person: name, age, pet."}]


class Closed(BaseModel):
    """A model without further fields, of which a small model would write ever more."""

    model_config = ConfigDict(extra="forbid")


class Cat(Closed):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(Closed):
    kind: Literal["dog"]
    good: bool


class Person(Closed):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    pet: Cat | Dog = Field(discriminator="kind")
    tags: set[Literal["kind", "tall"]]


class Weather(Closed):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


class Name(Closed):
    """A name and an age."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.JSON, Mode.MD_JSON, Mode.JSON_O1)
IN_WORDS = (Mode.JSON, Mode.MD_JSON, Mode.JSON_O1)


def form(mode: Mode, model: type[BaseModel]) -> dict[str, Any]:
    """Make the field that a mode needs which asks for JSON in words."""
    schema = {"name": model.__name__, "schema": model.model_json_schema()}
    return (
        {"extra_body": {"response_format": {"type": "json_schema", "json_schema": schema}}} if mode in IN_WORDS else {}
    )


def main() -> None:
    checks = Checks("instructor")
    plain = OpenAI(base_url=checks.url, api_key=KEY, max_retries=0)
    asked = {"model": checks.model, "messages": ASK, "max_tokens": 160, "temperature": 0, "max_retries": 0}

    for mode in MODES:
        client = instructor.from_openai(plain, mode=mode)
        with checks(f"{mode.value}: a model"):
            person = client.chat.completions.create(response_model=Person, **asked, **form(mode, Person))
            expect(isinstance(person, Person), person)
        with checks(f"{mode.value}: streamed"):
            parts = list(client.chat.completions.create_partial(response_model=Name, **asked, **form(mode, Name)))
            expect(len(parts) > 0 and Name.model_validate(parts[-1].model_dump()), parts)

    with checks("parallel_tool_call: calls of one kind"):
        client = instructor.from_openai(plain, mode=Mode.PARALLEL_TOOLS)
        forced = asked | {"response_model": Iterable[Weather], "extra_body": {"tool_choice": "required"}}
        called = list(client.chat.completions.create(**forced))
        expect(called and all(isinstance(each, Weather) for each in called), called)

    with checks("responses_tools: a model"):
        client = instructor.from_openai(plain, mode=Mode.RESPONSES_TOOLS)
        short = {"max_output_tokens": 160, "temperature": 0, "max_retries": 0}
        person = client.responses.create(model=checks.model, input=ASK, response_model=Person, **short)
        expect(isinstance(person, Person), person)

    checks.end()


if __name__ == "__main__":
    main()
