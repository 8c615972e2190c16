"""/v1/completions: one prompt or many, as text or token ids."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.server import answers, sse
from paceline.server.answers import Choice, Tally, Wanted
from paceline.server.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from paceline.server.replies import ChoicesReply, Fields
from paceline.server.routes.common import bridge_of, new_id, streams, translator_of
from paceline.text.detokenizer import IncrementalDecoder
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
    tally, wanted = Tally(asked, bridge.llm.tokenizer, model=bridge.model), Wanted.of(body)
    reply = ChoicesReply(CompletionForm(body, tally, wanted), tally, wanted)
    return await sse.answer(http, bridge, asked.requests, reply, stream=bool(body.stream))


class CompletionForm:
    chunk = "text_completion"

    def __init__(self, body: CompletionRequest, tally: Tally, wanted: Wanted) -> None:
        self._tally = tally
        self._tokenizer = tally.tokenizer
        self._echo = bool(body.echo)
        self._prompt_scores = body.prompt_logprobs is not None
        self._wanted = wanted
        self.begins = self._echo or self._prompt_scores or wanted.token_ids

    def whole(self) -> Completion:
        choices = [self._choice(choice) for choice in self._tally.choices]
        return Completion(**self._tally.head(), object="text_completion", choices=choices)

    def _choice(self, choice: Choice) -> CompletionChoice:
        """The beginning of a choice with everything that followed."""
        sample, made = choice.sample, self._beginning(choice)
        made.text += sample.text
        if self._wanted.logprobs:
            own = self._scored(choice, sample.tokens, sample.logprobs, choice.texts(sample.tokens))
            made.logprobs = own if made.logprobs is None else made.logprobs.followed_by(own)
        made.finish_reason, made.stop_reason = choice.finish_reason, choice.stop_reason
        if self._wanted.token_ids:
            made.token_ids = sample.tokens
        return made

    def begun(self, choice: Choice) -> Fields:
        return {"choices": [self._beginning(choice).model_dump(exclude_unset=True)]}

    def _beginning(self, choice: Choice) -> CompletionChoice:
        """What is known of a choice before it has said anything: with echo, the prompt."""
        made = CompletionChoice(index=choice.index, text="", logprobs=None, finish_reason=None)
        prompt, scores = (
            self._tally.asked.requests[choice.prompt].prompt,
            self._tally.prompt_logprobs.get(choice.prompt),
        )
        if self._echo:
            given = self._tally.asked.prompts[choice.prompt]
            made.text = self._tokenizer.decode(prompt) if given is None else given
        if self._echo and self._wanted.logprobs and scores is not None:
            decoder = IncrementalDecoder(self._tokenizer)
            made.logprobs = self._scored(choice, prompt, scores, [decoder.push(token) for token in prompt])
        choice.offset = len(made.text)
        if self._wanted.token_ids:
            made.prompt_token_ids, made.token_ids = list(prompt), []
        if self._prompt_scores and scores is not None:
            made.prompt_logprobs = answers.prompt_scores(scores, self._tokenizer)
        return made

    def said(self, choice: Choice, event: TokenEvent, texts: list[str]) -> Fields | None:
        ends = event.finish is not None
        if not (event.text or ends or (event.tokens and self._wanted.tokens)):
            return None
        made: Fields = {"index": choice.index, "text": event.text, "logprobs": None, "finish_reason": None}
        if event.logprobs and self._wanted.logprobs:
            made["logprobs"] = self._scored(choice, event.tokens, event.logprobs, texts)
        if self._wanted.token_ids:
            made["token_ids"] = event.tokens
        if ends:
            made["finish_reason"], made["stop_reason"] = choice.finish_reason, choice.stop_reason
        return {"choices": [made]}

    def _scored(
        self, choice: Choice, tokens: Sequence[int], scores: Sequence[Logprob | None], texts: Sequence[str]
    ) -> CompletionLogprobs:
        made = answers.completion_logprobs(tokens, scores, texts, self._tokenizer, offset=choice.offset)
        choice.offset += sum(map(len, texts))
        return made
