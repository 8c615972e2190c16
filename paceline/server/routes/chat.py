"""/v1/chat/completions"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.server import answers, sse
from paceline.server.answers import Choice, Tally, Wanted
from paceline.server.problems import ErrorDetail
from paceline.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    FunctionCall,
    ToolCall,
)
from paceline.server.routes.common import bridge_of, new_id, streams, translator_of
from paceline.server.tool_calls import ToolCall as Call
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
    reply = ChatReply(body, Tally(asked, bridge.llm.tokenizer, model=bridge.model))
    return await sse.answer(http, bridge, asked.requests, reply, stream=bool(body.stream))


class ChatReply:
    def __init__(self, body: ChatRequest, tally: Tally) -> None:
        self._tally = tally
        self._tokenizer = tally.tokenizer
        self._wanted = Wanted.of(body)
        tools = tally.asked.tools
        self._parsers = [tools.parser() for _ in tally.choices] if tools else []  # one a choice

    # At once.

    def add(self, prompt: int, event: TokenEvent) -> None:
        self._tally.add(prompt, event)

    def whole(self) -> ChatCompletion:
        tally = self._tally
        made = ChatCompletion(
            **tally.head(),
            object="chat.completion",
            choices=[self._choice(choice) for choice in tally.choices],
            usage=tally.usage(),
            speculation=tally.speculation(),
        )
        tally.remark(made)
        self._add_prompt(made)
        return made

    def _choice(self, choice: Choice) -> ChatChoice:
        sample = choice.sample
        message = self._said(choice, sample.text, ends=True)
        message.role, message.refusal = "assistant", None
        for call in message.tool_calls or ():
            call.model_fields_set.discard("index")  # it is for chunks
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

    def _said(self, choice: Choice, text: str, *, ends: bool) -> ChatMessage:
        """What `text` adds to the answer: text, or calls of tools."""
        if not self._parsers:
            return ChatMessage(content=text)
        parser = self._parsers[choice.index]
        before, parts = parser.calls, [parser.push(text)]
        if ends:
            parts.append(parser.flush())
        content = "".join(part.content for part in parts)
        calls = [call for part in parts for call in part.calls]
        if not calls:
            return ChatMessage(content=content)
        message = ChatMessage(content=content or None)
        message.tool_calls = [_tool_call(call, before + i) for i, call in enumerate(calls)]
        return message

    def _finish_reason(self, choice: Choice) -> Literal["stop", "length", "tool_calls"]:
        called = bool(self._parsers) and self._parsers[choice.index].calls > 0
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    def _add_prompt(self, made: ChatCompletion | ChatChunk) -> None:
        if self._wanted.token_ids:
            made.prompt_token_ids = list(self._tally.asked.requests[0].prompt)
        self._add_scores(made)

    def _add_scores(self, made: ChatCompletion | ChatChunk) -> None:
        if 0 in self._tally.prompt_logprobs:
            made.prompt_logprobs = answers.prompt_scores(self._tally.prompt_logprobs[0], self._tokenizer)

    # As a stream.

    def begin(self) -> Iterator[str]:
        for choice in self._tally.choices:
            delta = ChatDelta(index=choice.index, delta=ChatMessage(role="assistant", content=""), finish_reason=None)
            chunk = self._chunk([delta])
            if choice.index == 0:
                self._add_prompt(chunk)
                self._tally.remark(chunk)
            yield sse.data(chunk)

    def chunks(self, prompt: int, event: TokenEvent) -> Iterator[str]:
        choice = self._tally.add(prompt, event)
        ends = event.finish is not None
        said = self._said(choice, event.text, ends=ends)
        if not (said.content or said.tool_calls or ends or (event.tokens and self._wanted.tokens)):
            return
        delta = ChatDelta(index=choice.index, delta=said, logprobs=None, finish_reason=None)
        if event.logprobs and self._wanted.logprobs:
            delta.logprobs = answers.chat_logprobs(event.logprobs, self._tokenizer)
        if self._wanted.token_ids:
            delta.token_ids = list(event.tokens)
        if ends:
            delta.finish_reason, delta.stop_reason = self._finish_reason(choice), choice.stop_reason
        chunk = self._chunk([delta])
        if self._wanted.events:
            chunk.paceline = self._tally.chunk_events(choice, event, choice.texts(event.tokens))
        if self._tally.over:
            chunk.speculation = self._tally.speculation()
            self._add_scores(chunk)
        yield sse.data(chunk)

    def end(self) -> Iterator[str]:
        if self._wanted.usage:
            chunk = self._chunk([])
            chunk.usage = self._tally.usage()
            yield sse.data(chunk)
        yield sse.DONE

    def broken(self, error: ErrorDetail) -> list[str]:
        return sse.error_chunks(error)

    def _chunk(self, choices: list[ChatDelta]) -> ChatChunk:
        chunk = ChatChunk(**self._tally.head(), object="chat.completion.chunk", choices=choices)
        self._tally.add_usage(chunk, self._wanted)
        return chunk


def _tool_call(call: Call, index: int) -> ToolCall:
    return ToolCall(
        index=index, id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments)
    )
