"""The structures and numbers of program.h as ctypes sees them. Names and types only; the order is C's."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

LANES = 16  # outputs a weight tile
QUERY_BLOCK = 32  # heads that may share a key/value head
HEAD_DIM_MAX = 512


class Format(IntEnum):
    CHANNEL8 = 0
    GROUP8 = 1
    GROUP4 = 2
    HALF = 3


class Kind(IntEnum):
    EMBED = 0
    LINEAR = 1
    ROTATE = 2
    ATTEND = 3
    ADD_NORM = 4
    KEEP = 5
    PAIR = 6
    REFINE = 7


class Epilogue(IntEnum):
    STORE = 0
    ADD = 1
    SILU_GATE = 2
    GELU_GATE = 3
    LOGITS = 4
    ADD_SILU = 5
    ROUGH = 6


class Buffer(IntEnum):
    RESIDUAL = 0
    PROJECTED = 1
    ATTENDED = 2
    GATED = 3
    BRANCH = 4
    PAIRED = 5
    SKETCHED = 6
    FEATURES = 7  # the caller's memory


class Matrix(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("stride", c_int64),
        *((name, c_int32) for name in ("format", "outputs", "inputs", "column")),
    )


class Operation(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kind", "epilogue", "input", "output", "layer", "window", "parts", "column")),
        ("epsilon", c_float),
        ("scale", c_float),
        *((name, c_void_p) for name in ("norm", "key_norm", "cosine", "sine")),
        ("part", Matrix * 3),
    )


class Shape(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, c_int32) for name in ("layers", "pages", "positions", "threads", "features")),
        ("kv", c_void_p),
    )


class Pass(Structure):
    """`batch` of program.h: the pointers of a Batch and where results go."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "positions", "slots", "row_starts", "bases", "page_table")),
        *((name, c_void_p) for name in ("logit_rows", "tails", "carry", "logits", "features", "argmax")),
        *((name, c_int32) for name in ("rows", "sequences", "table_width", "outs", "depth")),
    )


class Draws(Structure):
    """`draws` of pick.c: what the tokens after a pass are drawn with, and where they go."""

    _fields_ = tuple((name, c_void_p) for name in ("inverse_temperature", "seeds", "roots", "tokens"))


class Order(Structure):
    """`order` of tree.c: what to draft, and where it goes."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "limits", "seeds", "inverse_temperature", "worth", "least")),
        *((name, c_void_p) for name in ("min_p", "top_p", "top_k", "tokens", "parents", "counts")),
        *((name, c_int32) for name in ("longest", "vocab", "width")),
    )


STATUS = (
    "fine",
    "out of memory",
    "a token outside of the vocabulary",
    "a position outside of the context or of the draft",
    "a KV slot that does not exist",
    "a page table that is too short or names a page that does not exist",
    "rows that do not add up",
)
OUT_OF_MEMORY = 1
