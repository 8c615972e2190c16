"""Prompt files: one JSON object a line (`.jsonl`, also `.gz`), or plain text with one prompt a line.

The prompt stands under `prompt`, `question`, `text` or as the first of `turns`; `source` and `license` are kept for the
model card. A line that cannot be used is an error that names file and line: nothing is skipped in silence.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest

FIELDS = ("prompt", "question", "text")


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    source: str = "unknown"
    license: str = "unknown"
    later: tuple[str, ...] = ()  # turns that follow it; never answered


def read_prompts(path: Path) -> list[Prompt]:
    prompts = list(_prompts(path))
    if not prompts:
        raise InvalidRequest(f"{path}: holds no prompts; give one JSON object or one text a line")
    return prompts


def read_texts(path: Path) -> list[str]:
    """Every text that a set asks: all turns of its questions."""
    return [text for prompt in read_prompts(path) for text in (prompt.text, *prompt.later)]


def sources(prompts: Iterable[Prompt]) -> list[tuple[str, str, int]]:
    """Source, licence and number of prompts, the most first."""
    counts = Counter((prompt.source, prompt.license) for prompt in prompts)
    return [(source, license, count) for (source, license), count in counts.most_common()]


def _prompts(path: Path) -> Iterator[Prompt]:
    is_json = ".jsonl" in path.suffixes or path.suffix == ".json"
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _prompt(line, is_json=is_json, source=path.name, where=f"{path}:{number}")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InvalidRequest(f"{path}:{number + 1}: cannot be read ({error}); give a whole file in UTF-8") from error


def _prompt(line: str, *, is_json: bool, source: str, where: str) -> Prompt:
    if not is_json:
        return Prompt(text=line.rstrip("\n"), source=source)
    record = _record(line, where)
    text = _text(record)
    if not text.strip():
        raise InvalidRequest(
            f"{where}: no text under {', '.join(FIELDS)} or turns; found {', '.join(record) or 'nothing'}: "
            "mend or remove the line"
        )
    turns = record.get("turns")
    return Prompt(
        text=text,
        source=str(record.get("source", source)),
        license=str(record.get("license", "unknown")),
        later=tuple(turn for turn in turns[1:] if isinstance(turn, str)) if isinstance(turns, list) else (),
    )


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: not JSON ({error}); mend or remove the line") from None
    if not isinstance(record, dict):
        raise InvalidRequest(f"{where}: holds {type(record).__name__} where a JSON object is needed; mend the line")
    return record


def _text(record: dict[str, Any]) -> str:
    turns = record.get("turns")
    found = turns[0] if isinstance(turns, list) and turns else next((record[f] for f in FIELDS if f in record), "")
    return found if isinstance(found, str) else ""
