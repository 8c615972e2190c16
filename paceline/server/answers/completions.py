"""The answer to a completion, of one prompt or many: one `Completion`, or chunks of type text_completion.

Chunks are plain dicts, not the models of `protocol`, because there is one for every token. Tests check that they fit
those models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.server import sse
from paceline.server.answers.logprobs import finite, prompt_scores, token_name
from paceline.server.answers.tally import Choice, Extras, Fields, Tally
from paceline.server.dialects import ErrorDetail
from paceline.server.protocol.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from paceline.server.protocol.requests import CompletionRequest
from paceline.server.translate.translator import Translation
from paceline.text.detokenizer import IncrementalDecoder
from paceline.text.tokenizer import Tokenizer
from paceline.types import Logprob, TokenEvent


class CompletionAnswer:
    def __init__(self, body: CompletionRequest, asked: Translation, tokenizer: Tokenizer, *, model: str) -> None:
        self._extras = Extras.of(body)
        self._tally = Tally(asked, tokenizer, model=model, extras=self._extras)
        self._tokenizer = tokenizer
        self._echo = bool(body.echo)
        self._prompt_scores = body.prompt_logprobs is not None
        self._tells_prompt = self._echo or self._prompt_scores or self._extras.token_ids
        self._head = sse.chunk_head(self._tally.head() | {"object": "text_completion"})

    # The whole answer.

    def add(self, event: TokenEvent) -> None:
        self._tally.add(event)

    def whole(self) -> Completion:
        tally = self._tally
        choices = [self._choice(choice) for choice in tally.choices]
        made = Completion(**tally.head(), object="text_completion", choices=choices)
        made.usage, made.speculation = Usage.model_validate(tally.usage()), tally.speculation()
        made.timings = tally.timings()
        if tally.asked.ignored:
            made.ignored_fields = [*tally.asked.ignored]
        return made

    def _choice(self, choice: Choice) -> CompletionChoice:
        """Make a whole choice: the part known before its first token, and everything after it."""
        sample, made = choice.sample, self._beginning(choice)
        made.text += sample.text
        if self._extras.logprobs:
            own = self._scored(choice, sample.tokens, sample.logprobs, choice.texts(sample.tokens))
            made.logprobs = own if made.logprobs is None else made.logprobs.followed_by(own)
        made.finish_reason, made.stop_reason = choice.finish_reason, choice.stop_reason
        if self._extras.token_ids:
            made.token_ids = sample.tokens
        return made

    # A stream.

    def chunks(self, event: TokenEvent) -> Iterator[bytes]:
        choice = self._tally.choice_of(event)
        if not choice.begun:
            choice.begun = True
            if self._tells_prompt or self._tally.remarks:
                first = self._beginning(choice).model_dump(exclude_unset=True)
                yield sse.chunk(self._head, self._tally.first_chunk({"choices": [first]}))
        self._tally.add(event)
        texts = choice.texts(event.tokens) if self._extras.texts else []
        part = self._part(choice, event, texts)
        if part is not None:
            yield sse.chunk(self._head, self._tally.next_chunk({"choices": [part]}, choice, event, texts))

    def _part(self, choice: Choice, event: TokenEvent, texts: list[str]) -> Fields | None:
        """Make the choice in the chunk of an event. None: the event needs no chunk."""
        ends = event.finish is not None
        if not (event.text or ends or (event.tokens and self._extras.tokens)):
            return None
        made: Fields = {"index": choice.index, "text": event.text, "logprobs": None, "finish_reason": None}
        if event.logprobs and self._extras.logprobs:
            made["logprobs"] = self._scored(choice, event.tokens, event.logprobs, texts)
        if self._extras.token_ids:
            made["token_ids"] = event.tokens
        if ends:
            made["finish_reason"], made["stop_reason"] = choice.finish_reason, choice.stop_reason
        return made

    def end(self) -> Iterator[bytes]:
        if self._extras.usage:
            yield sse.chunk(self._head, {"choices": [], "usage": self._tally.usage()})
        yield sse.DONE

    def fail(self, error: ErrorDetail) -> list[bytes]:
        return sse.error_chunks(error)

    # Both.

    def _beginning(self, choice: Choice) -> CompletionChoice:
        """Make the part of a choice that is known before its first token: with echo, the prompt."""
        made = CompletionChoice(index=choice.index, text="", logprobs=None, finish_reason=None)
        asked, scores = self._tally.asked, self._tally.prompt_logprobs.get(choice.prompt)
        prompt = asked.requests[choice.prompt].prompt
        if self._echo:
            given = asked.prompts[choice.prompt]
            made.text = self._tokenizer.decode(prompt) if given is None else given
        if self._echo and self._extras.logprobs and scores is not None:
            decoder = IncrementalDecoder(self._tokenizer)
            made.logprobs = self._scored(choice, prompt, scores, [decoder.push(token) for token in prompt])
        choice.offset = len(made.text)
        if self._extras.token_ids:
            made.prompt_token_ids, made.token_ids = list(prompt), []
        if self._prompt_scores and scores is not None:
            made.prompt_logprobs = prompt_scores(scores, self._tokenizer)
        return made

    def _scored(
        self, choice: Choice, tokens: Sequence[int], scores: Sequence[Logprob | None], texts: Sequence[str]
    ) -> CompletionLogprobs:
        made = completion_logprobs(tokens, scores, texts, self._tokenizer, offset=choice.offset)
        choice.offset += sum(map(len, texts))
        return made


def completion_logprobs(
    tokens: Sequence[int],
    scores: Sequence[Logprob | None],
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    offset: int,
) -> CompletionLogprobs:
    """Write log-probabilities in OpenAI's old format. The first token of a prompt has no score.

    `texts`: the text that each token adds; the first begins at character `offset`."""
    made = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token, score, text in zip(tokens, scores, texts, strict=True):
        made.tokens.append(token_name(token, tokenizer))
        made.text_offset.append(offset)
        made.token_logprobs.append(None if score is None else finite(score.logprob))
        made.top_logprobs.append(None if score is None else _alternatives(score, tokenizer))
        offset += len(text)
    return made


def _alternatives(score: Logprob, tokenizer: Tokenizer) -> dict[str, float]:
    """List the best tokens and the token itself, as OpenAI does."""
    pairs = [*score.top, (score.token, score.logprob)]
    return {token_name(token, tokenizer): finite(logprob) for token, logprob in pairs}
