"""Prompt sets as one list of prompts, whatever their files look like.

A set is named (`humaneval`: its file is looked up under the data directory) or given as a path: `.jsonl`, `.jsonl.gz`,
or text with one prompt a line. Of a multi-turn question only the first turn is taken. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SETS = {
    "spec_bench": "spec_bench/question.jsonl",
    "mt_bench": "mt_bench/question.jsonl",
    "humaneval": "humaneval/HumanEval.jsonl.gz",
    "gsm8k": "gsm8k/test_first200.jsonl",
    "code_edit": "code_edit/code_edit.jsonl",
}
ID_FIELDS = ("id", "task_id", "question_id")
CATEGORY_FIELDS = ("category", "edit")


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    category: str
    prompt: str


def load(source: str, *, data: Path | None = None, count: int | None = None) -> list[Prompt]:
    """All prompts of a set or file; with `count`, that many, evenly spread over it so that every category is met."""
    path = find(source, data=data)
    prompts = list(_read(path, name=source if source in SETS else path.name.split(".")[0]))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts if count is None else spread(prompts, count=count)


def find(source: str, *, data: Path | None) -> Path:
    if source not in SETS:
        path = Path(source)
        hint = f"give the path of a file, or one of the sets {', '.join(SETS)}"
    elif data is None:
        raise FileNotFoundError(f"where is the prompt set {source!r}? Set PACELINE_DATA or pass --data DIR")
    else:
        path, hint = data / SETS[source], f"the data directory must hold {SETS[source]}"
    if not path.is_file():
        raise FileNotFoundError(f"no prompts at {path}: {hint}")
    return path


def spread(prompts: Sequence[Prompt], *, count: int) -> list[Prompt]:
    if not 0 < count <= len(prompts):
        raise ValueError(f"asked for {count} prompts; there are {len(prompts)}")
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _read(path: Path, *, name: str) -> Iterator[Prompt]:
    opener = gzip.open if path.suffix == ".gz" else open
    is_json = ".jsonl" in path.suffixes
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            record = _record(line, path=path, number=number) if is_json else {"prompt": line.rstrip("\n")}
            yield _prompt(record, name=name, where=f"{path}, line {number}", number=number)


def _record(line: str, *, path: Path, number: int) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: expected an object, found {type(record).__name__}")
    return record


def _prompt(record: Mapping[str, Any], *, name: str, where: str, number: int) -> Prompt:
    turns = record.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else record.get("prompt", record.get("question"))
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: no text under 'prompt', 'question' or 'turns'; found {', '.join(record)}")
    return Prompt(
        id=str(_first(record, ID_FIELDS, default=f"{name}/{number}")),
        category=str(_first(record, CATEGORY_FIELDS, default=name)),
        prompt=text,
    )


def _first(record: Mapping[str, Any], names: Sequence[str], *, default: str) -> Any:
    return next((record[name] for name in names if name in record), default)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The option every script that reads prompt sets shares."""
    given = os.environ.get("PACELINE_DATA")
    parser.add_argument(
        "--data", type=Path, default=Path(given) if given else None, help="prompt sets (default: $PACELINE_DATA)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help=f"a path, or one of {', '.join(SETS)}")
    parser.add_argument("--count", type=int, help="this many, evenly spread (default: all)")
    add_arguments(parser)
    args = parser.parse_args()
    for prompt in load(args.source, data=args.data, count=args.count):
        print(json.dumps(asdict(prompt), ensure_ascii=False))


if __name__ == "__main__":
    main()
