"""Translate the bodies of endpoints to requests of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.chat.tools import Tools, read_tools, spelt_out
from paceline.drafters.prediction import PREDICTION
from paceline.errors import ContextTooLong, InvalidRequest, ModelFileError, UnknownModel
from paceline.llm import LLM
from paceline.server.protocol.requests import (
    MAX_BIASES,
    MAX_TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    FormatOptions,
    Message,
    PredictionOptions,
    ResponsesRequest,
    SamplingOptions,
    ignored,
)
from paceline.server.settings import Settings
from paceline.server.translate.encoding import characters, off_loop
from paceline.server.translate.formats import read_format, text_format
from paceline.server.translate.inputs import content_text, response_messages, split_prompts
from paceline.server.translate.speculation import read_speculation
from paceline.types import Grammar, Request, SamplingParams, Speculation

COMPLETION_TOKENS = 16  # max_tokens of a completion that gives none: OpenAI's default

# SAME: fields with one name in a body and in SamplingParams. RENAMED: field of a body → name in SamplingParams.
SAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "seed",
    "prompt_logprobs",
    "n",
)
RENAMED = {
    "stop": "stop",
    "stop_token_ids": "stop_ids",
    "include_stop_str_in_output": "include_stop",
    "allowed_token_ids": "allowed_tokens",
}


@dataclass(frozen=True, slots=True)
class Translation:
    """One body as the engine's requests, with the facts that its answer needs."""

    id: str
    requests: tuple[Request, ...]  # one a prompt
    prompts: tuple[str | None, ...] = ()  # texts of a completion's prompts; None for token ids
    tools: Tools | None = None
    ignored: tuple[str, ...] = ()  # fields without effect


