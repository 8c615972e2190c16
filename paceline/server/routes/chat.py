"""/v1/chat/completions"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.chat.tool_calls import Said
from paceline.server import answers, sse
from paceline.server.answers import Choice, Tally, Wanted
from paceline.server.protocol import ChatChoice, ChatCompletion, ChatMessage, ChatRequest, ToolCall
from paceline.server.replies import ChoicesReply, Fields
from paceline.server.routes.common import bridge_of, new_id, streams, translator_of
from paceline.types import TokenEvent

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=streams(ChatCompletion, "chunks of type chat.completion.chunk, then [DONE]"),
    summary="Answer a conversation",
)
async def chat(body: ChatRequest, http: Request) -> Response:
    bridge = bridge_of(http)
    asked = await translator_of(http).chat(body, new_id("chatcmpl"))
    tally, wanted = Tally(asked, bridge.llm.tokenizer, model=bridge.model), Wanted.of(body)
    reply = ChoicesReply(ChatForm(tally, wanted), tally, wanted)
    return await sse.answer(http, bridge, asked.requests, reply, stream=bool(body.stream))


class ChatForm:
    chunk = "chat.completion.chunk"
    begins = True

    def __init__(self, tally: Tally, wanted: Wanted) -> None:
        self._tally = tally
        self._tokenizer = tally.tokenizer
        self._wanted = wanted
        tools = tally.asked.tools
        self._parsers = [tools.parser() for _ in tally.choices] if tools else []  # one a choice

    def whole(self) -> ChatCompletion:
        tally = self._tally
        choices = [self._choice(choice) for choice in tally.choices]
        made = ChatCompletion(**tally.head(), object="chat.completion", choices=choices)
        if self._wanted.token_ids:
            made.prompt_token_ids = list(tally.asked.requests[0].prompt)
        if 0 in tally.prompt_logprobs:
            made.prompt_logprobs = answers.prompt_scores(tally.prompt_logprobs[0], self._tokenizer)
        return made

    def _choice(self, choice: Choice) -> ChatChoice:
        sample = choice.sample
        said = self._read(choice, sample.text, ends=True)
        message = ChatMessage(role="assistant", content=said.content_or_none, refusal=None)
        if said.calls:
            message.tool_calls = [
                ToolCall.model_validate({"id": call.id, "type": "function", "function": call.function})
                for call in said.calls
            ]
        made = ChatChoice(
            index=choice.index,
            message=message,
            logprobs=answers.chat_logprobs(sample.logprobs, self._tokenizer) if self._wanted.logprobs else None,
            finish_reason=self._finish_reason(choice),
            stop_reason=choice.stop_reason,
        )
        if self._wanted.token_ids:
            made.token_ids = sample.tokens
        return made

    def begun(self, choice: Choice) -> Fields:
        delta = {"role": "assistant", "content": ""}
        fields: Fields = {"choices": [{"index": choice.index, "delta": delta, "finish_reason": None}]}
        if self._wanted.token_ids:
            fields["prompt_token_ids"] = self._tally.asked.requests[0].prompt
        if 0 in self._tally.prompt_logprobs:
            fields["prompt_logprobs"] = answers.prompt_scores(self._tally.prompt_logprobs[0], self._tokenizer)
        return fields

    def said(self, choice: Choice, event: TokenEvent, texts: list[str]) -> Fields | None:
        ends = event.finish is not None
        said = self._read(choice, event.text, ends=ends)
        if not (said.content or said.calls or ends or (event.tokens and self._wanted.tokens)):
            return None
        delta: Fields = {"content": said.content_or_none}
        if said.calls:
            before = self._parsers[choice.index].calls - len(said.calls)
            delta["tool_calls"] = [
                {"index": before + i, "id": call.id, "type": "function", "function": call.function}
                for i, call in enumerate(said.calls)
            ]
        made: Fields = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if event.logprobs and self._wanted.logprobs:
            made["logprobs"] = answers.chat_logprobs(event.logprobs, self._tokenizer)
        if self._wanted.token_ids:
            made["token_ids"] = event.tokens
        if ends:
            made["finish_reason"], made["stop_reason"] = self._finish_reason(choice), choice.stop_reason
        return {"choices": [made]}

    def _read(self, choice: Choice, text: str, *, ends: bool) -> Said:
        """What `text` adds to the answer: text, or calls of tools."""
        return self._parsers[choice.index].read(text, ends=ends) if self._parsers else Said(text)

    def _finish_reason(self, choice: Choice) -> Literal["stop", "length", "tool_calls"]:
        called = bool(self._parsers) and self._parsers[choice.index].calls > 0
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason
