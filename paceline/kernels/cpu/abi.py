"""Mirror of abi.h: the constants, structures and functions of the C kernels, as ctypes sees them.

Nothing else belongs here. `abi_check` compares this file with the library when it is loaded; a constant that has its
home elsewhere in Python (PAGE_SIZE, GROUP) is compared there as well.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.quant import GROUP

TILE = 16  # outputs of a weight tile, and numbers of a vector
QUERY_BLOCK = 48  # queries that share one walk over the keys: at most as many heads may share a KV head
HEAD_DIM_MAX = 512  # numbers of an attention head
MAX_PARTS = 3  # matrices of a linear operation
BEAM = 4  # nodes of a draft tree that one pass reads for a sequence
WIDTH_MAX = 8  # children of a node of a draft tree
SOURCES_MAX = 8  # suffix automata that a draft is made from
SUFFIX_DEPTH = 32  # tokens of the longest context that suffix automata count and match
SUFFIX_NODES_MAX = 64  # tokens of a draft that suffix automata make
RANKS_MAX = 64  # ranks of a split model, and shards of a rank
RANK_BYTES = 2097152  # memory of each rank in a segment

CONSTANTS = {
    "PAGE": PAGE_SIZE,
    "GROUP": GROUP,
    "TILE": TILE,
    "QUERY_BLOCK": QUERY_BLOCK,
    "HEAD_DIM_MAX": HEAD_DIM_MAX,
    "MAX_PARTS": MAX_PARTS,
    "BEAM": BEAM,
    "WIDTH_MAX": WIDTH_MAX,
    "SOURCES_MAX": SOURCES_MAX,
    "SUFFIX_DEPTH": SUFFIX_DEPTH,
    "SUFFIX_NODES_MAX": SUFFIX_NODES_MAX,
    "RANKS_MAX": RANKS_MAX,
    "RANK_BYTES": RANK_BYTES,
}


class Status(IntEnum):
    FINE = 0
    OUT_OF_MEMORY = 1
    BAD_TOKEN = 2
    BAD_POSITION = 3
    BAD_SLOT = 4
    BAD_PAGE = 5
    BAD_ROWS = 6
    NOT_FINITE = 7
    RANK_GONE = 8
    RANK_SILENT = 9


class Format(IntEnum):
    CHANNEL8 = 0
    GROUP8 = 1
    GROUP4 = 2
    HALF = 3


class Stored(IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q5_0 = 5
    Q5_1 = 6
    Q8_0 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10


class OperationKind(IntEnum):
    EMBED = 0
    LINEAR = 1
    ROTATE = 2
    ATTEND = 3
    ADD_NORM = 4
    KEEP = 5
    PAIR = 6
    REFINE = 7
    NORM = 8
    SUM = 9
    CONVOLVE = 10


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
    NORMED = 7
    CONVOLVED = 8
    DELTAS = 9
    FEATURES = 10
    STATES = 11


ENUMS: tuple[type[IntEnum], ...] = (Status, Format, Stored, OperationKind, Epilogue, Buffer)


class Matrix(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("stride", c_int64),
        *((name, c_int32) for name in ("format", "outputs", "inputs", "column")),
    )


class StoredRows(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("places", c_void_p),
        ("row_bytes", c_int64),
        *((name, c_int32) for name in ("kind", "keep", "first", "count", "width", "left")),
    )


class Operation(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kind", "epilogue", "input", "output", "layer", "window")),
        *((name, c_int32) for name in ("parts", "column", "taps", "group", "few")),
        ("epsilon", c_float),
        ("scale", c_float),
        *((name, c_void_p) for name in ("norm", "key_norm", "cosine", "sine")),
        ("part", Matrix * MAX_PARTS),
    )


class Segment(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("memory", "pipes")),
        ("patience", c_int64),
        *((name, c_int32) for name in ("rank", "size", "pipe_count")),
    )


class Shape(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, c_int32) for name in ("layers", "pages", "positions", "threads", "features")),
        ("kv", c_void_p),
        ("segment", c_void_p),
    )


class Pass(Structure):
    """The C structure `batch`: the addresses of a Batch, and of the memory for its results."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "positions", "slots", "row_starts", "bases", "page_table")),
        *((name, c_void_p) for name in ("logit_rows", "tails", "carry", "lasts")),
        *((name, c_void_p) for name in ("logits", "features", "states", "argmax")),
        *((name, c_int32) for name in ("rows", "sequences", "table_width", "outs", "depth", "adds")),
    )


