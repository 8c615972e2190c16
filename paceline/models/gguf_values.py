"""The metadata values of a GGUF file: numbers, texts and arrays, each checked against the size of the file."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np

from paceline.errors import ModelFileError

MAX_KEYS = 1 << 16
MAX_NAME = 1 << 12  # bytes of a key or a tensor's name
MAX_ARRAY = 1 << 22  # elements; vocabularies have up to 2**18 tokens
MAX_DEPTH = 4  # levels of arrays within arrays
STRING, ARRAY, BOOL = 8, 9, 7  # GGUF's type numbers
SCALARS = {  # numpy type by GGUF's type number
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


class Cursor:
    """A reading position in the file, which never passes its end."""

    def __init__(self, data: mmap.mmap, source: str) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0
        self.source = source

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {what} (at byte {self.at} of {self.size}); fetch the file again")

    def take(self, count: int, what: str) -> int:
        """Step over `count` bytes and return their start."""
        if count > self.size - self.at:
            raise self.fail(f"truncated: {what} needs {count} bytes")
        start = self.at
        self.at += count
        return start

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.data, self.take(8, what))[0])

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            raise self.fail(f"{what} of {length} bytes where at most {limit} are allowed")
        start = self.take(length, what)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error


def metadata_at(cursor: Cursor) -> dict[str, Any]:
    count = cursor.u64("the number of metadata keys")
    if count > MAX_KEYS:
        raise cursor.fail(f"claims {count} metadata keys, more than {MAX_KEYS}")
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key", MAX_NAME)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} stands twice")
        metadata[key] = _value(cursor, cursor.u32(f"the type of {key!r}"), key, 0)
    return metadata


def _value(cursor: Cursor, kind: int, key: str, depth: int) -> Any:
    if kind in SCALARS:
        return _scalars(cursor, kind, key, 1)[0]
    if kind == STRING:
        return cursor.text(f"metadata {key!r}")
    if kind != ARRAY:
        raise cursor.fail(f"metadata {key!r} has the unknown type {kind}")
    if depth == MAX_DEPTH:
        raise cursor.fail(f"metadata {key!r} nests more than {MAX_DEPTH} arrays")
    inner = cursor.u32(f"the element type of {key!r}")
    count = cursor.u64(f"the length of {key!r}")
    if count > MAX_ARRAY:
        raise cursor.fail(f"metadata {key!r} claims {count} elements, more than {MAX_ARRAY}")
    if inner in SCALARS:
        return _scalars(cursor, inner, key, count)
    if inner == STRING:
        return _texts(cursor, key, count)
    return [_value(cursor, inner, key, depth + 1) for _ in range(count)]


def _texts(cursor: Cursor, key: str, count: int) -> list[str]:
    """Read `count` texts as `cursor.text` does, in one loop: a vocabulary has hundreds of thousands of tokens."""
    data, size, at, spans = cursor.data, cursor.size, cursor.at, []
    length_at = struct.Struct("<Q").unpack_from
    for _ in range(count):
        end = at + 8 + (length_at(data, at)[0] if at + 8 <= size else size)
        if end > size:
            raise cursor.fail(f"truncated: a text of metadata {key!r} ends at byte {end}")
        spans.append(data[at + 8 : end])
        at = end
    cursor.at = at
    try:
        return [span.decode("utf-8") for span in spans]
    except UnicodeDecodeError as error:
        raise cursor.fail(f"metadata {key!r} is not UTF-8") from error


def _scalars(cursor: Cursor, kind: int, key: str, count: int) -> list[Any]:
    dtype = np.dtype(SCALARS[kind])
    start = cursor.take(count * dtype.itemsize, f"metadata {key!r}")
    values = np.frombuffer(cursor.data, dtype, count, start)
    return [bool(value) for value in values] if kind == BOOL else list(values.tolist())
