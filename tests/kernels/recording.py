"""Record calls of the C kernels in a file that replay.c repeats on any CPU.

The file is an image of memory: structures of the ABI as they are, the memory that they point to as it was before each
call, and its state after the call to compare with. Pointers are offsets of the file, which replay.c turns into
addresses. KV memory and the ids of a head keep their place over all calls; everything else is stored call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from ctypes import Structure, addressof, c_void_p, cast, string_at
from enum import IntEnum
from functools import partial
from pathlib import Path
from struct import Struct, pack, pack_into
from typing import Any, NamedTuple

from paceline.kernels.cpu.abi import (
    TILE,
    Buffer,
    Draws,
    Epilogue,
    Format,
    Matrix,
    Operation,
    OperationKind,
    Order,
    Pass,
    Shape,
    StoredRows,
)
from paceline.kernels.cpu.build import Library
from paceline.kernels.cpu.kv import page_bytes

ALIGNMENT = 64  # bytes
HEADER = Struct("=4q")  # place and number of the links, place and number of the calls
ARGUMENTS_MAX = 7
NOTHING = -1  # a pointer that is NULL
Sizes = dict[str, int]  # name of a pointer: bytes behind it


class Made(NamedTuple):
    """A program that was made while recording."""

    index: int
    shape: Shape
    vocab: int  # logits of a row


class Check(NamedTuple):
    """Memory to compare after a call: its name, its place in the image, its address here, its bytes."""

    name: str
    at: int
    address: int
    size: int


class Recording:
    """Calls and the memory that they read and write. `write` stores it in a file."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._image = bytearray(HEADER.size)
        self._links: list[tuple[int, int]] = []
        self._calls: list[bytes] = []
        self._lasting: dict[int, int] = {}  # address: place in the image
        self._programs: dict[int, Made] = {}  # by handle
        self._made = 0
        self.counts: dict[str, int] = {}  # calls of each function
        self.used: set[str] = set()  # kinds of operations, epilogues of products and formats of matrices

    @contextmanager
    def recorded(self, *, without: Collection[str] = ()) -> Iterator[None]:
        """Record all calls of the library that replay.c knows, `without` some functions."""
        originals = {name: getattr(self._library, name) for name in RECORDED if name not in without}
        for name, original in originals.items():
            setattr(self._library, name, partial(RECORDED[name], self, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(self._library, name, original)

    def write(self, path: Path) -> None:
        links = self._add(b"".join(pack("=2q", *link) for link in self._links))
        calls = self._add(b"".join(self._calls))
        HEADER.pack_into(self._image, 0, links, len(self._links), calls, len(self._calls))
        path.write_bytes(self._image)

    # ── memory ──

    def _add(self, data: bytes) -> int:
        self._image += bytes(-len(self._image) % ALIGNMENT)
        self._image += data
        return len(self._image) - len(data)

    def _copy(self, address: int | None, size: int) -> int:
        """Store memory as it is now, and return its place."""
        if not address:
            return NOTHING
        return self._lasting[address] if address in self._lasting else self._add(string_at(address, size))

    def _keep(self, address: int | None, size: int) -> int:
        """Store memory that later calls name again."""
        if address:
            self._lasting.pop(address, None)
            self._lasting[address] = self._copy(address, size)
        return self._copy(address, size)

    def _link(self, at: int, to: int) -> None:
        if to == NOTHING:
            pack_into("=q", self._image, at, 0)
        else:
            self._links.append((at, to))

    def _structure(self, structure: Structure, sizes: Sizes) -> dict[str, int]:
        """Store a structure and the memory behind its pointers; return the place of each, and its own as ""."""
        places = {name: self._copy(getattr(structure, name), size) for name, size in sizes.items()}
        own = self._add(bytes(structure))
        for name, place in places.items():
            self._link(own + getattr(type(structure), name).offset, place)
        return places | {"": own}

    def _shape(self, shape: Shape) -> int:
        return self._structure(shape, {"kv": _kv_bytes(shape)})[""]

    def _call(self, name: str, arguments: Iterable[int], result: int, checks: Iterable[Check] = ()) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        listed = [
            pack("=4q", self._add(what.encode() + b"\0"), at, self._add(string_at(address, size)), size)
            for what, at, address, size in checks
            if at != NOTHING and size
        ]
        padded = [*arguments, *[0] * ARGUMENTS_MAX][:ARGUMENTS_MAX]
        fields = self._add(name.encode() + b"\0"), result, self._add(b"".join(listed)), len(listed), *padded
        self._calls.append(pack(f"={4 + ARGUMENTS_MAX}q", *fields))

    # ── programs ──

    def program_new(self, original: Callable[..., int], pool: int, shape_: Any, operations_: Any, count: int) -> int:
        handle = original(pool, shape_, operations_, count)
        shape = Shape.from_buffer_copy(Shape.from_address(_address(shape_)))
        operations = [*(Operation * count).from_address(_address(operations_))]
        self._keep(shape.kv, _kv_bytes(shape))
        self.used |= {repr(used) for each in operations for used in _used(each)}
        listed = self._add(b"".join(bytes(each) for each in operations))
        places = self._weights([span for each in operations for span in _spans(each, shape)])
        for index, each in enumerate(operations):
            for offset, address in _pointers(each):
                self._link(listed + index * len(bytes(each)) + offset, places[address] if address else NOTHING)
        logits = [o.part[0].outputs for o in operations if o.kind == OperationKind.LINEAR and _gives_logits(o)]
        self._programs[handle] = Made(self._made, shape, logits[0] if logits else 0)
        self._made += 1
        self._call("paceline_program_new", (self._shape(shape), listed, count), 1)
        return handle

    def _weights(self, spans: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Store spans (address, bytes), which may overlap; return the place of each address."""
        places: dict[int, int] = {}
        joined: list[list[Any]] = []  # first address, end, addresses
        for address, size in sorted({span for span in spans if span[0]}):
            if joined and address <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], address + size)
                joined[-1][2].append(address)
            else:
                joined.append([address, address + size, [address]])
        for first, end, addresses in joined:
            place = self._add(string_at(first, end - first))
            places |= {address: place + address - first for address in addresses}
        return places

    def program_free(self, original: Callable[..., None], handle: int) -> None:
        original(handle)
        if handle in self._programs:
            self._call("paceline_program_free", (self._programs.pop(handle).index,), 0)

    def program_run(self, original: Callable[..., int], handle: int, pass_: Any) -> int:
        made, batch = self._programs[handle], Pass.from_address(_address(pass_))
        sizes = _batch_sizes(batch, made, outs=batch.outs)
        places = self._structure(batch, sizes)
        result = original(handle, pass_)
        checks = _results(batch, places, sizes, ("logits", "argmax", "features", "states"))
        self._call("paceline_program_run", (made.index, places[""]), result, checks)
        return result

    def program_draw(self, original: Callable[..., int], handle: int, pass_: Any, draws_: Any) -> int:
        made, batch = self._programs[handle], Pass.from_address(_address(pass_))
        draws = Draws.from_address(_address(draws_))
        sizes = _batch_sizes(batch, made, outs=batch.outs)
        places, drawn = self._structure(batch, sizes), self._structure(draws, _draws_sizes(batch))
        result = original(handle, pass_, draws_)
        checks = [
            *_results(batch, places, sizes, ("logits", "argmax", "features", "states")),
            *_results(draws, drawn, _draws_sizes(batch), ("tokens",)),
        ]
        self._call("paceline_program_draw", (made.index, places[""], drawn[""]), result, checks)
        return result

    def draft(self, original: Callable[..., int], handle: int, pass_: Any, order_: Any) -> int:
        """Logits are not compared: a prefetched pass leaves those of an earlier one. Nor is confidence: its sums depend
        on the width of vectors."""
        made, batch = self._programs[handle], Pass.from_address(_address(pass_))
        order = Order.from_address(_address(order_))
        sizes = _order_sizes(order, batch.sequences)
        first = self._structure(batch, _batch_sizes(batch, made, outs=order.beam * batch.sequences))
        places = self._structure(order, sizes)
        result = original(handle, pass_, order_)
        checks = _results(order, places, sizes, ("tokens", "parents", "counts", "passes"))
        self._call("paceline_draft", (made.index, first[""], places[""]), result, checks)
        return result

    def prefetch(self, original: Callable[..., None], target: int, head: int, ids: int, vocab: int) -> None:
        original(target, head, ids, vocab)
        pair = self._programs[target].index, self._programs[head].index
        self._call("paceline_prefetch", (*pair, self._keep(ids, 4 * vocab), vocab), 0)

    # ── other calls ──

    def kv_move(self, original: Callable[..., int], shape_: Any, source: Any, target: Any, count: int) -> int:
        shape = self._shape(Shape.from_address(_address(shape_)))
        slots = [self._copy(_address(each), 4 * count) for each in (source, target)]
        result = original(shape_, source, target, count)
        self._call("paceline_kv_move", (shape, *slots, count), result)
        return result

    def kv_read(
        self, original: Callable[..., None], shape_: Any, slots: int, count: int, keys: int, values: int
    ) -> None:
        shape = Shape.from_address(_address(shape_))
        size = 2 * shape.layers * count * shape.kv_heads * shape.head_dim
        places = [self._copy(address, size) for address in (keys, values)]
        arguments = self._shape(shape), self._copy(slots, 4 * count), count, *places
        original(shape_, slots, count, keys, values)
        checks = [Check("keys", places[0], keys, size), Check("values", places[1], values, size)]
        self._call("paceline_kv_read", arguments, 0, checks)

    def pick(self, original: Callable[..., int], pool: int, logits: int, *rest: Any) -> int:
        scales, keys, ids, rows, vocab, tokens = rest
        pointers = self._add(string_at(logits, 8 * rows))
        for row in range(rows):
            self._link(pointers + 8 * row, self._copy(c_void_p.from_address(logits + 8 * row).value, 4 * vocab))
        given = [self._copy(scales, 4 * rows), self._copy(keys, 8 * rows), self._copy(ids, 4 * vocab)]
        found = self._copy(tokens, 4 * rows)
        result = original(pool, logits, *rest)
        checks = [Check("tokens", found, tokens, 4 * rows)]
        self._call("paceline_pick", (pointers, *given, rows, vocab, found), result, checks)
        return result

    def rows(self, original: Callable[..., int], matrix_: Any, rows: int, count: int, out: int) -> int:
        matrix = Matrix.from_address(_address(matrix_))
        own, size = self._structure(matrix, _matrix_sizes(matrix))[""], 4 * count * matrix.inputs
        arguments = own, self._copy(rows, 4 * count), count, self._copy(out, size)
        result = original(matrix_, rows, count, out)
        self._call("paceline_rows", arguments, result, [Check("rows", arguments[3], out, size)])
        return result

    def pack_stored(
        self, original: Callable[..., int], pool: int, tiles: int, stride: int, format: int, inputs: int, rows_: Any
    ) -> int:
        rows = StoredRows.from_address(_address(rows_))
        places = rows.places and string_at(rows.places, 4 * rows.count)
        last = max(Struct(f"={rows.count}i").unpack(places)) if places else rows.first + rows.count - 1
        size = last // TILE * stride + self._library.paceline_tile_bytes(format, inputs)
        own = self._structure(rows, {"data": rows.count * rows.row_bytes, "places": 4 * rows.count})[""]
        self._lasting.pop(tiles, None)  # KV memory that was freed may have been there
        at = self._copy(tiles, size)
        result = original(pool, tiles, stride, format, inputs, rows_)
        self._call("paceline_pack_stored", (at, stride, format, inputs, own), result, [Check("tiles", at, tiles, size)])
        return result

    def gumbel(self, original: Callable[..., None], k0: int, k1: int, vocab: int, out: int) -> None:
        at = self._copy(out, 4 * vocab)
        original(k0, k1, vocab, out)
        self._call("paceline_gumbel", (k0, k1, vocab, at), 0, [Check("noise", at, out, 4 * vocab)])


RECORDED: dict[str, Callable[..., Any]] = {
    "paceline_program_new": Recording.program_new,
    "paceline_program_free": Recording.program_free,
    "paceline_program_run": Recording.program_run,
    "paceline_program_draw": Recording.program_draw,
    "paceline_draft": Recording.draft,
    "paceline_prefetch": Recording.prefetch,
    "paceline_kv_move": Recording.kv_move,
    "paceline_kv_read": Recording.kv_read,
    "paceline_pick": Recording.pick,
    "paceline_rows": Recording.rows,
    "paceline_pack_stored": Recording.pack_stored,
    "paceline_gumbel": Recording.gumbel,
}


def _address(argument: Any) -> int:
    """Return the address that ctypes would pass: of an integer, or of what byref made."""
    found = argument if isinstance(argument, int) else cast(argument, c_void_p).value
    assert found, "an argument is NULL"
    return found


# ── sizes ──


def _kv_bytes(shape: Shape) -> int:
    return int(shape.pages) * page_bytes(layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim)


def _batch_sizes(batch: Pass, made: Made, *, outs: int) -> Sizes:
    """`outs`: rows that logits and argmax have room for."""
    rows, sequences = batch.rows, batch.sequences
    return {
        **dict.fromkeys(("tokens", "positions", "slots", "carry", "lasts"), 4 * rows),
        "row_starts": 4 * (sequences + 1),
        "bases": 4 * sequences,
        "page_table": 4 * sequences * batch.table_width,
        "logit_rows": 4 * batch.outs,
        "tails": 4 * rows * batch.depth,
        "logits": 4 * outs * made.vocab,
        "argmax": 4 * outs,
        "features": 4 * rows * made.shape.features,
        "states": 4 * rows * made.shape.hidden,
    }


def _draws_sizes(batch: Pass) -> Sizes:
    each = 4 * batch.sequences
    return {"inverse_temperature": each, "seeds": 2 * each, "roots": each, "tokens": 4 * batch.outs}


def _order_sizes(order: Order, sequences: int) -> Sizes:
    each = ("limits", "inverse_temperature", "min_confidence", "level_prices", "min_p", "top_p", "top_k")
    sizes = {
        **dict.fromkeys((*each, "counts", "passes"), 4 * sequences),
        "seeds": 8 * sequences,
        "ids": 4 * order.vocab,
    }
    return sizes | dict.fromkeys(("row_prices", "tokens", "parents", "confidence"), 4 * sequences * order.longest)


def _matrix_sizes(matrix: Matrix) -> Sizes:
    tiles = -(-matrix.outputs // TILE)
    return {"data": tiles * matrix.stride, "bias": 4 * tiles * TILE}


def _results(structure: Structure, places: dict[str, int], sizes: Sizes, names: Iterable[str]) -> list[Check]:
    return [Check(name, places[name], getattr(structure, name) or 0, sizes[name]) for name in names]


# ── operations ──


def _used(operation: Operation) -> Iterator[IntEnum]:
    yield OperationKind(operation.kind)
    if operation.kind == OperationKind.LINEAR:
        yield Epilogue(operation.epilogue)
    yield from (Format(part.format) for part in operation.part[: operation.parts])


def _gives_logits(operation: Operation) -> bool:
    return int(operation.epilogue) == Epilogue.LOGITS


def _pointers(operation: Operation) -> Iterator[tuple[int, int | None]]:
    """The pointers of an operation: their offset, and the address that they hold."""
    for name in ("norm", "key_norm", "cosine", "sine"):
        yield getattr(Operation, name).offset, getattr(operation, name)
    for part in operation.part:
        inside = addressof(part) - addressof(operation)
        for name in ("data", "bias"):
            yield inside + getattr(Matrix, name).offset, getattr(part, name)


def _spans(operation: Operation, shape: Shape) -> Iterator[tuple[int, int]]:
    """The memory that an operation reads: address and bytes."""
    norm, table = 4 * _normed(operation, shape), 4 * shape.positions * (shape.head_dim // 2)
    for name, size in (("norm", norm), ("key_norm", norm), ("cosine", table), ("sine", table)):
        yield getattr(operation, name) or 0, size
    for part in operation.part:
        sizes = _matrix_sizes(part)
        if operation.kind == OperationKind.REFINE:  # row by row
            sizes["data"] = part.outputs * part.stride
        yield from ((getattr(part, name) or 0, size) for name, size in sizes.items())


def _normed(operation: Operation, shape: Shape) -> int:
    """Numbers of the vector that an operation's norms multiply."""
    if operation.kind == OperationKind.NORM and operation.input == Buffer.FEATURES:
        return int(shape.features)
    if operation.kind in (OperationKind.LINEAR, OperationKind.REFINE):
        return int(operation.part[0].inputs)
    if operation.kind == OperationKind.CONVOLVE:
        return int(operation.taps * shape.hidden)  # kernels, not norms
    return int(shape.head_dim if operation.kind == OperationKind.ROTATE else shape.hidden)
