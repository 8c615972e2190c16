"""The answer to a fill-in, in the form of llama.cpp's /infill: one `Infilled`, or events of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, RootModel
from pydantic_core import to_json

from paceline.server.answers.tally import Fields, Tally
from paceline.server.dialects import ErrorBody, ErrorDetail
from paceline.server.protocol.llama_cpp import Infilled, InfillRequest
from paceline.server.translate.translator import Translation
from paceline.text.tokenizer import Tokenizer
from paceline.types import Finish, TokenEvent


class InfillAnswer:
    def __init__(self, body: InfillRequest, asked: Translation, tokenizer: Tokenizer, *, model: str) -> None:
        self._tally = Tally(asked, tokenizer, model=model)
        self._fields = body.response_fields or []  # none: all
        self._silent = body.n_predict == 0  # the engine draws one token to end a prompt; it is not shown

    def add(self, event: TokenEvent) -> None:
        self._tally.add(event)

    def whole(self) -> BaseModel:
        made = Infilled(index=0, content=self._shown(self._tally.choices[0].sample.text), stop=True, **self._last())
        return RootModel[dict[str, Any]](chosen(made.model_dump(), self._fields)) if self._fields else made

    def chunks(self, event: TokenEvent) -> Iterator[bytes]:
        self._tally.add(event)
        if event.text or event.finish is not None:
            ends = event.finish is not None
            made = {"index": 0, "content": self._shown(event.text), "stop": ends, **(self._last() if ends else {})}
            yield _event(chosen(made, self._fields) if ends and self._fields else made)

    def end(self) -> Iterator[bytes]:
        return iter(())

    def fail(self, error: ErrorDetail) -> Iterator[bytes]:
        yield _event(ErrorBody(error=error).model_dump())

    def _shown(self, text: str) -> str:
        return "" if self._silent else text

    def _last(self) -> Fields:
        """Make the fields of a complete answer."""
        tally, sample = self._tally, self._tally.choices[0].sample
        stats, asked = sample.stats, tally.asked
        by_text = isinstance(sample.stop, str)
        fields: Fields = {
            "model": tally.model,
            "tokens_predicted": 0 if self._silent else stats.output_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "tokens_cached": stats.prompt_tokens + stats.output_tokens,
            "stop_type": "limit" if sample.finish is Finish.LENGTH else "word" if by_text else "eos",
            "stopping_word": sample.stop if by_text else "",
            "truncated": asked.cut,
            "has_new_line": "\n" in self._shown(sample.text),
            "timings": tally.timings().model_dump(),
            "speculation": tally.speculation().model_dump(),
        }
        return fields | ({"ignored_fields": [*asked.ignored]} if asked.ignored else {})


def chosen(answer: Mapping[str, Any], paths: list[str]) -> dict[str, Any]:
    """Return the fields at these paths, such as timings/prompt_n, under their paths; unknown ones are left out."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found


def _event(fields: Fields) -> bytes:
    return b"data: %b\n\n" % to_json(fields)
