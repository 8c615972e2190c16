"""The answer in Anthropic's form: a message of blocks, each a text or a call of a tool.

A stream sends events when the message begins, when a block begins, grows and ends, and when the message ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.chat.tool_calls import Said, ToolCall
from paceline.server import sse
from paceline.server.answers.arguments import parsed_arguments
from paceline.server.answers.tally import Fields, Tally
from paceline.server.dialects import ErrorDetail, anthropic_error
from paceline.server.protocol.anthropic import AnthropicAnswer
from paceline.server.translate.translator import Translation
from paceline.text.tokenizer import Tokenizer
from paceline.types import Finish, TokenEvent


class MessagesAnswer:
    def __init__(self, asked: Translation, tokenizer: Tokenizer, *, model: str) -> None:
        self._asked = asked
        self._tally = Tally(asked, tokenizer, model=model)
        self._sample = self._tally.choices[0].sample
        self._parser = asked.tools.parser() if asked.tools else None
        self._begun = False
        self._blocks: list[Fields] = []  # complete blocks
        self._texts: list[str] | None = None  # parts of the text block that is being written

    # The whole answer.

    def add(self, event: TokenEvent) -> None:
        self._tally.add(event)

    def whole(self) -> AnthropicAnswer:
        for _ in self._write(self._sample.text, ends=True):  # fills the blocks; the events of a stream are dropped
            pass
        made = AnthropicAnswer.model_validate(self._message() | self._stop())
        made.speculation = self._tally.speculation()
        return made

    # A stream.

    def chunks(self, event: TokenEvent) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield _event("message_start", message=self._message() | {"stop_reason": None, "stop_sequence": None})
            yield _event("ping")
        self._tally.add(event)
        yield from self._write(event.text, ends=event.finish is not None)

    def end(self) -> Iterator[bytes]:
        stats = self._tally.speculation().model_dump()
        yield _event("message_delta", delta=self._stop(), usage=self._usage(), speculation=stats)
        yield _event("message_stop")

    def fail(self, error: ErrorDetail) -> Iterator[bytes]:
        yield sse.event("error", anthropic_error(error))

    # Blocks: each grows by events, and is kept once it is complete.

    def _write(self, text: str, *, ends: bool) -> Iterator[bytes]:
        """Add new text to the blocks, and make the events that report it."""
        said = Said(text) if self._parser is None else self._parser.read(text, ends=ends)
        if said.content:
            yield from self._begin_text()
            yield self._grow({"type": "text_delta", "text": said.content})
            assert self._texts is not None
            self._texts.append(said.content)
        for call in said.calls:
            yield from self._end_text()
            yield from self._call(call)
        if ends:
            if not self._blocks:  # an answer without a word is an empty text
                yield from self._begin_text()
            yield from self._end_text()

    def _begin_text(self) -> Iterator[bytes]:
        if self._texts is None:
            self._texts = []
            yield self._begin({"type": "text", "text": ""})

    def _end_text(self) -> Iterator[bytes]:
        if self._texts is not None:
            yield self._end({"type": "text", "text": "".join(self._texts)})
            self._texts = None

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        block: Fields = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield self._begin(block)
        yield self._grow({"type": "input_json_delta", "partial_json": call.arguments})
        yield self._end(block | {"input": parsed_arguments(call)})

    def _begin(self, block: Fields) -> bytes:
        return _event("content_block_start", index=len(self._blocks), content_block=block)

    def _grow(self, delta: Fields) -> bytes:
        return _event("content_block_delta", index=len(self._blocks), delta=delta)

    def _end(self, block: Fields) -> bytes:
        self._blocks.append(block)
        return _event("content_block_stop", index=len(self._blocks) - 1)

    # The message around the blocks.

    def _message(self) -> Fields:
        message: Fields = {
            "id": self._asked.id,
            "type": "message",
            "role": "assistant",
            "model": self._tally.model,
            "content": self._blocks,
            "usage": self._usage(),
        }
        return message | self._tally.remarks

    def _stop(self) -> Fields:
        return {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}

    def _stop_reason(self) -> str:
        if self._sample.finish is Finish.LENGTH:
            full = self._tally.output_tokens < (self._asked.requests[0].sampling.max_tokens or 0)
            return "model_context_window_exceeded" if full else "max_tokens"
        if self._parser is not None and self._parser.calls:
            return "tool_use"
        return "end_turn" if self._stop_sequence() is None else "stop_sequence"

    def _stop_sequence(self) -> str | None:
        return self._sample.stop if isinstance(self._sample.stop, str) else None

    def _usage(self) -> Fields:
        """Count tokens so far. How many of the prompt were cached is known at the end."""
        cached = self._sample.stats.cached_tokens
        return {
            "input_tokens": self._tally.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._tally.output_tokens,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event(kind, {"type": kind, **fields})