class Draws(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("inverse_temperature", "seeds", "roots", "tokens"))


class Order(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("ids", "limits", "seeds", "inverse_temperature")),
        *((name, c_void_p) for name in ("min_confidence", "level_prices", "row_prices")),
        *((name, c_void_p) for name in ("min_p", "top_p", "top_k")),
        *((name, c_void_p) for name in ("tokens", "parents", "confidence", "counts", "passes")),
        *((name, c_int32) for name in ("longest", "vocab", "width", "beam", "ahead", "lookahead")),
        *((name, c_float) for name in ("odds_slope", "odds_offset", "child_acceptance")),
    )


class SuffixOrder(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("sources", "prices", "tokens", "parents", "confidence")),
        *((name, c_int32) for name in ("source_count", "price_count", "longest", "width")),
        *((name, c_float) for name in ("trust", "min_confidence")),
    )


STRUCTURES: dict[str, type[Structure]] = {
    "matrix": Matrix,
    "stored_rows": StoredRows,
    "operation": Operation,
    "segment": Segment,
    "shape": Shape,
    "batch": Pass,
    "draws": Draws,
    "order": Order,
    "suffix_order": SuffixOrder,
}


class AbiEntry(Structure):
    _fields_ = (("name", c_char_p), ("value", c_int64), ("size", c_int64))


ADDRESS = c_void_p
FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {  # name: result, arguments
    "paceline_abi": (POINTER(AbiEntry), ()),
    "paceline_pool_new": (ADDRESS, (c_int, ADDRESS, ADDRESS)),
    "paceline_tile_bytes": (c_int64, (c_int, c_int)),
    "paceline_pack": (None, (ADDRESS, c_int64, c_int, c_int, c_int, ADDRESS, ADDRESS, ADDRESS)),
    "paceline_pack_stored": (c_int, (ADDRESS, ADDRESS, c_int64, c_int, c_int, ADDRESS)),
    "paceline_checksum": (c_int, (ADDRESS, ADDRESS, c_int64, ADDRESS)),
    "paceline_rows": (c_int, (ADDRESS, ADDRESS, c_int, ADDRESS)),
    "paceline_program_new": (ADDRESS, (ADDRESS, ADDRESS, ADDRESS, c_int)),
    "paceline_program_free": (None, (ADDRESS,)),
    "paceline_program_run": (c_int, (ADDRESS, ADDRESS)),
    "paceline_program_draw": (c_int, (ADDRESS, ADDRESS, ADDRESS)),
    "paceline_draft": (c_int, (ADDRESS, ADDRESS, ADDRESS)),
    "paceline_prefetch": (None, (ADDRESS, ADDRESS, ADDRESS, c_int)),
    "paceline_kv_move": (c_int, (ADDRESS, ADDRESS, ADDRESS, c_int)),
    "paceline_kv_read": (None, (ADDRESS, ADDRESS, c_int, ADDRESS, ADDRESS)),
    "paceline_pick": (c_int, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, c_int, c_int, ADDRESS)),
    "paceline_probability": (c_float, (ADDRESS, c_int, c_int)),
    "paceline_limits": (None, (ADDRESS, ADDRESS, ADDRESS)),
    "paceline_suffix_new": (ADDRESS, ()),
    "paceline_suffix_free": (None, (ADDRESS,)),
    "paceline_suffix_extend": (c_int, (ADDRESS, ADDRESS, c_int64)),
    "paceline_suffix_end": (None, (ADDRESS,)),
    "paceline_suffix_bytes": (c_int64, (ADDRESS,)),
    "paceline_suffix_draft": (c_int, (ADDRESS, ADDRESS, c_int, c_int)),
    # For tests only: see testing.c.
    "paceline_gumbel": (None, (c_uint32, c_uint32, c_int, ADDRESS)),
    "paceline_prefetched": (c_int64, (ADDRESS,)),
    "paceline_lent": (c_int, (ADDRESS,)),
}
