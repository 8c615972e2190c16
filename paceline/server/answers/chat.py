"""The answer to a chat: one `ChatCompletion`, or chunks of type chat.completion.chunk.

Chunks are plain dicts, not the models of `protocol`, because there is one for every token. Tests check that they fit
those models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from paceline.chat.tool_calls import Said
from paceline.server import sse
from paceline.server.answers.logprobs import finite, prompt_scores
from paceline.server.answers.tally import Choice, Extras, Fields, Tally
from paceline.server.dialects import ErrorDetail
from paceline.server.protocol.answers import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)
from paceline.server.protocol.requests import ChatRequest
from paceline.server.translate.translator import Translation
from paceline.text.tokenizer import Tokenizer
from paceline.types import Logprob, TokenEvent


class ChatAnswer:
    def __init__(self, body: ChatRequest, asked: Translation, tokenizer: Tokenizer, *, model: str) -> None:
        self._extras = Extras.of(body)
        self._tally = Tally(asked, tokenizer, model=model, extras=self._extras)
        self._tokenizer = tokenizer
        self._parsers = [asked.tools.parser() for _ in self._tally.choices] if asked.tools else []  # one a choice
        self._head = sse.chunk_head(self._tally.head() | {"object": "chat.completion.chunk"})

    # The whole answer.

    def add(self, event: TokenEvent) -> None:
        self._tally.add(event)

    def whole(self) -> ChatCompletion:
        tally = self._tally
        choices = [self._choice(choice) for choice in tally.choices]
        made = ChatCompletion(**tally.head(), object="chat.completion", choices=choices)
        if self._extras.token_ids:
            made.prompt_token_ids = list(tally.asked.requests[0].prompt)
        if 0 in tally.prompt_logprobs:
            made.prompt_logprobs = prompt_scores(tally.prompt_logprobs[0], self._tokenizer)
        made.usage, made.speculation = Usage.model_validate(tally.usage()), tally.speculation()
        made.timings = tally.timings()
        if tally.asked.ignored:
            made.ignored_fields = [*tally.asked.ignored]
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
            logprobs=chat_logprobs(sample.logprobs, self._tokenizer) if self._extras.logprobs else None,
            finish_reason=self._finish_reason(choice),
            stop_reason=choice.stop_reason,
        )
        if self._extras.token_ids:
            made.token_ids = sample.tokens
        return made

    # A stream.

    def chunks(self, event: TokenEvent) -> Iterator[bytes]:
        choice = self._tally.choice_of(event)
        if not choice.begun:
            choice.begun = True
            yield sse.chunk(self._head, self._tally.first_chunk(self._first(choice)))
        self._tally.add(event)
        texts = choice.texts(event.tokens) if self._extras.texts else []
        delta = self._delta(choice, event)
        if delta is not None:
            yield sse.chunk(self._head, self._tally.next_chunk({"choices": [delta]}, choice, event, texts))

    def _first(self, choice: Choice) -> Fields:
        """Make the first chunk of a choice: its role, and the facts about the prompt that the client asked for."""
        delta = {"role": "assistant", "content": ""}
        fields: Fields = {"choices": [{"index": choice.index, "delta": delta, "finish_reason": None}]}
        if self._extras.token_ids:
            fields["prompt_token_ids"] = self._tally.asked.requests[0].prompt
        if 0 in self._tally.prompt_logprobs:
            fields["prompt_logprobs"] = prompt_scores(self._tally.prompt_logprobs[0], self._tokenizer)
        return fields

    def _delta(self, choice: Choice, event: TokenEvent) -> Fields | None:
        """Make the choice in the chunk of an event. None: the event needs no chunk."""
        ends = event.finish is not None
        said = self._read(choice, event.text, ends=ends)
        if not (said.content or said.calls or ends or (event.tokens and self._extras.tokens)):
            return None
        delta: Fields = {"content": said.content_or_none}
        if said.calls:
            before = self._parsers[choice.index].calls - len(said.calls)
            delta["tool_calls"] = [
                {"index": before + i, "id": call.id, "type": "function", "function": call.function}
                for i, call in enumerate(said.calls)
            ]
        made: Fields = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if event.logprobs and self._extras.logprobs:
            made["logprobs"] = chat_logprobs(event.logprobs, self._tokenizer)
        if self._extras.token_ids:
            made["token_ids"] = event.tokens
        if ends:
            made["finish_reason"], made["stop_reason"] = self._finish_reason(choice), choice.stop_reason
        return made

    def end(self) -> Iterator[bytes]:
        if self._extras.usage:
            yield sse.chunk(self._head, {"choices": [], "usage": self._tally.usage()})
        yield sse.DONE

    def fail(self, error: ErrorDetail) -> list[bytes]:
        return sse.error_chunks(error)

    # Both.

    def _read(self, choice: Choice, text: str, *, ends: bool) -> Said:
        """Divide new text into content and tool calls."""
        return self._parsers[choice.index].read(text, ends=ends) if self._parsers else Said(text)

    def _finish_reason(self, choice: Choice) -> Literal["stop", "length", "tool_calls"]:
        called = bool(self._parsers) and self._parsers[choice.index].calls > 0
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason


def chat_logprobs(scores: Sequence[Logprob], tokenizer: Tokenizer) -> ChatLogprobs:
    """Write log-probabilities in OpenAI's format for chats."""
    content = []
    for score in scores:
        own = _top(score.token, score.logprob, tokenizer)
        top = [_top(token, logprob, tokenizer) for token, logprob in score.top]
        content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return ChatLogprobs(content=content)


def _top(token: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    data = tokenizer.token_bytes(token)
    return TopLogprob(token=data.decode(errors="replace"), logprob=finite(logprob), bytes=list(data))
