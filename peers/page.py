"""Write docs/benchmarks.md and the numbers of README.md from the results in docs/results.

    python -m peers.page            write both
    python -m peers.page --check    exit with 1 if they differ from what would be written

`docs/results/*.md.in` are the texts. A line such as `{{steps steps-int8.json steps-native.json}}` is replaced by a part
made from these files (`peers.page_parts`). A part marked `{{? …}}` is left out if one of its files is missing. No
number is typed twice: a number without a file is in the text, with its source.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from peers.page_parts import PARTS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
COLUMNS = 120
PART = re.compile(r"^\{\{(\? )?([\w-]+) ([^{}]+)\}\}\n", flags=re.MULTILINE)
NUMBERS = re.compile(r"(<!-- numbers: begin[^>]*-->\n).*(<!-- numbers: end -->)", flags=re.DOTALL)
WRITTEN = "<!-- Written by `python -m peers.page` from docs/results: edit the text there. -->\n"


def benchmarks(results: Path) -> str:
    return WRITTEN + filled((results / "benchmarks.md.in").read_text(encoding="utf-8"), results=results)


def readme(text: str, *, results: Path) -> str:
    """The README with new numbers between its marks."""
    numbers = filled((results / "readme.md.in").read_text(encoding="utf-8"), results=results)
    if not NUMBERS.search(text):
        raise SystemExit("README.md has no `<!-- numbers: begin -->` and `<!-- numbers: end -->` to write between")
    return NUMBERS.sub(lambda found: found[1] + numbers + found[2], text)


def filled(text: str, *, results: Path) -> str:
    made = PART.sub(lambda found: part(found[2], found[3].split(), optional=bool(found[1]), results=results), text)
    return re.sub(r"\n{3,}", "\n\n", made)  # an optional part that is left out leaves no gap


def part(name: str, files: Sequence[str], *, optional: bool, results: Path) -> str:
    if name not in PARTS:
        raise SystemExit(f"no part is called {name!r}; there are {', '.join(PARTS)}")
    paths = [results / file for file in files]
    missing = [path.name for path in paths if not path.is_file()]
    if missing and not optional:
        raise SystemExit(f"{name}: docs/results has no {', '.join(missing)}")
    return "" if missing else wrapped(PARTS[name](paths)) + "\n"


def wrapped(text: str) -> str:
    """Break the lines of a generated part at 120 columns, all but those of tables and headings."""
    return "\n".join(line if line.startswith(("|", "#")) else wrapped_line(line) for line in text.splitlines())


def wrapped_line(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say whether something would change")
    args = parser.parse_args(argv)
    front, page = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
    wanted = {page: benchmarks(RESULTS), front: readme(front.read_text(encoding="utf-8"), results=RESULTS)}
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'is not what the results say' if args.check else 'written'}")
        if not args.check:
            path.write_text(wanted[path], encoding="utf-8")
    sys.exit(1 if stale and args.check else 0)


if __name__ == "__main__":
    main()
