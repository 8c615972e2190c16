"""Answers in Ollama's form, to a chat or to a prompt: one object, or a line of JSON whenever the text grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from paceline.chat.tool_calls import Said, ToolCall
from paceline.server import sse
from paceline.server.answers.arguments import parsed_arguments
from paceline.server.answers.chat import chat_logprobs
from paceline.server.answers.tally import Fields, Tally
from paceline.server.answers.timestamps import timestamp
from paceline.server.dialects import ErrorDetail, ollama_error
from paceline.server.protocol.ollama import OllamaAnswered, OllamaChatAnswer, OllamaGenerateAnswer
from paceline.server.translate.translator import Translation
from paceline.text.tokenizer import Tokenizer
from paceline.types import Logprob, TokenEvent

NANOSECONDS = 1_000_000_000  # per second
A = TypeVar("A", bound=OllamaAnswered)


class OllamaAnswer(ABC, Generic[A]):
    """The part that both kinds of answers share. `model` is the name by which the client asked."""

    def __init__(self, asked: Translation, tokenizer: Tokenizer, *, model: str) -> None:
        self._tally = Tally(asked, tokenizer, model=model)
        self._choice = self._tally.choices[0]
        self._parser = asked.tools.parser() if asked.tools else None
        self._tokenizer = tokenizer
        self._scored = asked.requests[0].sampling.logprobs is not None

    @abstractmethod
    def said(self, said: Said) -> Fields:
        """Make the fields of new text and calls."""

    @abstractmethod
    def whole(self) -> A: ...

    # The whole answer.

    def add(self, event: TokenEvent) -> None:
        self._tally.add(event)

    def _whole(self) -> Fields:
        sample = self._choice.sample
        return self._line(self._read(sample.text, ends=True), sample.logprobs) | self._end()

    # A stream.

    def chunks(self, event: TokenEvent) -> Iterator[bytes]:
        self._tally.add(event)
        said = self._read(event.text, ends=event.finish is not None)
        if said.content or said.calls or (event.logprobs and self._scored):
            yield sse.line(self._line(said, event.logprobs) | {"done": False})

    def end(self) -> Iterator[bytes]:
        yield sse.line(self._line(Said(), ()) | self._end())

    def fail(self, error: ErrorDetail) -> Iterator[bytes]:
        yield sse.line(ollama_error(error))

    # Both.

    def _read(self, text: str, *, ends: bool) -> Said:
        """Divide new text into content and tool calls."""
        return Said(text) if self._parser is None else self._parser.read(text, ends=ends)

    def _line(self, said: Said, logprobs: Sequence[Logprob]) -> Fields:
        fields: Fields = {"model": self._tally.model, "created_at": timestamp(), **self.said(said)}
        if logprobs and self._scored:
            fields["logprobs"] = chat_logprobs(logprobs, self._tokenizer).content
        return fields

    def _end(self) -> Fields:
        """Make the fields that an answer ends with: the reason, times, counts, and the work of speculation."""
        stats = self._choice.sample.stats
        return {
            "done": True,
            "done_reason": self._choice.finish_reason,
            "total_duration": _nanoseconds(stats.time_total),
            "load_duration": 0,
            "prompt_eval_count": self._tally.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(stats.time_to_first - stats.time_queued),
            "eval_count": self._tally.output_tokens,
            "eval_duration": _nanoseconds(stats.time_total - stats.time_to_first),
            "speculation": self._tally.speculation(),
            **self._tally.remarks,
        }

    def _calls(self, calls: Sequence[ToolCall]) -> list[Fields]:
        assert self._parser is not None, "only a parser finds calls"
        first = self._parser.calls - len(calls)
        return [
            {
                "id": call.id,
                "function": {"name": call.name, "arguments": parsed_arguments(call), "index": first + i},
            }
            for i, call in enumerate(calls)
        ]


class ChatLines(OllamaAnswer[OllamaChatAnswer]):
    def said(self, said: Said) -> Fields:
        message: Fields = {"role": "assistant", "content": said.content}
        return {"message": message | ({"tool_calls": self._calls(said.calls)} if said.calls else {})}

    def whole(self) -> OllamaChatAnswer:
        return OllamaChatAnswer.model_validate(self._whole())


class GenerateLines(OllamaAnswer[OllamaGenerateAnswer]):
    def said(self, said: Said) -> Fields:
        return {"response": said.content}

    def whole(self) -> OllamaGenerateAnswer:
        return OllamaGenerateAnswer.model_validate(self._whole())


def _nanoseconds(seconds: float) -> int:
    """Convert to nanoseconds, at least one: clients divide by durations."""
    return max(1, round(seconds * NANOSECONDS))
