"""Sizes of memory as people write them."""

from __future__ import annotations

import pytest

from paceline.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10k", 10 << 10),
        (" 512M ", 512 << 20),
        ("1.5g", 3 << 29),
        ("2GB", 2 << 30),
        ("1GiB", 1 << 30),
        ("1t", 1 << 40),
        ("64b", 64),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "M", "-1", "1e3", "5x", "1 G", "1.G", "1GiBs"])
def test_other_texts_are_none(text: str) -> None:
    assert parse_size(text) is None


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.0 MiB"), (1 << 20, "1.0 MiB"), ((1 << 30) - 1, "1024.0 MiB"), (3 << 29, "1.50 GiB")]
)
def test_sizes_are_written(count: int, text: str) -> None:
    assert format_size(count) == text
