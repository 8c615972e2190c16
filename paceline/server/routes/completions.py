"""/v1/completions: one prompt or many, as text or token ids."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.detokenizer import IncrementalDecoder
from paceline.server import answers, sse
from paceline.server.answers import Choice, Tally, Wanted
from paceline.server.problems import ErrorDetail
from paceline.server.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from paceline.server.routes.common import bridge_of, new_id, streams, translator_of
from paceline.types import Logprob, TokenEvent

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=streams(Completion, "chunks of type text_completion, then [DONE]"),
    summary="Continue prompts",
)
async def completions(body: CompletionRequest, http: Request) -> Response:
    bridge = bridge_of(http)
    asked = await translator_of(http).completion(body, new_id("cmpl"))
    reply = CompletionReply(body, Tally(asked, bridge.llm.tokenizer, model=bridge.model))
    return await sse.answer(http, bridge, asked.requests, reply, stream=bool(body.stream))


class CompletionReply:
    def __init__(self, body: CompletionRequest, tally: Tally) -> None:
        self._tally = tally
        self._tokenizer = tally.tokenizer
        self._echo = bool(body.echo)
        self._prompt_scores = body.prompt_logprobs is not None
        self._wanted = Wanted.of(body)

    # At once.

    def add(self, prompt: int, event: TokenEvent) -> None:
        self._tally.add(prompt, event)

    def whole(self) -> Completion:
        tally = self._tally
        made = Completion(
            **tally.head(),
            object="text_completion",
            choices=[self._choice(choice) for choice in tally.choices],
            usage=tally.usage(),
            speculation=tally.speculation(),
        )
        tally.remark(made)
        return made

    def _choice(self, choice: Choice) -> CompletionChoice:
        sample = choice.sample
        made = CompletionChoice(
            index=choice.index,
            text=(self._prompt_text(choice) if self._echo else "") + sample.text,
            logprobs=self._all_logprobs(choice) if self._wanted.logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if self._wanted.token_ids:
            made.token_ids = sample.tokens
            made.prompt_token_ids = self._prompt(choice)
        self._add_scores(made, choice)
        return made

    def _all_logprobs(self, choice: Choice) -> CompletionLogprobs:
        """Of the answer; with echo, of the prompt before it."""
        tokens, scores = [*choice.sample.tokens], [*choice.sample.logprobs]
        if not self._echo:
            return self._scored(choice, tokens, scores, choice.texts(tokens))
        prompt = self._prompt(choice)
        begun = IncrementalDecoder(self._tokenizer)
        texts = [begun.push(token) for token in prompt] + choice.texts(tokens)
        both: list[Logprob | None] = [*self._tally.prompt_logprobs[choice.prompt], *scores]
        return self._scored(choice, [*prompt, *tokens], both, texts)

    def _scored(
        self, choice: Choice, tokens: list[int], scores: list[Logprob] | list[Logprob | None], texts: list[str]
    ) -> CompletionLogprobs:
        made = answers.completion_logprobs(tokens, scores, texts, self._tokenizer, offset=choice.offset)
        choice.offset += sum(map(len, texts))
        return made

    def _prompt(self, choice: Choice) -> list[int]:
        return list(self._tally.asked.requests[choice.prompt].prompt)

    def _prompt_text(self, choice: Choice) -> str:
        text = self._tally.asked.prompts[choice.prompt]
        return self._tokenizer.decode(self._prompt(choice)) if text is None else text

    def _add_scores(self, made: CompletionChoice, choice: Choice) -> None:
        scores = self._tally.prompt_logprobs.get(choice.prompt)
        if self._prompt_scores and scores is not None:
            made.prompt_logprobs = answers.prompt_scores(scores, self._tokenizer)

    # As a stream.

    def begin(self) -> Iterator[str]:
        for choice in self._tally.choices:
            if not (self._echo or self._wanted.token_ids or (choice.index == 0 and self._tally.asked.ignored)):
                continue
            text = self._prompt_text(choice) if self._echo else ""
            choice.offset += len(text)
            made = CompletionChoice(index=choice.index, text=text, logprobs=None, finish_reason=None)
            if self._wanted.token_ids:
                made.prompt_token_ids, made.token_ids = self._prompt(choice), []
            chunk = self._chunk([made])
            if choice.index == 0:
                self._tally.remark(chunk)
            yield sse.data(chunk)

    def chunks(self, prompt: int, event: TokenEvent) -> Iterator[str]:
        choice = self._tally.add(prompt, event)
        ends = event.finish is not None
        if not (event.text or ends or (event.tokens and self._wanted.tokens)):
            return
        made = CompletionChoice(index=choice.index, text=event.text, logprobs=None, finish_reason=None)
        texts = choice.texts(event.tokens) if self._wanted.logprobs or self._wanted.events else []
        if event.logprobs and self._wanted.logprobs:
            made.logprobs = self._scored(choice, [*event.tokens], [*event.logprobs], texts)
        if self._wanted.token_ids:
            made.token_ids = list(event.tokens)
        if ends:
            made.finish_reason, made.stop_reason = choice.finish_reason, choice.stop_reason
            self._add_scores(made, choice)
        chunk = self._chunk([made])
        if self._wanted.events:
            chunk.paceline = self._tally.chunk_events(choice, event, texts)
        if self._tally.over:
            chunk.speculation = self._tally.speculation()
        yield sse.data(chunk)

    def end(self) -> Iterator[str]:
        if self._wanted.usage:
            chunk = self._chunk([])
            chunk.usage = self._tally.usage()
            yield sse.data(chunk)
        yield sse.DONE

    def broken(self, error: ErrorDetail) -> list[str]:
        return sse.error_chunks(error)

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        chunk = Completion(**self._tally.head(), object="text_completion", choices=choices)
        self._tally.add_usage(chunk, self._wanted)
        return chunk
