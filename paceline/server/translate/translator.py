"""Translate the bodies of endpoints to requests of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from paceline.chat.tools import Tools, read_tools, spelt_out
from paceline.drafters.prediction import PREDICTION
from paceline.errors import ContextTooLong, InvalidRequest, ModelFileError, UnknownModel
from paceline.llm import LLM
from paceline.server.protocol.llama_cpp import InfillRequest
from paceline.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    FormatOptions,
    Message,
    PredictionOptions,
    RequestPart,
    ResponsesRequest,
    SamplingOptions,
    ignored,
    listed,
)
from paceline.server.settings import Settings
from paceline.server.translate.encoding import characters, off_loop
from paceline.server.translate.fields import (
    biases,
    chat_logprobs,
    chat_tokens,
    check_scores_alone,
    infill_tokens,
    without_stream,
)
from paceline.server.translate.foreign import Foreign
from paceline.server.translate.formats import read_format, text_format
from paceline.server.translate.inputs import (
    content_text,
    response_messages,
    split_beginning,
    split_prompts,
    unused_items,
)
from paceline.server.translate.speculation import read_speculation
from paceline.server.translate.unused import unused_in_schemas, without_mentioned
from paceline.text.fim import FillIn
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
    cut: bool = False  # the prompt lacks a part of what was sent, for it would not have fitted


@dataclass(frozen=True, slots=True)
class Translator:
    llm: LLM
    model: str
    settings: Settings
    tenant: str = ""  # on whose behalf requests are made
    must_fit: bool = True  # False: max_tokens beyond the context is no error; the answer ends there
    bounded: bool = True  # refuse texts that cannot fit into the context, and read no more of them than shows that

    # One endpoint each.

    async def chat(self, body: ChatRequest, id: str) -> Translation:
        self.check_model(body.model)
        for name in ("chat_template", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise InvalidRequest(
                    f"{name} is refused: the template is the model's own; leave the field out", param=name
                )
        self.check_capacity(1, body.n)
        tools = self._tools(body, body.response_format, "response_format")
        grammar = await self._grammar(body.response_format, tools, "response_format")
        max_tokens, unused = chat_tokens(body)
        sampling = self._sampling(body, max_tokens=max_tokens, logprobs=chat_logprobs(body), grammar=grammar)
        prompt = await self.encode_messages(body.messages, tools=tools, continued=bool(body.continue_final_message))
        unused += [*without_stream(body), *await _unused(body, tools)]
        return await self._translation(body, id, [prompt], sampling, tools=tools, unused=unused)

    async def completion(self, body: CompletionRequest, id: str) -> Translation:
        self.check_model(body.model)
        prompts = split_prompts(body.prompt, may_be_empty=bool(body.suffix))
        self.check_capacity(len(prompts), body.n)
        if body.suffix and body.echo:
            raise InvalidRequest(
                "echo repeats a prompt, and a text with a suffix has none: leave one out", param="echo"
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
        texts = tuple(prompt if isinstance(prompt, str) else None for prompt in prompts)
        unused = [*without_stream(body), *await _unused(body, None)]
        if body.suffix:
            unused += ["parse_special"] if body.parse_special else []
            filled = [await self.fill_in(prompt, body.suffix, room=self.max_context - 1) for prompt in prompts]
            if any(each.cut for each in filled):
                raise ContextTooLong(
                    f"prompt and suffix do not fit into the context of {self.max_context} tokens: shorten them",
                    param="prompt",
                )
            return await self._fill_ins(body, id, filled, sampling, texts=texts, unused=unused)
        encoded = [await self._encode_prompt(prompt, special=bool(body.parse_special)) for prompt in prompts]
        return await self._translation(body, id, encoded, sampling, texts=texts, unused=unused)

    async def infill(self, body: InfillRequest, id: str) -> Translation:
        self.check_model(body.model)
        if body.seed == -1:  # llama.cpp's word for any seed
            body = body.model_copy(update={"seed": None})
        asked = infill_tokens(body, self.max_context)
        answer = self.max_context // 4 if asked is None else asked
        files = [(file.filename or "file", file.text) for file in body.input_extra or ()]
        before = body.input_prefix + (body.prompt or "")
        filled = await self.fill_in(before, body.input_suffix, files=files, room=max(1, self.max_context - answer))
        sampling = self._sampling(body, max_tokens=asked, logprobs=None, grammar=None)
        if body.temperature is None:
            sampling = replace(sampling, temperature=0.0)
        if body.repeat_penalty is not None and body.repetition_penalty is None:
            sampling = replace(sampling, repetition_penalty=body.repeat_penalty)
        return await self._fill_ins(body, id, [filled], sampling)

    async def response(self, body: ResponsesRequest, id: str) -> Translation:
        self.check_model(body.model)
        if body.previous_response_id is not None:
            raise InvalidRequest(
                "nothing is kept here: send the whole conversation as input", param="previous_response_id"
            )
        tools = self._tools(body, text_format(body), "text.format")
        messages = response_messages(body)
        grammar = await self._grammar(text_format(body), tools, "text.format")
        sampling = self._sampling(body, max_tokens=body.max_output_tokens, logprobs=None, grammar=grammar)
        prompt = await self.encode_messages(messages, tools=tools, field="input")
        unused = [*unused_items(body), *await _unused(body, tools)]
        return await self._translation(body, id, [prompt], sampling, tools=tools, unused=unused)

    async def foreign(self, given: Foreign, id: str) -> Translation:
        """Translate a body of another API. There max_tokens is a bound, and need not fit into the context."""
        lenient, body = replace(self, must_fit=False), given.body
        try:
            made = await (lenient.chat(body, id) if isinstance(body, ChatRequest) else lenient.completion(body, id))
        except InvalidRequest as error:
            raise given.renamed(error) from None
        return replace(made, ignored=tuple(listed(sorted(given.ignored.union(given.in_its_words(made.ignored))))))

    # Parts that several endpoints need.

    @property
    def max_context(self) -> int:
        return self.llm.parts.memory.max_context

    @property
    def _limit(self) -> int | None:
        """Tokens that a text may have."""
        return self.max_context if self.bounded else None

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model and not self.settings.is_alias(name):
            raise UnknownModel(f"the model {name[:100]!r} is not served here; {self.model!r} is")

    def ignored(self, body: RequestPart) -> Iterator[str]:
        """Yield the names of a body's fields that are unknown to the server, and to the template in messages."""
        template = self.llm.tokenizer.chat_template
        return without_mentioned(ignored(body), frozenset() if template is None else self.llm.chat_template.words)

    def check_capacity(self, prompts: int, n: int | None) -> None:
        """Raise InvalidRequest if a request asks for more sequences than an idle server takes, before any is made."""
        running, waiting, asked = self.llm.engine.max_sequences, self.settings.max_waiting, prompts * (n or 1)
        if asked > running + waiting:
            raise InvalidRequest(
                f"{prompts} prompts with {n or 1} answers each are {asked} sequences; this server takes "
                f"{running + waiting} ({running} run, {waiting} wait): ask for fewer at once",
                param="prompt" if prompts > 1 else "n",
            )

    async def encode_messages(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        field: str = "messages",
        add_generation_prompt: bool = True,
        continued: bool = False,
    ) -> tuple[int, ...]:
        """Tokenise a conversation by the model's chat template. `field`: where the messages came from, for errors.

        `continued`: the last message is the beginning of the answer."""
        if not messages:
            raise InvalidRequest(f"{field} is empty; send at least one message", param=field)
        messages, beginning = split_beginning(messages, field) if continued else (messages, "")
        raw: list[Mapping[str, Any]] = [message.model_dump(exclude_unset=True) for message in messages]
        more: Any = {"add_generation_prompt": add_generation_prompt, "continuation": beginning, "limit": self._limit}
        try:
            template = self.llm.chat_template
            if "tool_calls" not in template.source:
                raw = spelt_out(raw)
            placed, listed = (raw, None) if tools is None else tools.place(raw, template.source)
            encoded = await off_loop(
                lambda: template.encode(placed, tools=listed, **more),
                size=characters([placed, listed, beginning]),
            )
        except ContextTooLong as error:
            raise ContextTooLong(str(error), param=field) from None
        except (InvalidRequest, ModelFileError) as error:  # ModelFileError: the sandbox stopped the template
            raise InvalidRequest(str(error), param=getattr(error, "param", None) or field) from None
        return tuple(encoded)

    async def encode_text(
        self, text: str, *, framed: bool = True, special: bool = False, field: str = "prompt"
    ) -> list[int]:
        """Tokenise a text. `framed`: with the token that the model wants a text to begin with, if it wants one.
        `special`: texts of control tokens in it become control tokens. `field`: where it came from, for errors."""
        encode, limit = self.llm.tokenizer.encode, self._limit
        try:
            return await off_loop(lambda: encode(text, special=special, add_bos=framed, limit=limit), size=len(text))
        except ContextTooLong as error:
            raise ContextTooLong(str(error), param=field) from None

    async def fill_in(
        self,
        before: str | Sequence[int],
        behind: str,
        *,
        files: Sequence[tuple[str, str]] = (),
        room: int,
    ) -> FillIn:
        """Make the prompt of a fill-in, by `Tokenizer.fill_in`. What cannot fit into the room is not even tokenised."""
        return await off_loop(
            lambda: self.llm.tokenizer.fill_in(before, behind, files=files, room=room),
            size=len(before) + len(behind) + characters([[*file] for file in files]),
        )

    async def _encode_prompt(self, prompt: str | list[int], *, special: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(await self.encode_text(prompt, special=special))
        if len(prompt) > self.max_context:  # before every id is checked
            raise ContextTooLong(
                f"the prompt has {len(prompt)} tokens; the context holds {self.max_context}: shorten it", param="prompt"
            )
        return tuple(prompt)

    def _tools(self, body: ChatRequest | ResponsesRequest, format: FormatOptions | None, field: str) -> Tools | None:
        """Read the tools of a body, whose answer is a call or has the form of `format`."""
        tools = read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False)
        if tools is None:
            return None
        return tools.written_by(self.llm.chat_template.source, read_format(format, field))

    async def _grammar(self, format: FormatOptions | None, tools: Tools | None, field: str) -> Grammar | None:
        """Find the grammar that the answer must follow, and compile it: up to half a second, off the event loop."""
        form = read_format(format, field)
        if tools is not None and tools.constrained:
            await self._compile(lambda: form, field)  # so that an error is that of the field at fault
            return await self._compile(lambda: tools.grammar, "tools")
        return await self._compile(lambda: form, field)

    async def _compile(self, make: Callable[[], Grammar | None], field: str) -> Grammar | None:
        try:
            grammar = make()
            if grammar is not None:
                await asyncio.to_thread(self.llm.engine.check_grammar, grammar)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param=field) from None
        return grammar

    def _sampling(
        self, body: SamplingOptions, *, max_tokens: int | None, logprobs: int | None, grammar: Grammar | None
    ) -> SamplingParams:
        """Read the sampling fields of a body over the model's own defaults."""
        if max_tokens == 0:
            check_scores_alone(body)
        given = {name: getattr(body, name, None) for name in SAME}
        given |= {name: getattr(body, field) for field, name in RENAMED.items()}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, "logit_bias": biases(body.logit_bias)}
        given["grammar"] = grammar
        given["top_k"] = 0 if body.top_k == -1 else body.top_k
        return replace(self.llm.default_sampling, **{k: v for k, v in given.items() if v is not None})

    async def _fill_ins(
        self, body: SamplingOptions, id: str, filled: Sequence[FillIn], sampling: SamplingParams, **more: Any
    ) -> Translation:
        """Translate fill-ins: they end at their own tokens, and run into the text behind, which is their prediction."""
        if not sampling.ignore_eos:
            sampling = replace(sampling, stop_ids=(*sampling.stop_ids, *sorted(filled[0].ends)))
        prompts = [each.prompt for each in filled]
        made = await self._translation(body, id, prompts, sampling, behind=filled[0].behind[: self.max_context], **more)
        return replace(made, cut=any(each.cut for each in filled))

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
        behind: tuple[int, ...] = (),
    ) -> Translation:
        structured = tools is not None or sampling.grammar is not None
        resolve = partial(self.llm.resolved, prompts=prompts, structured=structured)
        speculation = read_speculation(body.speculation, self.settings, resolve=resolve)
        prediction = await self._prediction(body.prediction, speculation, behind)
        for prompt in prompts if self.must_fit else ():
            self._check_room(prompt, sampling.max_tokens)
        requests = tuple(
            Request(
                id=id if len(prompts) == 1 else f"{id}-{i}",
                prompt=prompt,
                sampling=sampling,
                speculation=speculation,
                cache_salt=body.cache_salt or "",
                tenant=self.tenant,
                deadline=self.settings.request_timeout,
                prediction=prediction,
                kind=self.llm.drafted_kind(prompt, speculation, structured=structured),
            )
            for i, prompt in enumerate(prompts)
        )
        without_effect = [*unused]
        if body.prediction is not None and not prediction:
            without_effect.append("prediction")
        if speculation.p_min is not None and self.llm.parts.target.decoder is not None:
            without_effect.append("speculation.p_min")  # a device drafts for a whole batch at once
        names = listed(chain(without_effect, self.ignored(body)))
        return Translation(id=id, requests=requests, prompts=texts, tools=tools, ignored=tuple(names))

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

    async def _prediction(
        self, options: PredictionOptions | None, speculation: Speculation, behind: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Tokenise the text that the answer may turn out to be; the text `behind` a fill-in if none is given. Empty if
        drafting from it is not allowed."""
        if options is not None and options.type != "content":
            raise InvalidRequest(
                f"the type of prediction must be content, not {options.type[:60]!r}", param="prediction"
            )
        allowed = self.settings.allowed_drafters
        if not speculation.enabled or (allowed and PREDICTION not in allowed):
            return ()
        if options is None:
            return behind
        text = content_text(options.content, "prediction")
        return tuple(await self.encode_text(text, framed=False, field="prediction"))


async def _unused(body: ChatRequest | CompletionRequest | ResponsesRequest, tools: Tools | None) -> list[str]:
    """List names of fields without effect in tools and forms, off the event loop where there are any."""
    form = body.text if isinstance(body, ResponsesRequest) else body.response_format
    given = form is not None or getattr(body, "tools", None)
    return await asyncio.to_thread(unused_in_schemas, body, tools) if given else []
