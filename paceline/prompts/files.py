"""Read prompt files of several formats into a list of prompts, for benchmarks, audits and training.

A source is a set by name (`humaneval`: its file is looked up under a data directory, then among the sets of this
package), or a path: JSON lines (`.jsonl`, also `.gz`), a JSON list, or plain text with one prompt a line. A line has
its prompt under `turns` (the first counts), `messages`, `conversations`, `prompt`, `question`, `text` or `instruction`;
one with a `schema` asks for JSON that follows it, one with a `function` for a call of it in JSON. A line with
`prompt_tokens` is a recorded request with the sampling parameters it had; the line of its end is no prompt. Messages of
a user after the first answer are kept, but are no prompts.
Nothing is downloaded, and nothing is skipped silently: a line that cannot be used is an error that names file and line.
Only a recorded request that a crash has torn, at the end of a file, is left out with a warning.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from paceline.errors import InvalidRequest
from paceline.types import Grammar, SamplingParams

SETS: Mapping[str, str] = {
    "spec_bench": "spec_bench/question.jsonl",
    "mt_bench": "mt_bench/question.jsonl",
    "humaneval": "humaneval/HumanEval.jsonl.gz",
    "gsm8k": "gsm8k/test_first200.jsonl",
    "code_edit": "code_edit/code_edit.jsonl",
    "bfcl": "bfcl/simple_python.jsonl.gz",
    "jsonschemabench": "jsonschemabench/schemas_dev.jsonl.gz",
    "sonnet": "sonnet/sonnet.txt",
    "train_prompts": "train_prompts/train_prompts.jsonl.gz",
}
SHIPPED = Path(__file__).parent / "sets"  # sets whose licences let this package hold them; see the README.md there
ID_FIELDS = ("id", "task_id", "question_id", "name")
CATEGORY_FIELDS = ("category", "edit", "split")
TEXT_FIELDS = ("prompt", "question", "text", "instruction")
CALL_REQUEST = 'Answer with JSON alone, {"name": …, "arguments": {…}}: the call of one of these functions that does it.'
ROLES = {"human": "user", "gpt": "assistant"}  # roles in ShareGPT's conversations → ours
RECORDED_START = b'{"id": "'  # bytes that every recorded request begins with
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: messages that end with a user's, or the tokens of a recorded request."""

    id: str
    category: str
    messages: tuple[Mapping[str, str], ...] = ()
    tokens: tuple[int, ...] = ()
    sampling: SamplingParams | None = None  # parameters of a recorded request; None: the caller chooses
    later: tuple[str, ...] = ()  # the user's messages after the answer
    source: str = "unknown"  # origin that the line names, else the name of the file
    license: str = "unknown"
    where: str = field(default="", compare=False)  # file and line

    @property
    def text(self) -> str:
        """The last message, for a model without a chat template."""
        return self.messages[-1]["content"] if self.messages else ""


def read_prompts(source: str, *, data: Path | None = None, count: int | None = None) -> list[Prompt]:
    """Read the prompts of a set or file. `count` limits their number; they are then spread evenly over the file."""
    prompts = read_file(find(source, data=data), name=source if source in SETS else None)
    return prompts if count is None else spread(prompts, count=count)


def read_file(path: Path, *, name: str | None = None) -> list[Prompt]:
    """Read all prompts of a file. `name` takes the place of a missing id or category."""
    prompts = list(_read(path, name=name or path.name.split(".")[0]))
    if not prompts:
        raise InvalidRequest(f"{path}: holds no prompts; give one JSON object or one text a line")
    return prompts


def find(source: str, *, data: Path | None) -> Path:
    """Find the file of a set or path. A set in the data directory goes before the one of this package."""
    if source in SETS:
        return _file_of_set(source, data=data)
    path = Path(source)
    if not path.is_file():
        raise InvalidRequest(f"no prompts at {path}: give the path of a file, or one of the sets {', '.join(SETS)}")
    return path


def _file_of_set(name: str, *, data: Path | None) -> Path:
    for directory in (data, SHIPPED):
        for file in () if directory is None else (directory / SETS[name], directory / f"{SETS[name]}.gz"):
            if file.is_file():
                return file
    if data is None:
        raise InvalidRequest(
            f"the prompt set {name!r} does not come with Paceline (docs/benchmarking.md names its source); put it into "
            f"a directory as {SETS[name]}, and set PACELINE_DATA or pass --data DIR"
        )
    raise InvalidRequest(f"no prompts at {data / SETS[name]}: the data directory must hold {SETS[name]}")


