"""Recorded traffic: the requests of a file that `paceline serve --record` wrote, in the order of their arrival.

A file may be old, cut off or edited. Lines that cannot be read are errors that name file and line. What is missing or
not used becomes a note, which every result carries. Nothing here knows an engine or a server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.kernels.base import PAGE_SIZE
from paceline.prompts.files import is_end, records, sampling_of
from paceline.server.record import COUNTS, FIRST_SENT, TIMES, page_names
from paceline.types import SamplingParams

TAKEN = {
    "id",
    "at",
    "model",
    "share",
    "prompt_tokens",
    "prompt_length",
    "sampling",
    "pages",
}  # fields of a taken request
ENDED = {"id", "sample", "ended", "output_tokens", "pages", *COUNTS, *TIMES, FIRST_SENT}  # fields of an answer's end
MAX_FABRICATED = 1 << 24  # tokens that a line may claim


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """The end of one answer."""

    sample: int
    length: int  # tokens
    finish: str
    pages: tuple[str, ...] = ()  # names of the full pages behind those of the prompt
    stats: Mapping[str, Any] = field(default_factory=dict)  # counts and times of its sequence

    @property
    def delivery(self) -> float:
        """Seconds that the server took beside the engine, until the first token was there to be sent; 0: not known."""
        sent, first = self.stats.get(FIRST_SENT), self.stats.get("time_to_first")
        return 0.0 if sent is None or first is None else max(0.0, sent - first)

    @property
    def tokens_per_step(self) -> float | None:
        steps = self.stats.get("steps")
        return self.length / steps if steps else None


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    id: str
    at: float | None  # seconds since 1970; None: not recorded
    model: str  # served name; empty: not recorded
    length: int  # tokens of the prompt
    pages: tuple[str, ...]  # names of the prompt's full pages
    tokens: tuple[int, ...]  # tokens of the prompt; (): recorded without text
    sampling: SamplingParams
    where: str  # file and line
    share: float = 1.0  # part of all requests that the server recorded
    answers: tuple[RecordedAnswer, ...] = ()  # (): none has ended, or ends are not recorded


@dataclass(frozen=True, slots=True)
class Traffic:
    requests: tuple[RecordedRequest, ...]  # by arrival; as in the file without times
    notes: tuple[str, ...]  # what is missing or not used

    @property
    def share(self) -> float:
        """Smallest part of the requests that was recorded."""
        return min(request.share for request in self.requests)

    @property
    def has_texts(self) -> bool:
        return all(request.tokens for request in self.requests)


def read_traffic(path: Path) -> Traffic:
    """Read a record. Raises InvalidRequest for a file without requests, and for a line that cannot be used."""
    if not path.is_file():
        raise InvalidRequest(f"no record at {path}: give a file that `paceline serve --record FILE` wrote")
    taken: dict[str, RecordedRequest] = {}
    ends: dict[str, list[RecordedAnswer]] = {}
    unknown: Counter[str] = Counter()
    for where, line in _lines(path):
        identity = str(line.get("id", ""))
        unknown.update(set(line) - (ENDED if is_end(line) else TAKEN))
        if is_end(line):
            ends.setdefault(identity, []).append(_answer(line, where))
        elif identity in taken:
            raise InvalidRequest(f"{where}: request {identity!r} was already taken at {taken[identity].where}")
        else:
            taken[identity] = _request(line, identity, where)
    if not taken:
        raise InvalidRequest(f"{path} holds no requests; let `paceline serve --record {path}` take some first")
    return _traffic(taken, ends, unknown)


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        for number, line in records(path):
            yield f"{path}:{number}", line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: cannot be read ({error}); give a whole file in UTF-8") from error


def _traffic(
    taken: Mapping[str, RecordedRequest], ends: Mapping[str, Sequence[RecordedAnswer]], unknown: Counter[str]
) -> Traffic:
    notes = [f"{count} lines have a field {name!r}, which is not known and not used" for name, count in unknown.items()]
    lost = sum(len(answers) for identity, answers in ends.items() if identity not in taken)
    if lost:
        notes.append(f"{lost} answers end whose request is not in the file; they are left out")
    requests = [_with_answers(request, ends.get(identity, ())) for identity, request in taken.items()]
    least = min(request.share for request in requests)
    if least < 1:
        notes.append(f"the record has {least:.0%} of the requests: the server had more to do than what is replayed")
    times = [request.at for request in requests if request.at is not None]
    if len(times) < len(requests):
        notes.append(f"{len(requests) - len(times)} of {len(requests)} requests have no arrival time")
        return Traffic(tuple(requests), tuple(notes))
    if times != sorted(times):
        notes.append("requests were not in the order of their arrival times, and were sorted")
    return Traffic(tuple(sorted(requests, key=lambda request: request.at or 0.0)), tuple(notes))


def _with_answers(request: RecordedRequest, answers: Sequence[RecordedAnswer]) -> RecordedRequest:
    return replace(request, answers=tuple(sorted(answers, key=lambda answer: answer.sample)))


def _request(line: Mapping[str, Any], identity: str, where: str) -> RecordedRequest:
    tokens = line.get("prompt_tokens")
    if tokens is None and "prompt_length" not in line:
        raise InvalidRequest(
            f"{where}: neither prompt_tokens nor prompt_length: this is no request of `paceline serve --record`"
        )
    if tokens is not None and (not isinstance(tokens, list) or not tokens or any(type(t) is not int for t in tokens)):
        raise InvalidRequest(f"{where}: prompt_tokens must be a list of token ids; mend or remove the line")
    length = len(tokens) if tokens is not None else _whole(line, "prompt_length", where, least=1)
    at = line.get("at")
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at)):
        raise InvalidRequest(f"{where}: at must be a time in seconds, not {at!r}; mend or remove the line")
    share = line.get("share", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InvalidRequest(f"{where}: share must be above 0 and at most 1, not {share!r}; mend or remove the line")
    pages = _names(line, where, most=length // PAGE_SIZE)
    return RecordedRequest(
        id=identity,
        at=None if at is None else float(at),
        model=str(line.get("model") or ""),
        length=length,
        pages=tuple(page_names(tokens)) if tokens is not None and not pages else pages,
        tokens=tuple(tokens or ()),
        sampling=sampling_of(line.get("sampling"), where),
        where=where,
        share=float(share),
    )


def _answer(line: Mapping[str, Any], where: str) -> RecordedAnswer:
    return RecordedAnswer(
        sample=_whole(line, "sample", where),
        length=_whole(line, "output_tokens", where),
        finish=str(line["ended"]),
        pages=_names(line, where, most=MAX_FABRICATED),
        stats={name: line[name] for name in (*COUNTS, *TIMES, FIRST_SENT) if line.get(name) is not None},
    )


def _whole(line: Mapping[str, Any], name: str, where: str, *, least: int = 0) -> int:
    value = line.get(name, 0 if least == 0 else None)
    if type(value) is not int or not least <= value <= MAX_FABRICATED:
        raise InvalidRequest(f"{where}: {name} must be a whole number from {least} on, not {value!r}; mend the line")
    return value


def _names(line: Mapping[str, Any], where: str, *, most: int) -> tuple[str, ...]:
    names = line.get("pages") or []
    if not isinstance(names, list) or len(names) > most or any(not isinstance(name, str) for name in names):
        raise InvalidRequest(f"{where}: pages must be at most {most} names; mend or remove the line")
    return tuple(names)
