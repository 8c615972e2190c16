"""Compile kernels for Hopper, without a GPU, and print the bytes of shared memory that each needs, as JSON.

test_compile.py runs it in a process of its own, in which Triton's interpreter is off. Matrices of each format are
compiled gated, which is the larger kernel, and blocks of many rows in two parts; with the word `all` all kernels are
compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from paceline.kernels.cuda.attend import _attend
from paceline.kernels.cuda.formats import CHANNEL, FLOAT, FLOAT8, GROUPED, NIBBLES
from paceline.kernels.cuda.linear import SILU
from paceline.kernels.cuda.many import BLOCKS, GROUP, Block, _many
from paceline.kernels.cuda.norm import _embed
from paceline.kernels.cuda.pair import _pair
from paceline.kernels.cuda.prefill import BOX, _prefill
from paceline.kernels.cuda.tile_product import tile_product
from paceline.kernels.cuda.tiles import Tiles

HOPPER = GPUTarget("cuda", 90, 32)
FORMATS = {"float": FLOAT, "channel": CHANNEL, "grouped": GROUPED, "nibbles": NIBBLES, "float8": FLOAT8}
WEIGHTS = {FLOAT: "*bf16", CHANNEL: "*i8", GROUPED: "*u8", NIBBLES: "*u8", FLOAT8: "*i16"}


def shared(format: int, rows: int, outputs: int, *, gated: bool, even: bool) -> int:
    tiles = Tiles.of(rows, outputs=outputs, parts=1, gated=gated, format=format, size=2)
    block = triton.next_power_of_2(tiles.outputs)
    constants: dict[str, Any] = {
        "OUTPUTS": tiles.outputs,
        "BLOCK_N": block,
        "BLOCK_R": tiles.rows,
        "BLOCK_K": tiles.inputs,
        "PARTS": 1,
        "SPREAD": False,
        "FINISHED": True,
        "EVEN": even,
        "FULL": even and tiles.outputs == block,
        "ACTIVATION": SILU if gated else 0,
        "RESIDUAL": False,
        "BIAS": False,
        "FORMAT": format,
        "STAGES": tiles.stages,
        "AHEAD": 256,
        "PDL": True,
    }
    kinds = {"x": "*bf16", "w": WEIGHTS[format], "out": "*bf16", "residual": "*bf16", "counters": "*i32"}
    kinds |= dict.fromkeys(("bias", "partial"), "*fp32")
    signature = {name: "constexpr" if name in constants else "i32" for name in tile_product.arg_names}
    signature |= kinds | {"scale": "*fp16" if format in (GROUPED, NIBBLES) else "*fp32"}
    whole = [i for i, name in enumerate(tile_product.arg_names) if name not in (*constants, "rows")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in whole}
    source = ASTSource(fn=tile_product, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": tiles.warps, "launch_pdl": True})
    return int(compiled.metadata.shared)


def blocks(block: Block, *, parts: int, gated: bool = False) -> int:
    """Compile a product of many rows; one with a residual has parts."""
    constants: dict[str, Any] = {
        "PARTS": parts,
        "BLOCK_R": block.rows,
        "BLOCK_N": block.outputs,
        "BLOCK_K": block.inputs,
        "GROUP": GROUP,
        "ACTIVATION": SILU if gated else 0,
        "RESIDUAL": parts > 1,
        "BIAS": False,
        "STAGES": block.stages,
        "PDL": True,
    }
    width = block.outputs // 2 if gated else block.outputs
    signature = {name: "constexpr" if name in constants else "i32" for name in _many.arg_names}
    signature |= {
        "x": f"tensordesc<bf16[{block.rows}, {block.inputs}]>",
        "w": f"tensordesc<bf16[{block.outputs}, {block.inputs}]>",
        "out": f"tensordesc<bf16[{block.rows}, {width}]>",
        "residual": "*bf16",
        "bias": "*fp32",
    }
    whole = [i for i, name in enumerate(_many.arg_names) if name in ("residual", "bias", "outputs", "inputs", "share")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in whole}
    source = ASTSource(fn=_many, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": block.warps, "launch_pdl": True})
    return int(compiled.metadata.shared)


def attention(*, solo: bool, turn: bool, tree: bool) -> int:
    """Return the bytes of attention with 32 heads of 128 dimensions on 8 KV heads."""
    constants: dict[str, Any] = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "HEAD_DIM": 128,
        "PADDED": 128,
        "BLOCK_M": 16,
        "TILE": 128,
        "TILES": 2,
        "TAIL": 32 if tree else 0,
        "PAGE": 16,
        "WINDOW": tree,
        "LANES": not tree,
        "TREE": tree,
        "SOLO": solo,
        "EARLY": turn and not solo,
        "TURN": turn,
        "PARTS": 2 if solo else 1,
        "LIMIT": 0.0,
        "PDL": True,
    }
    numbers = ("row_starts", "positions", "page_table", "lanes", "bases", "tails", "leads", "slots", "counters")
    kinds = dict.fromkeys(("queries", "keys", "values", "out"), "*bf16") | dict.fromkeys(numbers, "*i32")
    kinds |= dict.fromkeys(("cos", "sin", "partials"), "*fp32") | {"scale": "fp32"}
    kinds |= {"queries": "*fp32"} if solo else {}
    signature = {name: "constexpr" if name in constants else "i32" for name in _attend.arg_names} | kinds
    pointers = [i for i, name in enumerate(_attend.arg_names) if signature[name].startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(fn=_attend, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4, "num_stages": 3, "launch_pdl": True})
    return int(compiled.metadata.shared)


def first_of_a_pass(kernel: Any) -> int:
    """Compile a kernel that begins a pass. Raise AssertionError if it lets the next kernel start before it has waited:
    attention reads the layout of its pass without waiting for it."""
    numbers = {"WIDTH": 64, "FORMAT": FLOAT}
    constants = {name: numbers.get(name, name == "PDL") for name in kernel.arg_names if name.isupper()}
    kinds = dict.fromkeys(("table", "x", "paired", "states"), "*bf16") | dict.fromkeys(("tokens", "ends"), "*i32")
    kinds |= dict.fromkeys(("scales", "minimums", "embed_norm", "state_norm"), "*fp32")
    kinds |= dict.fromkeys(("scale", "eps"), "fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 1, "launch_pdl": True})
    code = compiled.asm["ptx"]
    assert 0 < code.find("griddepcontrol.wait") < code.find("griddepcontrol.launch_dependents"), (
        f"{kernel} starts early"
    )
    return int(compiled.metadata.shared)


def prompts(*, head_dim: int, stages: int, window: bool) -> int:
    """Return the bytes of attention of prompts with four query heads on each of 8 KV heads."""
    constants: dict[str, Any] = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "TILE": 128,
        "STAGES": stages,
        "PAGE": 16,
        "WINDOW": window,
    }
    boxes = dict.fromkeys(("k_boxes", "v_boxes"), f"tensordesc<bf16[16, 64],{BOX!r}>")
    kinds = dict.fromkeys(("queries", "out"), "*bf16") | dict.fromkeys(("page_table", "plan"), "*i32")
    signature = {name: "constexpr" if name in constants else "i32" for name in _prefill.arg_names}
    signature |= boxes | kinds | {"scale": "fp32"}
    numbers = {(_prefill.arg_names.index(name),): value for name, value in constants.items()}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(_prefill.arg_names) if name in kinds}
    source = GluonASTSource(fn=_prefill, signature=signature, constexprs=numbers, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4})
    check_ends(compiled.asm["ttgir"])
    check_waits(compiled.asm["ptx"], compiled.asm["cubin"])
    return int(compiled.metadata.shared)


def check_ends(code: str) -> None:
    """Raise AssertionError if a loop over the tiles of a block ends at a value from outside of the loop over blocks.

    Triton 3.6 makes such code of a variable that the outer loop carries for this end alone. The kernel then never ends.
    """
    inside = ""
    for line in code.splitlines():
        loop = re.search(r"scf.for %(\S+) = \S+ to (%\S+) ", line)
        if loop is None:
            inside += line + "\n"
        elif loop[1].startswith("tile"):
            assert f"{loop[2]} = " in inside, f"the loop over tiles ends at {loop[2]}, the same for all blocks"
        else:
            inside = ""


def check_waits(code: str, binary: bytes) -> None:
    """Raise AssertionError if the assembler waits for matrix instructions where the code does not.

    It does so without a word if it cannot tell which registers a product in flight will write. One product then runs
    after another, and other work no longer hides behind them.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("WARPGROUP.DEPBAR")
    asked = code.count("wgmma.wait_group")
    assert asked == found, f"the code waits for matrix instructions at {asked} places, the machine at {found}"


if __name__ == "__main__":
    found = {
        "attention, splits": attention(solo=False, turn=True, tree=False),
        "attention, trees": attention(solo=False, turn=False, tree=True),
        "attention, all": attention(solo=True, turn=True, tree=False),
        "embeddings": first_of_a_pass(_embed),
        "pairs of a head": first_of_a_pass(_pair),
        "prompts": prompts(head_dim=128, stages=3, window=False),
        "prompts, narrow heads and a window": prompts(head_dim=64, stages=4, window=True),
    }
    for name, format in FORMATS.items():
        for gated in (False, True) if "all" in sys.argv else (True,):
            found[f"{name}, 64 rows{', gated' if gated else ''}"] = shared(format, 64, 4096, gated=gated, even=False)
    found["float, 1 row"] = shared(FLOAT, 1, 5120, gated=False, even=True)
    if "all" in sys.argv:
        found["float, 1 row, gated"] = shared(FLOAT, 1, 51200, gated=True, even=True)
    for block in BLOCKS:
        found[f"{block}, two parts"] = blocks(block, parts=2)
        if "all" in sys.argv:
            found[f"{block}"] = blocks(block, parts=1)
            found[f"{block}, gated"] = blocks(block, parts=1, gated=True)
    print(json.dumps(found))
