"""/v1/responses: OpenAI's newer form of a chat, text in and text out. Nothing is kept between two requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.server import sse
from paceline.server.answers import Tally
from paceline.server.problems import ErrorDetail
from paceline.server.protocol import (
    InputDetails,
    OutputDetails,
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
)
from paceline.server.routes.common import bridge_of, new_id, streams, translator_of
from paceline.types import Finish, TokenEvent

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses=streams(ResponseObject, "events of type response.*"),
    summary="Answer a conversation, in the form of OpenAI's Responses",
)
async def responses(body: ResponsesRequest, http: Request) -> Response:
    bridge = bridge_of(http)
    asked = await translator_of(http).response(body, new_id("resp"))
    reply = ResponsesReply(body, Tally(asked, bridge.llm.tokenizer, model=bridge.model))
    return await sse.answer(http, bridge, asked.requests, reply, stream=bool(body.stream))


class ResponsesReply:
    def __init__(self, body: ResponsesRequest, tally: Tally) -> None:
        self._body = body
        self._tally = tally
        self._item = new_id("msg")
        self._number = -1  # of the latest event

    # At once.

    def add(self, prompt: int, event: TokenEvent) -> None:
        self._tally.add(prompt, event)

    def whole(self) -> ResponseObject:
        sample = self._tally.choices[0].sample
        cut = sample.finish is Finish.LENGTH
        made = self._begun(status="incomplete" if cut else "completed")
        made.output = [self._message()]
        made.incomplete_details = {"reason": "max_output_tokens"} if cut else None
        usage, stats = self._tally.usage(), sample.stats
        made.usage = ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=stats.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(
                reasoning_tokens=0,
                accepted_prediction_tokens=stats.accepted,
                rejected_prediction_tokens=stats.drafted - stats.accepted,
            ),
            total_tokens=usage.total_tokens,
        )
        made.speculation = self._tally.speculation()
        return made

    def _begun(self, status: str) -> ResponseObject:
        tally, body, sampling = self._tally, self._body, self._tally.asked.requests[0].sampling
        plain: dict[str, Any] = {
            "id": tally.asked.id,
            "object": "response",
            "created_at": float(tally.created),
            "status": status,
            "model": tally.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        made = ResponseObject(**plain)
        tally.remark(made)
        return made

    def _message(self) -> OutputMessage:
        sample = self._tally.choices[0].sample
        status: Any = {None: "in_progress", Finish.LENGTH: "incomplete"}.get(sample.finish, "completed")
        return OutputMessage(
            id=self._item, type="message", role="assistant", status=status, content=[_part(sample.text)]
        )

    # As a stream.

    def begin(self) -> Iterator[str]:
        begun = _dict(self._begun("in_progress"))
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        item = _dict(self._message()) | {"content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=_dict(_part("")))

    def chunks(self, prompt: int, event: TokenEvent) -> Iterator[str]:
        self._tally.add(prompt, event)
        if event.text:
            yield self._event("response.output_text.delta", **self._place, delta=event.text, logprobs=[])

    def end(self) -> Iterator[str]:
        text = self._tally.choices[0].sample.text
        yield self._event("response.output_text.done", **self._place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=_dict(_part(text)))
        yield self._event("response.output_item.done", output_index=0, item=_dict(self._message()))
        whole = self.whole()
        yield self._event(f"response.{whole.status}", response=_dict(whole))

    def broken(self, error: ErrorDetail) -> Iterator[str]:
        failed = self._begun("failed")
        failed.error = {"code": error.code or error.type, "message": error.message}
        yield self._event("response.failed", response=_dict(failed))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return sse.event(kind, json.dumps({"type": kind, "sequence_number": self._number, **fields}))


def _part(text: str) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])


def _dict(made: ResponseObject | OutputMessage | OutputText) -> dict[str, Any]:
    return made.model_dump(exclude_unset=True)
