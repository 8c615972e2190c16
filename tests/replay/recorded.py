"""Records as a server writes them, made by hand: what tests of a replay stand on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.replay.arrivals import Arrival, Schedule, schedule
from paceline.replay.simulate import Setting
from paceline.replay.step_times import PassTable, StepTimes
from paceline.replay.traffic import RecordedAnswer, RecordedRequest, read_traffic
from paceline.server.record import page_names
from paceline.types import SamplingParams
from tests.rig import LIMITS

Line = dict[str, Any]


def taken(name: str, at: float | None, tokens: Sequence[int], **more: Any) -> Line:
    line: Line = {"id": name, "model": "tiny", "prompt_tokens": list(tokens), "pages": page_names(tokens)}
    return {**line, **({} if at is None else {"at": at}), **more}


def ended(name: str, length: int, **more: Any) -> Line:
    return {"id": name, "sample": 0, "ended": "length", "output_tokens": length, "pages": [], **more}


def write(path: Path, *lines: Mapping[str, Any], tail: str = "") -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + tail, encoding="utf-8")
    return path


def scheduled(path: Path, **options: Any) -> Schedule:
    return schedule(read_traffic(path), **{"max_context": 512, **options})


def arrival(
    number: int, *, due: float = 0.0, prompt: int = 8, output: int = 4, pages: Sequence[str] = (), **stats: Any
) -> Arrival:
    request = RecordedRequest(
        id=f"r{number}",
        at=due,
        model="tiny",
        length=prompt,
        pages=tuple(pages),
        tokens=tuple(range(1, prompt + 1)),
        sampling=SamplingParams(),
        where=f"record:{number}",
    )
    return Arrival(request, RecordedAnswer(0, output, "length", stats=stats), due, number)


def times(
    *, pass_seconds: float = 0.01, row_seconds: float = 0.0, draft_seconds: float = 0.0, host: float = 0.0
) -> StepTimes:
    """Times that can be added up by hand: of a pass, of each further row, of a call of the drafter, of the host."""
    table = PassTable({1: pass_seconds, 257: pass_seconds + 256 * row_seconds}, {}, 0.0, 0.0)
    return StepTimes(table, {1: 1.0}, {1: 1.0}, (0.0, 1.0), (host, 0.0, 0.0), (draft_seconds, 0.0, 0.0, 0.0))


def setting(name: str = "plain", *, known: StepTimes | None = None, pages: int = 200, **options: Any) -> Setting:
    fields = {
        key: options.pop(key) for key in ("drafter", "drafts", "stream_interval", "delivery", "seed") if key in options
    }
    config = EngineConfig.of(**{**LIMITS, **options})
    return Setting(name, config, num_pages=pages, max_context=512, times=known or times(), **fields)
