"""From what a client asks to what the engine does: bodies of `protocol` to `Request`s.

Everything that can be wrong with a request and is not a matter of types is said here, or by what is called from here,
before the engine has heard of it. Nothing is changed silently: what has no effect is listed in `ignored_fields`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from paceline.chat.tools import Tools, read_tools, spelt_out
from paceline.drafters.prediction import PREDICTION
from paceline.errors import ContextTooLong, InvalidRequest, ModelFileError, UnknownModel, UnknownOption
from paceline.llm import LLM
from paceline.server.protocol import (
    MAX_BIASES,
    MAX_TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FormatOptions,
    InputItem,
    Message,
    PredictionOptions,
    ResponsesRequest,
    SamplingOptions,
    SpeculationOptions,
    ignored,
)
from paceline.server.settings import Settings
from paceline.types import THRESHOLDS, Grammar, Request, Rule, SamplingParams, Speculation

T = TypeVar("T")

COMPLETION_TOKENS = 16  # of a completion whose length nobody gave: OpenAI's default
MAX_PROMPTS = 256  # in one request
LONG = 20_000  # characters from which tokenising is taken off the event loop

# Fields of a body whose name and meaning are those of SamplingParams, and those with another name.
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
class Asked:
    """A body, understood: what the engine gets, and what the answer must know of it."""

    id: str
    requests: tuple[Request, ...]  # one a prompt
    prompts: tuple[str | None, ...] = ()  # as text, where they came so
    tools: Tools | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Translator:
    llm: LLM
    model: str
    settings: Settings

    async def chat(self, body: ChatRequest, id: str) -> Asked:
        self.check_model(body.model)
        for name in ("chat_template", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise InvalidRequest(
                    f"{name} is refused: the template is the model's own; leave the field out", param=name
                )
        tools = read_tools(body.tools, body.tool_choice)
        grammar = await self._grammar(body.response_format, tools, "response_format")
        asked, extra = chat_tokens(body)
        sampling = self._sampling(body, max_tokens=asked, logprobs=chat_logprobs(body), grammar=grammar)
        prompt = await self.encode_messages(body.messages, tools=tools)
        return await self._asked(body, id, [prompt], sampling, tools=tools, extra=[*extra, *without_stream(body)])

    async def completion(self, body: CompletionRequest, id: str) -> Asked:
        self.check_model(body.model)
        if body.suffix:
            raise InvalidRequest(
                "suffix is not supported: text is made forwards only; leave the field out", param="suffix"
            )
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InvalidRequest(
                f"best_of is {body.best_of}; only as many as n can be had: leave the field out", param="best_of"
            )
        tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        grammar = await self._grammar(body.response_format, None, "response_format")
        sampling = self._sampling(body, max_tokens=tokens, logprobs=body.logprobs, grammar=grammar)
        if body.echo and body.logprobs is not None and sampling.prompt_logprobs is None:
            sampling = replace(sampling, prompt_logprobs=body.logprobs)
        prompts = split_prompts(body.prompt)
        encoded = [await self._encode_prompt(prompt) for prompt in prompts]
        texts = tuple(prompt if isinstance(prompt, str) else None for prompt in prompts)
        return await self._asked(body, id, encoded, sampling, texts=texts, extra=without_stream(body))

    async def response(self, body: ResponsesRequest, id: str) -> Asked:
        self.check_model(body.model)
        if body.previous_response_id is not None:
            raise InvalidRequest(
                "nothing is kept here: send the whole conversation as input", param="previous_response_id"
            )
        tools = read_tools(body.tools, body.tool_choice)
        messages = [*response_instructions(body), *response_messages(body)]
        grammar = await self._grammar(text_format(body), tools, "text.format")
        sampling = self._sampling(body, max_tokens=body.max_output_tokens, logprobs=None, grammar=grammar)
        prompt = await self.encode_messages(messages, tools=tools, field="input")
        return await self._asked(body, id, [prompt], sampling, tools=tools)

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
    ) -> tuple[int, ...]:
        if not messages:
            raise InvalidRequest(f"{field} is empty; send at least one message", param=field)
        raw: list[Mapping[str, Any]] = [message.model_dump(exclude_unset=True) for message in messages]
        try:
            template = self.llm.chat_template
            if "tool_calls" not in template.source:
                raw = spelt_out(raw)
            placed, listed = (raw, None) if tools is None else tools.place(raw, template.source)
            encoded = await _off_loop(
                lambda: template.encode(placed, tools=listed, add_generation_prompt=add_generation_prompt),
                size=_size([placed, listed]),
            )
        except (InvalidRequest, ModelFileError) as error:  # the latter: the template did what it may not
            raise InvalidRequest(str(error), param=getattr(error, "param", None) or field) from None
        return tuple(encoded)

    async def encode_text(self, text: str, *, framed: bool = True) -> list[int]:
        """`framed`: with the token that the model wants a text to begin with, if it wants one."""
        return await _off_loop(lambda: self.llm.tokenizer.encode(text, add_bos=framed), size=len(text))

    async def _encode_prompt(self, prompt: str | list[int]) -> tuple[int, ...]:
        return tuple(await self.encode_text(prompt) if isinstance(prompt, str) else prompt)

    async def _grammar(self, format: FormatOptions | None, tools: Tools | None, field: str) -> Grammar | None:
        """What the answer must look like. Compiling takes up to half a second: not on the event loop."""
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
        given = {name: getattr(body, name, None) for name in SAME}
        given |= {name: getattr(body, wire) for wire, name in RENAMED.items()}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, "logit_bias": biases(body.logit_bias)}
        given["grammar"] = grammar
        given["top_k"] = 0 if body.top_k == -1 else body.top_k
        return replace(self.llm.default_sampling, **{k: v for k, v in given.items() if v is not None})

    async def _asked(
        self,
        body: SamplingOptions,
        id: str,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        *,
        texts: tuple[str | None, ...] = (),
        tools: Tools | None = None,
        extra: Sequence[str] = (),
    ) -> Asked:
        speculation = self._speculation(body.speculation)
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
        unused = ["prediction"] if body.prediction is not None and not prediction else []
        if speculation.p_min is not None and self.llm.parts.target.decoder is not None:
            unused.append("speculation.p_min")  # a device drafts for a whole batch at once
        names = tuple(sorted({*ignored(body), *unused, *extra}))
        return Asked(id=id, requests=requests, prompts=texts, tools=tools, ignored=names)

    def _check_room(self, prompt: tuple[int, ...], max_tokens: int | None) -> None:
        room = self.max_context - len(prompt)
        if 0 < room < (max_tokens or 0):  # a prompt without room is the engine's to refuse
            raise ContextTooLong(
                f"max_tokens is {max_tokens}, but the context of {self.max_context} tokens has room for {room} after "
                f"the prompt's {len(prompt)}: ask for fewer, or shorten the prompt",
                param="max_tokens",
            )

    async def _prediction(self, options: PredictionOptions | None, speculation: Speculation) -> tuple[int, ...]:
        """What the answer may turn out to be; empty where nobody may draft from it."""
        if options is None:
            return ()
        if options.type != "content":
            raise InvalidRequest(
                f"the type of prediction must be content, not {options.type[:60]!r}", param="prediction"
            )
        allowed = self.settings.allowed_drafters
        if not speculation.enabled or (allowed and PREDICTION not in allowed):
            return ()
        return tuple(await self.encode_text(content_text(options.content, "prediction"), framed=False))

    def _speculation(self, options: SpeculationOptions | None) -> Speculation:
        if options is None:
            options = SpeculationOptions.model_validate({})
        self._check_allowed(options)
        rule = _rule(options.rule or self.settings.default_rule)
        return Speculation(
            enabled=options.enabled is not False,
            drafter=options.drafter,
            max_draft=options.max_draft,
            rule=rule,
            threshold=options.threshold if rule.lossless else self._threshold(options, rule),
            p_min=options.p_min,
        )

    def _threshold(self, options: SpeculationOptions, rule: Rule) -> float:
        """Of a lossy rule: what is asked for, or the server's where it has one for this rule, or the rule's own."""
        if options.threshold is not None:
            return options.threshold
        settings = self.settings
        own = settings.default_threshold if rule == settings.default_rule else None
        return max(own or THRESHOLDS[rule], settings.allowed_threshold)

    def _check_allowed(self, options: SpeculationOptions) -> None:
        settings, most = self.settings, self.settings.allowed_max_draft
        for name in ("threshold", "p_min"):
            asked, least = getattr(options, name), getattr(settings, f"allowed_{name}")
            if asked is not None and asked < least:
                raise InvalidRequest(
                    f"{name} is {asked:g}; this server allows no less than {least:g}", param=f"speculation.{name}"
                )
        if most is not None and options.max_draft is not None and options.max_draft > most:
            raise InvalidRequest(
                f"max_draft is {options.max_draft}; this server allows up to {most}", param="speculation.max_draft"
            )
        for name, given, allowed in (
            ("rule", options.rule, settings.allowed_rules),
            ("drafter", options.drafter, settings.allowed_drafters),
        ):
            if given is not None and allowed and given not in allowed:
                names = ", ".join(allowed)
                raise InvalidRequest(
                    f"the {name} {given[:60]!r} is not allowed here; allowed: {names}", param=f"speculation.{name}"
                )


def content_text(content: str | Sequence[ContentPart], field: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text" or part.text is None:
            raise InvalidRequest(f"the parts of {field} must be of type text, not {part.type[:60]!r}", param=field)
    return "".join(part.text or "" for part in content)


def chat_tokens(body: ChatRequest) -> tuple[int | None, list[str]]:
    """How many tokens an answer may have, and the name of the field that had no say."""
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
    return ["stream_options"] if body.stream_options is not None and not body.stream else []


def split_prompts(prompt: str | Sequence[Any]) -> list[str | list[int]]:
    """A text, token ids, or a list of either, as a list of prompts."""
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else [*prompt]
    if not prompts or not all(prompts):
        raise InvalidRequest("the prompt is empty; give a text, or at least one token id", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(
            f"{len(prompts)} prompts in one request; at most {MAX_PROMPTS} are allowed", param="prompt"
        )
    return prompts


def biases(given: dict[str, float] | None) -> dict[int, float] | None:
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


def read_format(format: FormatOptions | None, field: str = "response_format") -> Grammar | None:
    """The grammar of an answer of this form; None: any text."""
    if format is None or format.type == "text":
        return None
    try:
        if format.type == "json_object":
            return Grammar.json_object()
        if format.type == "json_schema":
            return Grammar.json_schema(_schema(format, field))
        if format.type == "regex":
            return Grammar.regex(_pattern(format, field))
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=field) from None
    known = "text, json_object, json_schema or regex"
    raise InvalidRequest(f"the type of {field} must be {known}, not {format.type[:60]!r}", param=field)


def _schema(format: FormatOptions, field: str) -> dict[str, Any]:
    schema = (format.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f'{field} of type json_schema needs a schema: {{"name": …, "schema": {{…}}}}', param=field)
    return schema


def _pattern(format: FormatOptions, field: str) -> str:
    if not format.pattern:
        raise InvalidRequest(f"{field} of type regex needs a pattern", param=field)
    return format.pattern


def text_format(body: ResponsesRequest) -> FormatOptions | None:
    """The form of the answer, which /v1/responses nests and flattens differently."""
    given = body.text.format if body.text is not None else None
    if given is None:
        return None
    kind = given.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest("text.format needs a type: text, json_object, json_schema or regex", param="text.format")
    schema = {name: value for name, value in given.items() if name != "type"} if kind == "json_schema" else None
    pattern = given.get("pattern")
    return FormatOptions(type=kind, json_schema=schema, pattern=pattern if isinstance(pattern, str) else None)


def response_instructions(body: ResponsesRequest) -> list[Message]:
    return [] if body.instructions is None else [Message(role="system", content=body.instructions)]


def response_messages(body: ResponsesRequest) -> list[Message]:
    if isinstance(body.input, str):
        if not body.input:
            raise InvalidRequest("input is empty; send a text or a list of messages", param="input")
        return [Message(role="user", content=body.input)]
    if not body.input:
        raise InvalidRequest("input is empty; send a text or a list of messages", param="input")
    messages: list[Message] = []
    for i, item in enumerate(body.input):
        if item.type == "function_call":
            _add_call(messages, item, f"input[{i}]")
        else:
            messages.append(_input_message(item, f"input[{i}]"))
    return messages


def _input_message(item: InputItem, where: str) -> Message:
    if item.type == "function_call_output":
        if item.output is None or item.call_id is None:
            raise InvalidRequest(f"{where} is what came of a call: it needs call_id and output", param="input")
        return Message.model_validate(
            {"role": "tool", "content": _response_content(item.output), "tool_call_id": item.call_id}
        )
    if item.type not in (None, "message") or item.role is None:
        known = "a message with a role and content, a function_call or a function_call_output"
        raise InvalidRequest(f"{where} must be {known}; nothing else is supported", param="input")
    return Message(role=item.role, content=_response_content(item.content))


def _add_call(messages: list[Message], item: InputItem, where: str) -> None:
    """A call is a part of what the assistant said last, as a chat has it."""
    if item.name is None or item.call_id is None:
        raise InvalidRequest(f"{where} is a call: it needs name, arguments and call_id", param="input")
    call = {
        "id": item.call_id,
        "type": "function",
        "function": {"name": item.name, "arguments": item.arguments or "{}"},
    }
    said = messages.pop() if messages and messages[-1].role == "assistant" else Message(role="assistant", content=None)
    calls = [*(said.model_extra or {}).get("tool_calls", ()), call]
    messages.append(Message.model_validate(said.model_dump(exclude_unset=True) | {"tool_calls": calls}))


def _response_content(content: Any) -> Any:
    """Parts are called input_text and output_text here, and text by everybody else."""
    if not isinstance(content, list):
        return content
    renamed = [part.model_copy() for part in content]
    for part in renamed:
        if part.type in ("input_text", "output_text"):
            part.type = "text"
    return renamed


def _rule(name: str) -> Rule:
    if name not in list(Rule):
        raise UnknownOption("rule", name[:60], [rule.value for rule in Rule], param="rule")
    return Rule(name)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 1


async def _off_loop(work: Callable[[], T], *, size: int) -> T:
    """Short work at once, long work on a thread, where it stalls nobody's stream."""
    return work() if size < LONG else await asyncio.to_thread(work)
