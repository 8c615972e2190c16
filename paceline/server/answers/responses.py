"""The answer in OpenAI's newer form, a list of items: messages, and calls of functions.

A stream sends numbered events of type response.* when an item begins, grows and ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.chat.tool_calls import Said, ToolCall
from paceline.server import sse
from paceline.server.answers.tally import Fields, Tally
from paceline.server.dialects import ErrorDetail
from paceline.server.protocol.answers import InputDetails, OutputDetails, ResponseObject, ResponsesUsage, new_id
from paceline.server.protocol.requests import ResponsesRequest
from paceline.server.translate.translator import Translation
from paceline.text.tokenizer import Tokenizer
from paceline.types import Finish, TokenEvent


class ResponsesAnswer:
    def __init__(self, body: ResponsesRequest, asked: Translation, tokenizer: Tokenizer, *, model: str) -> None:
        self._body = body
        self._asked = asked
        self._tally = Tally(asked, tokenizer, model=model)
        self._sample = self._tally.choices[0].sample
        self._parser = asked.tools.parser() if asked.tools else None
        self._items: list[Fields] = []  # complete items
        self._message: str | None = None  # id of the message that is being written
        self._texts: list[str] = []  # parts of that message so far
        self._number = -1  # sequence number of the latest event

    # The whole answer.

    def add(self, event: TokenEvent) -> None:
        self._tally.add(event)

    def whole(self) -> ResponseObject:
        for _ in self._write(self._sample.text, ends=True):  # fills the items; the events of a stream are dropped
            pass
        return self._ended()

    # A stream.

    def chunks(self, event: TokenEvent) -> Iterator[bytes]:
        if self._number < 0:
            begun = self._response("in_progress")
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        self._tally.add(event)
        yield from self._write(event.text, ends=event.finish is not None)

    def end(self) -> Iterator[bytes]:
        ended = self._ended()
        yield self._event(f"response.{ended.status}", response=ended.model_dump(exclude_unset=True))

    def fail(self, error: ErrorDetail) -> Iterator[bytes]:
        problem = {"code": error.code or error.type, "message": error.message}
        yield self._event("response.failed", response=self._response("failed", error=problem))

    # Items: each grows by events, and is kept once it is complete.

    def _write(self, text: str, *, ends: bool) -> Iterator[bytes]:
        """Add new text to the items, and make the events that report it."""
        said = Said(text) if self._parser is None else self._parser.read(text, ends=ends)
        if said.content:
            yield from self._begin_message()
            self._texts.append(said.content)
            yield self._event("response.output_text.delta", **self._part_place, delta=said.content, logprobs=[])
        for call in said.calls:
            yield from self._end_message()
            yield from self._call(call)
        if ends:
            if not self._items:  # an answer without a word is an empty message
                yield from self._begin_message()
            yield from self._end_message()

    def _begin_message(self) -> Iterator[bytes]:
        if self._message is None:
            self._message, self._texts = new_id("msg"), []
            item = self._message_item("in_progress", content=[])
            yield self._event("response.output_item.added", output_index=len(self._items), item=item)
            yield self._event("response.content_part.added", **self._part_place, part=_part(""))

    def _end_message(self) -> Iterator[bytes]:
        if self._message is None:
            return
        text = "".join(self._texts)
        item = self._message_item(self._status, content=[_part(text)])
        yield self._event("response.output_text.done", **self._part_place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._part_place, part=_part(text))
        yield self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._message = None

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        place = {"item_id": new_id("fc"), "output_index": len(self._items)}
        item = {"type": "function_call", "id": place["item_id"], "call_id": call.id, "name": call.name}
        begun = item | {"arguments": "", "status": "in_progress"}
        item |= {"arguments": call.arguments, "status": self._status}
        yield self._event("response.output_item.added", output_index=place["output_index"], item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)
        self._items.append(item)

    @property
    def _status(self) -> str:
        """The status of an item that ends now."""
        return "incomplete" if self._sample.finish is Finish.LENGTH else "completed"

    @property
    def _part_place(self) -> Fields:
        return {"item_id": self._message, "output_index": len(self._items), "content_index": 0}

    def _message_item(self, status: str, content: list[Fields]) -> Fields:
        return {"id": self._message, "type": "message", "role": "assistant", "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse.event(kind, {"type": kind, "sequence_number": self._number, **fields})

    # The response around the items.

    def _ended(self) -> ResponseObject:
        cut = {"reason": "max_output_tokens"} if self._sample.finish is Finish.LENGTH else None
        fields = self._response("incomplete" if cut else "completed", incomplete_details=cut, output=self._items)
        made = ResponseObject.model_validate(fields)
        made.usage, made.speculation = self._usage(), self._tally.speculation()
        return made

    def _usage(self) -> ResponsesUsage:
        usage, stats = self._tally.usage(), self._sample.stats
        return ResponsesUsage(
            input_tokens=usage["prompt_tokens"],
            input_tokens_details=InputDetails(cached_tokens=stats.cached_tokens),
            output_tokens=usage["completion_tokens"],
            output_tokens_details=OutputDetails(
                reasoning_tokens=0,
                accepted_prediction_tokens=stats.prediction_accepted,
                rejected_prediction_tokens=stats.prediction_rejected,
            ),
            total_tokens=usage["total_tokens"],
        )

    def _response(self, status: str, **fields: Any) -> Fields:
        body, sampling = self._body, self._asked.requests[0].sampling
        plain: Fields = {
            "id": self._asked.id,
            "object": "response",
            "created_at": float(self._tally.created),
            "status": status,
            "model": self._tally.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": bool(body.tools) and body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if self._asked.ignored:
            plain["ignored_fields"] = list(self._asked.ignored)
        return plain | fields


def _part(text: str) -> Fields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
