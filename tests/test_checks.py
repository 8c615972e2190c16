"""Checks of single values: what is refused, with the words and the parameter that say so."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.checks import (
    MAX_STOP_LENGTH,
    MAX_STOPS,
    check_flag,
    check_integer,
    check_number,
    check_stops,
    check_text,
    checked_tuple,
    surrogate_at,
)
from paceline.errors import InvalidRequest


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([1], "must be a non-empty text, not 1"),
        ([""], "must be a non-empty text, not ''"),
        (["a" * (MAX_STOP_LENGTH + 1)], f"{MAX_STOP_LENGTH + 1} characters"),
        (["a"] * (MAX_STOPS + 1), f"at most {MAX_STOPS}"),
        (["\ud800"], "surrogate"),
    ],
)
def test_stops_that_are_refused(stops: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        check_stops(stops)
    assert error.value.param == "stop"


def test_stops_up_to_the_limits_are_taken() -> None:
    check_stops(())
    check_stops(["a" * MAX_STOP_LENGTH] * MAX_STOPS)


@pytest.mark.parametrize(
    ("text", "place"), [("", None), ("a🚴b", None), ("\ud800", 0), ("ab\udfff", 2), ("\ud83d\ude00", 0)]
)
def test_half_a_surrogate_pair_is_found(text: str, place: int | None) -> None:
    assert surrogate_at(text) == place


def test_a_text_says_where_it_is_wrong() -> None:
    check_text("fine")
    with pytest.raises(InvalidRequest, match=r"x\[0\] must be valid Unicode; character 1 is half") as error:
        check_text("a\ud800", "x[0]", param="messages")
    assert error.value.param == "messages"
    with pytest.raises(InvalidRequest, match="text must be a string, not int"):
        check_text(3)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (check_number, (math.nan, 0, 1)),
        (check_number, (2, 0, 1)),
        (check_integer, (1.5, 0, 1)),
        (check_integer, (2, 0, 1)),
        (checked_tuple, ("abc",)),
    ],
)
def test_the_parameter_is_the_name_or_what_is_said(check: Any, arguments: tuple[Any, ...]) -> None:
    for more, param in (({}, "a key"), ({"param": "keys"}, "keys")):
        with pytest.raises(InvalidRequest, match="a key must be") as error:
            check("a key", *arguments, **more)
        assert error.value.param == param


def test_a_flag_is_a_bool() -> None:
    check_flag("on", True)
    with pytest.raises(InvalidRequest, match="on must be True or False, not 1") as error:
        check_flag("on", 1)
    assert error.value.param == "on"