@dataclass(frozen=True, slots=True)
class Translator:
    llm: LLM
    model: str
    settings: Settings

    # One endpoint each.

    async def chat(self, body: ChatRequest, id: str) -> Translation:
        self.check_model(body.model)
        for name in ("chat_template", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise InvalidRequest(
                    f"{name} is refused: the template is the model's own; leave the field out", param=name
                )
        tools = read_tools(body.tools, body.tool_choice)
        grammar = await self._grammar(body.response_format, tools, "response_format")
        max_tokens, unused = chat_tokens(body)
        sampling = self._sampling(body, max_tokens=max_tokens, logprobs=chat_logprobs(body), grammar=grammar)
        prompt = await self.encode_messages(body.messages, tools=tools)
        unused += without_stream(body)
        return await self._translation(body, id, [prompt], sampling, tools=tools, unused=unused)

    async def completion(self, body: CompletionRequest, id: str) -> Translation:
        self.check_model(body.model)
        if body.suffix:
            raise InvalidRequest(
                "suffix is not supported: text is made forwards only; leave the field out", param="suffix"
            )
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InvalidRequest(
                f"best_of is {body.best_of}; only as many as n can be had: leave the field out", param="best_of"
            )
        max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        grammar = await self._grammar(body.response_format, None, "response_format")
        sampling = self._sampling(body, max_tokens=max_tokens, logprobs=body.logprobs, grammar=grammar)
        if body.echo and body.logprobs is not None and sampling.prompt_logprobs is None:
            sampling = replace(sampling, prompt_logprobs=body.logprobs)
        prompts = split_prompts(body.prompt)
        encoded = [await self._encode_prompt(prompt) for prompt in prompts]
        texts = tuple(prompt if isinstance(prompt, str) else None for prompt in prompts)
        return await self._translation(body, id, encoded, sampling, texts=texts, unused=without_stream(body))

    async def response(self, body: ResponsesRequest, id: str) -> Translation:
        self.check_model(body.model)
        if body.previous_response_id is not None:
            raise InvalidRequest(
                "nothing is kept here: send the whole conversation as input", param="previous_response_id"
            )
        tools = read_tools(body.tools, body.tool_choice)
        messages = response_messages(body)
        grammar = await self._grammar(text_format(body), tools, "text.format")
        sampling = self._sampling(body, max_tokens=body.max_output_tokens, logprobs=None, grammar=grammar)
        prompt = await self.encode_messages(messages, tools=tools, field="input")
        return await self._translation(body, id, [prompt], sampling, tools=tools)

    # Parts that several endpoints need.

    @property
    def max_context(self) -> int:
        return self.llm.parts.memory.max_context

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise UnknownModel(f"the model {name[:100]!r} is not served here; {self.model!r} is")

    async def encode_messages(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        field: str = "messages",
        add_generation_prompt: bool = True,
        bounded: bool = True,
    ) -> tuple[int, ...]:
        """Tokenise a conversation by the model's chat template. `field`: where the messages came from, for errors.

        `bounded`: see `encode_text`."""
        if not messages:
            raise InvalidRequest(f"{field} is empty; send at least one message", param=field)
        raw: list[Mapping[str, Any]] = [message.model_dump(exclude_unset=True) for message in messages]
        limit = self.max_context if bounded else None
        try:
            template = self.llm.chat_template
            if "tool_calls" not in template.source:
                raw = spelt_out(raw)
            placed, listed = (raw, None) if tools is None else tools.place(raw, template.source)
            encoded = await off_loop(
                lambda: template.encode(placed, tools=listed, add_generation_prompt=add_generation_prompt, limit=limit),
                size=characters([placed, listed]),
            )
        except ContextTooLong as error:
            raise ContextTooLong(str(error), param=field) from None
        except (InvalidRequest, ModelFileError) as error:  # ModelFileError: the sandbox stopped the template
            raise InvalidRequest(str(error), param=getattr(error, "param", None) or field) from None
        return tuple(encoded)

    async def encode_text(
        self, text: str, *, framed: bool = True, field: str = "prompt", bounded: bool = True
    ) -> list[int]:
        """Tokenise a text. `framed`: with the token that the model wants a text to begin with, if it wants one.

        `bounded`: raise ContextTooLong for a text that cannot fit into the context, and read no more of it than shows
        that. `field`: where the text came from, for errors."""
        limit = self.max_context if bounded else None
        try:
            return await off_loop(lambda: self.llm.tokenizer.encode(text, add_bos=framed, limit=limit), size=len(text))
        except ContextTooLong as error:
            raise ContextTooLong(str(error), param=field) from None

    async def _encode_prompt(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(await self.encode_text(prompt))
        if len(prompt) > self.max_context:  # before every id is checked
            raise ContextTooLong(
                f"the prompt has {len(prompt)} tokens; the context holds {self.max_context}: shorten it", param="prompt"
            )
        return tuple(prompt)

    async def _grammar(self, format: FormatOptions | None, tools: Tools | None, field: str) -> Grammar | None:
        """Find the grammar that the answer must follow, and compile it: up to half a second, off the event loop."""
        grammar = read_format(format, field)
        if tools is not None and tools.forced:
            if grammar is not None:
                raise InvalidRequest("an answer that must be a call has its own form; leave the field out", param=field)
            grammar, field = tools.grammar, "tools"
        if grammar is not None:
            try:
                await asyncio.to_thread(self.llm.engine.check_grammar, grammar)
            except InvalidRequest as error:
                raise InvalidRequest(str(error), param=field) from None
        return grammar

    def _sampling(
        self, body: SamplingOptions, *, max_tokens: int | None, logprobs: int | None, grammar: Grammar | None
    ) -> SamplingParams:
        """Read the sampling fields of a body over the model's own defaults."""
        given = {name: getattr(body, name, None) for name in SAME}
        given |= {name: getattr(body, field) for field, name in RENAMED.items()}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, "logit_bias": biases(body.logit_bias)}
        given["grammar"] = grammar
        given["top_k"] = 0 if body.top_k == -1 else body.top_k
        return replace(self.llm.default_sampling, **{k: v for k, v in given.items() if v is not None})

    async def _translation(
        self,
        body: SamplingOptions,
        id: str,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        *,
        texts: tuple[str | None, ...] = (),
        tools: Tools | None = None,
        unused: Sequence[str] = (),
    ) -> Translation:
        speculation = read_speculation(body.speculation, self.settings)
        prediction = await self._prediction(body.prediction, speculation)
        for prompt in prompts:
            self._check_room(prompt, sampling.max_tokens)
        requests = tuple(
            Request(
                id=id if len(prompts) == 1 else f"{id}-{i}",
                prompt=prompt,
                sampling=sampling,
                speculation=speculation,
                cache_salt=body.cache_salt or "",
                deadline=self.settings.request_timeout,
                prediction=prediction,
            )
            for i, prompt in enumerate(prompts)
        )
        names = {*ignored(body), *unused}
        if body.prediction is not None and not prediction:
            names.add("prediction")
        if speculation.p_min is not None and self.llm.parts.target.decoder is not None:
            names.add("speculation.p_min")  # has no effect on a device, which drafts for a whole batch at once
        return Translation(id=id, requests=requests, prompts=texts, tools=tools, ignored=tuple(sorted(names)))

    def _check_room(self, prompt: tuple[int, ...], max_tokens: int | None) -> None:
        """Raise ContextTooLong if max_tokens do not fit after the prompt. Admission checks that the prompt itself fits;
        offline, max_tokens beyond the context is no error: the text ends there."""
        room = self.max_context - len(prompt)
        if 0 < room < (max_tokens or 0):
            raise ContextTooLong(
                f"max_tokens is {max_tokens}, but the context of {self.max_context} tokens has room for {room} after "
                f"the prompt's {len(prompt)}: ask for fewer, or shorten the prompt",
                param="max_tokens",
            )

    async def _prediction(self, options: PredictionOptions | None, speculation: Speculation) -> tuple[int, ...]:
        """Tokenise the text that the answer may turn out to be. Empty if drafting from it is not allowed."""
        if options is None:
            return ()
        if options.type != "content":
            raise InvalidRequest(
                f"the type of prediction must be content, not {options.type[:60]!r}", param="prediction"
            )
        allowed = self.settings.allowed_drafters
        if not speculation.enabled or (allowed and PREDICTION not in allowed):
            return ()
        text = content_text(options.content, "prediction")
        return tuple(await self.encode_text(text, framed=False, field="prediction"))


def chat_tokens(body: ChatRequest) -> tuple[int | None, list[str]]:
    """Find how many tokens an answer may have, and the fields that have no effect on it."""
    old, new = body.max_tokens, body.max_completion_tokens
    if new is None:
        return old, []
    return new, ["max_tokens"] if old is not None and old != new else []


def chat_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, not {top}", param="top_logprobs")
    if top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if body.logprobs else None


def without_stream(body: ChatRequest | CompletionRequest) -> list[str]:
    """Name `stream_options` if it was given for an answer that is not streamed."""
    return ["stream_options"] if body.stream_options is not None and not body.stream else []


def biases(given: dict[str, float] | None) -> dict[int, float] | None:
    """Read logit_bias, whose keys are token ids as text."""
    if given is None:
        return None
    if len(given) > MAX_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(given)} entries; at most {MAX_BIASES} are allowed", param="logit_bias"
        )
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(f"a logit_bias key must be a token id, not {key[:60]!r}", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}
