"""The playground's reader of Markdown: blocks, marks, places, links that may be followed. Skipped without Node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.node import run


def shape(text: str, tmp_path: Path) -> list[Any]:
    """The blocks of a text, each with its inline pieces as a short string."""
    code = f"""
        const show = (lines) => inlinesOf(lines).map((piece) => piece.text ?? (piece.break ? "⏎" : piece.close ? "⟩"
            : `⟨${{piece.open.tag}}${{piece.open.href ? ` ${{piece.open.href}}` : ""}} `)).join("");
        const walk = (block) => {{
            const {{type, language, ordered, first, aligns, level}} = block;
            if (type === "code") return ["code", language, block.lines.map((line) => line.text).join("\\n")];
            if (block.blocks) return [type, ...block.blocks.map(walk)];
            const name = ordered ? `list ${{first}}` : type;
            if (block.items) return [name, ...block.items.map((item) => item.map(walk))];
            const rows = block.head ? [block.head, ...block.rows] : [];
            if (block.head) return ["table", aligns, ...rows.map((row) => row.map((cell) => show([cell])))];
            return block.lines ? [type + (level ?? ""), show(block.lines)] : [type];
        }};
        return blocksOf({json.dumps(text)}).map(walk);
    """
    blocks: list[Any] = run(code, tmp_path)
    return blocks


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("# One *two* ##\ntext", [["heading1", "One ⟨em two⟩"], ["paragraph", "text"]]),
        ("a **b _c_** ***d*** ~~e~~", [["paragraph", "a ⟨strong b ⟨em c⟩⟩ ⟨em ⟨strong d⟩⟩ ⟨del e⟩"]]),
        ("snake_case_name and 2 * 3 * 4", [["paragraph", "snake_case_name and 2 * 3 * 4"]]),
        ("`a*b*` ``c`d`` `open", [["paragraph", "⟨code a*b*⟩ ⟨code c`d⟩ `open"]]),
        ("one\ntwo", [["paragraph", "one⏎two"]]),
        ("- a\n  - b\n- c", [["list", [["paragraph", "a"], ["list", [["paragraph", "b"]]]], [["paragraph", "c"]]]]),
        ("3. a\n\n4. b", [["list 3", [["paragraph", "a"]], [["paragraph", "b"]]]]),
        ("> q\n> - r", [["quote", ["paragraph", "q"], ["list", [["paragraph", "r"]]]]]),
        ("```py\nx *y*\n\n z\n```\nend", [["code", "py", "x *y*\n\n z"], ["paragraph", "end"]]),
        ("```\nnever closed", [["code", "", "never closed"]]),
        (
            "| a | b |\n|---|--:|\n| 1 | *2* \\| 3 |",
            [["table", ["left", "right"], ["a", "b"], ["1", "⟨em 2⟩ | 3"]]],
        ),
        ("---", [["rule"]]),
        ('[x](https://a.b/c_(d) "t")', [["paragraph", "⟨a https://a.b/c_(d) x⟩"]]),
        (
            "see https://a.b/c. <mailto:x@y.z>",
            [["paragraph", "see ⟨a https://a.b/c https://a.b/c⟩. ⟨a mailto:x@y.z mailto:x@y.z⟩"]],
        ),
        ("![x](https://a.b/c.png)", [["paragraph", "⟨a https://a.b/c.png x⟩"]]),
        ("[x](javascript:alert(1))", [["paragraph", "[x](javascript:alert(1))"]]),
        (
            "[x](data:text/html,hi) [y](//a.b) [z](ftp://a.b)",
            [["paragraph", "[x](data:text/html,hi) [y](//a.b) [z](ftp://a.b)"]],
        ),
        ("<script>alert(1)</script>", [["paragraph", "<script>alert(1)</script>"]]),
        ("**open *and [never](closed", [["paragraph", "**open *and [never](closed"]]),
        (r"\*not\* \a", [["paragraph", r"*not* \a"]]),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, str) else "",
)
def test_markdown(text: str, blocks: list[Any], tmp_path: Path) -> None:
    assert shape(text, tmp_path) == blocks


def test_markdown_is_read_in_parts_as_in_whole_and_knows_its_places(tmp_path: Path) -> None:
    """While a text grows, blocks before the last two do not change; each piece says where it stood."""
    code = """
        let seed = 1;
        const random = (most) => (seed = (seed * 1103515245 + 12345) % 2147483648) % most;
        const bits = ["- a", "1. b", "\\n", "\\n\\n", "**", "text ", "```", "> ", "| a | b |", "|--|--|", "  ", "# h",
            "---", "*", "-", "1", "`x`", "\\n- ", "[l](https://a.b)", "https://c.d ", "\\\\*"];
        const pieces = (block) => [
            ...(block.lines && block.type !== "code" ? inlinesOf(block.lines) : block.lines ?? []),
            ...(block.head ? [block.head, ...block.rows].flat().flatMap((cell) => inlinesOf([cell])) : []),
            ...(block.blocks ?? []).flatMap(pieces), ...(block.items ?? []).flat().flatMap(pieces)];
        const wrong = [];
        let read = 0;
        for (let k = 0; k < 3000; k++) {
            const text = Array.from({ length: random(14) }, () => bits[random(bits.length)]).join("");
            let blocks = [];
            for (let cut = 1; cut <= text.length; cut++) {
                const kept = Math.max(0, blocks.length - 2);
                blocks = [...blocks.slice(0, kept), ...blocksOf(text.slice(0, cut), blocks[kept]?.start ?? 0)];
                const whole = blocksOf(text.slice(0, cut));
                if (JSON.stringify(blocks) !== JSON.stringify(whole)) wrong.push(text.slice(0, cut));
            }
            for (const piece of blocks.flatMap(pieces)) {
                read += 1;
                if (piece.text && text.slice(piece.at, piece.at + piece.text.length) !== piece.text) wrong.push(text);
            }
        }
        return [wrong, read];
    """
    wrong, read = run(code, tmp_path)
    assert wrong == []
    assert read > 10_000


def test_long_and_hostile_markdown_is_read_with_bounded_work(tmp_path: Path) -> None:
    """100 KB of any mark are read, and nesting is bounded."""
    code = """
        const bits = ["*", "**a", "*a_b", "[", "[a](", "![", "`", "`a``", "<", "https://)", "\\\\", "~~a~~ ", "> ",
            "- ", "- - ", "1. ", "\\n", "- a\\n\\n", "|", "| a |\\n|--|\\n", "# # ", "```\\n", "*a **b ", "[x](a \\"",
            "   ", "-   "];
        let deepest = 0;
        const inside = (block) => block.blocks ?? (block.items ?? []).flat();
        const depth = (blocks) => 1 + blocks.reduce((most, block) => Math.max(most, depth(inside(block))), 0);
        const nesting = (lines) => {
            let open = 0;
            for (const piece of inlinesOf(lines)) {
                open += piece.open ? 1 : piece.close ? -1 : 0;
                deepest = Math.max(deepest, open);
            }
        };
        const each = (blocks) => blocks.forEach((block) => {
            if (block.lines) nesting(block.lines);
            each(inside(block));
        });
        const depths = bits.map((bit) => {
            const blocks = blocksOf(bit.repeat(Math.ceil(1e5 / bit.length)) + "x");
            each(blocks);
            return depth(blocks);
        });
        nesting([{ text: "*a **b ".repeat(5000) + "c** d* ".repeat(5000), at: 0 }]);
        return [Math.max(...depths), deepest];
    """
    blocks, inlines = run(code, tmp_path)
    assert blocks <= 10
    assert inlines == 12