def spread(given: Sequence[T], *, count: int) -> list[T]:
    """Choose `count` items, evenly spread; all items if there are fewer."""
    count = min(count, len(given))
    return [given[i * len(given) // count] for i in range(count)]


def _read(path: Path, *, name: str) -> Iterator[Prompt]:
    number = 0
    try:
        for number, record in records(path):
            if not is_end(record):
                yield _prompt(record, name=name, path=path, number=number)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InvalidRequest(f"{path}:{number + 1}: cannot be read ({error}); give a whole file in UTF-8") from error


def records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the records of a file with their line numbers; those of a JSON list with their places in it."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig") as lines:
        if ".json" in path.suffixes:
            listed = _parsed(lines.read(), where=str(path))
            for number, record in enumerate(listed if isinstance(listed, list) else [listed], start=1):
                yield number, _object(record, where=f"{path}:{number}")
            return
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if ".jsonl" in path.suffixes:
                if is_torn(line.encode()):
                    logger.warning("%s:%d: a recorded request without its end is left out", path, number)
                    continue
                where = f"{path}:{number}"
                yield number, _object(_parsed(line, where=where), where=where)
            else:
                yield number, {"prompt": line.rstrip("\n")}


def is_end(record: Mapping[str, Any]) -> bool:
    """True for the line of a recorded request that tells how an answer to it ended, and has no prompt."""
    return "ended" in record and "id" in record


def is_torn(line: bytes) -> bool:
    """True for the beginning of a recorded request whose end was never written."""
    if line.endswith(b"\n") or not line.startswith(RECORDED_START[: len(line)]):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _parsed(text: str, *, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: not JSON ({error}); mend or remove the line") from None


def _object(record: Any, *, where: str) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise InvalidRequest(f"{where}: holds {type(record).__name__} where a JSON object is needed; mend the line")
    return record


def _prompt(record: Mapping[str, Any], *, name: str, path: Path, number: int) -> Prompt:
    where = f"{path}:{number}"
    if "prompt_length" in record and "prompt_tokens" not in record:
        raise InvalidRequest(
            f"{where}: was recorded without its text: serve without --record-without-text to record prompts"
        )
    asked = _recorded(record, where) if "prompt_tokens" in record else _said(record, where)
    return Prompt(
        id=str(_first(record, ID_FIELDS, default=f"{name}/{number}")),
        category=str(_first(record, CATEGORY_FIELDS, default=name)),
        source=str(_first(record, ("source",), default=path.name)),
        license=str(_first(record, ("license",), default="unknown")),
        where=where,
        **asked,
    )


def _said(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    turns = _turns(record)
    messages = _up_to_user(turns)
    if not messages or not messages[-1]["content"].strip():
        names = ", ".join(("turns", "messages", "conversations", *TEXT_FIELDS))
        raise InvalidRequest(
            f"{where}: no text under {names}; found {', '.join(record) or 'nothing'}: mend or remove the line"
        )
    after = [_role_and_text(message) for message in turns[len(messages) :]]
    return {"messages": messages, "later": tuple(text for role, text in after if role == "user" and text is not None)}


def _turns(record: Mapping[str, Any]) -> Sequence[Any]:
    """List the messages of a record, from the first field that holds any."""
    turns = record.get("turns")
    if isinstance(turns, list) and turns:
        return [_user(text) for text in turns]
    for name in ("messages", "conversations"):
        if isinstance(record.get(name), list):
            return cast(Sequence[Any], record[name])
    question = record.get("question")
    if isinstance(question, list) and question and isinstance(question[0], list):  # a list of turns of messages
        return [message for turn in question if isinstance(turn, list) for message in _turn(turn, record)]
    if isinstance(record.get("schema"), dict):
        return [_user(f"Write JSON that follows this schema:\n\n{json.dumps(record['schema'], indent=1)}")]
    return [_user(_first(record, TEXT_FIELDS, default=""))]


def _turn(messages: list[Any], record: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a turn; where the record has functions, its user is told to call one in JSON."""
    if not isinstance(record.get("function"), list):
        return messages
    asked = f"{CALL_REQUEST}\n\n{json.dumps(record['function'], ensure_ascii=False)}"
    return [
        {**each, "content": f"{each['content']}\n\n{asked}"}
        if isinstance(each, dict) and each.get("role") == "user" and isinstance(each.get("content"), str)
        else each
        for each in messages
    ]


def _user(text: Any) -> Mapping[str, Any]:
    return {"role": "user", "content": text}


def _up_to_user(said: Sequence[Any]) -> tuple[Mapping[str, str], ...]:
    """List the messages up to the first one of a user, which an answer follows."""
    messages: list[Mapping[str, str]] = []
    for each in said:
        role, content = _role_and_text(each)
        if content is None:
            return ()
        messages.append({"role": role, "content": content})
        if role == "user":
            return tuple(messages)
    return ()


def _role_and_text(message: Any) -> tuple[str, str | None]:
    if not isinstance(message, dict):
        return "", None
    role = str(message.get("role", message.get("from", "")))
    content = message.get("content", message.get("value"))
    return ROLES.get(role, role), content if isinstance(content, str) else None


def _recorded(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    tokens = record["prompt_tokens"]
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise InvalidRequest(f"{where}: prompt_tokens must be a list of token ids; mend or remove the line")
    return {"tokens": tuple(tokens), "sampling": sampling_of(record.get("sampling"), where)}


def sampling_of(recorded: Any, where: str) -> SamplingParams:
    """Make the sampling parameters of a recorded request."""
    try:
        options = dict(recorded or {})
        if options.get("grammar") is not None:
            options["grammar"] = Grammar(**options["grammar"])
        options["logit_bias"] = {int(token): bias for token, bias in (options.get("logit_bias") or {}).items()}
        return SamplingParams.of(**options)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"{where}: sampling parameters that no request has ({error}); remove the line") from None


def _first(record: Mapping[str, Any], names: Sequence[str], *, default: Any) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), default)
