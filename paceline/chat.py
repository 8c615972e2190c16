"""Messages to the prompt a model was trained on, through the chat template that comes with it.

Control tokens that the template writes become control tokens; the same characters in a message stay text. Before
rendering, characters of messages that could take part in a control token's text are swapped for private marks, one for
one, so that lengths and positions stay; afterwards the control tokens in the rendered text are the template's own, and
the marks are swapped back. Ordinary messages hold no such text and are rendered untouched.

The template is the model's, never a request's. How it is kept harmless stands in chat_sandbox.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError

from paceline.chat_budget import TooExpensive
from paceline.chat_messages import Message, check_json, check_messages, check_tools
from paceline.chat_sandbox import MAX_SOURCE, Refused, Sandbox
from paceline.errors import InvalidRequest, ModelFileError
from paceline.tokenizer import Tokenizer

# What evaluating an expression can raise, template bugs and unexpected messages alike.
_RUN_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        source = tokenizer.chat_template if source is None else source
        if source is None:
            raise InvalidRequest("this model has no chat template; send a plain prompt instead of messages")
        self.source = source
        self._tokenizer = tokenizer
        self._shield = _Shield(tokenizer, source)
        self._render = _compile(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text."""
        inputs = self._inputs(messages, tools, variables)
        return self._run(inputs, add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt as token ids."""
        inputs = self._inputs(messages, tools, variables)
        hidden, back = self._shield.hide(inputs)
        text = self._run(hidden, add_generation_prompt)
        return self._tokenizer.encode_spans(text.translate(back), self._tokenizer.find_control(text))

    def _inputs(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        reserved = {"messages", "tools", "documents", "add_generation_prompt", *self._tokenizer.token_names}
        if clash := sorted(reserved.intersection(variables or {})):
            raise InvalidRequest(f"chat template variables cannot be named {', '.join(clash)}; these names are taken")
        inputs = {**(variables or {}), "messages": check_messages(messages), "tools": check_tools(tools)}
        return {name: check_json(value, name) for name, value in inputs.items()}

    def _run(self, inputs: dict[str, Any], add_generation_prompt: bool) -> str:
        names = {"documents": None, **self._tokenizer.token_names}
        size = sum(map(len, _strings(inputs)))
        try:
            return self._render({**names, **inputs, "add_generation_prompt": add_generation_prompt}, size)
        except Refused as error:
            raise InvalidRequest(f"the model's chat template does not take these messages: {error}") from None
        except (TooExpensive, SecurityError, RecursionError, MemoryError) as error:
            raise ModelFileError(f"the model's chat template was stopped: {error}") from None
        except _RUN_ERRORS as error:
            raise InvalidRequest(
                f"the model's chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The messages as a prompt of the tokenizer's model, by its own template."""
    return _template_of(tokenizer).encode(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
    )


@lru_cache(maxsize=4)  # compiling takes milliseconds, rendering a fraction of one
def _template_of(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def _compile(source: str) -> Callable[[Mapping[str, Any], int], str]:
    if len(source) > MAX_SOURCE:
        raise ModelFileError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed")
    try:
        return Sandbox().compiled(source)
    except (*_RUN_ERRORS, SyntaxError, TooExpensive, RecursionError, MemoryError) as error:
        raise ModelFileError(f"the model's chat template cannot be used: {type(error).__name__}: {error}") from error


# ── keeping control tokens out of messages ──


class _Shield:
    """Swaps characters of users' strings so that no control token can be read out of them, nor out of two in a row.

    A control token that is spelt by user text has its first character in a string that ends inside the token or holds
    all of it, or its last in a string that begins inside it: those characters are swapped.
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        texts = tokenizer.control_texts
        self._find = tokenizer.find_control
        self._source = source
        # A head or tail that is a mere word ("user") must stay, as templates compare by it.
        self._heads = frozenset(text[:n] for text in texts if not text[0].isalnum() for n in range(1, len(text)))
        self._tails = frozenset(text[-n:] for text in texts if not text[-1].isalnum() for n in range(1, len(text)))
        self._longest = max(map(len, texts), default=0)
        self._edges = {text[0] for text in texts} | {text[-1] for text in texts}

    def hide(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[int, str]]:
        """The inputs with marks in them, and what swaps the marks back."""
        if not any(self._positions(text) for text in _strings(inputs)):
            return inputs, {}
        marks = self._marks(inputs)
        hidden = {name: _map_strings(value, lambda text: self._mark(text, marks)) for name, value in inputs.items()}
        return hidden, {ord(mark): character for character, mark in marks.items()}

    def _marks(self, inputs: dict[str, Any]) -> dict[str, str]:
        taken = set(self._source).union(*_strings(inputs))
        free = (mark for mark in map(chr, range(0x10FFFD, 0x10FF00, -1)) if mark not in taken)
        marks = dict(zip(sorted(self._edges), free, strict=False))
        if len(marks) < len(self._edges):
            raise InvalidRequest("the messages use up the private characters U+10FF00 to U+10FFFD; leave some out")
        return marks

    def _mark(self, text: str, marks: Mapping[str, str]) -> str:
        characters = list(text)
        while positions := self._positions("".join(characters)):
            for at in positions:
                characters[at] = marks[characters[at]]
        return "".join(characters)

    def _positions(self, text: str) -> set[int]:
        if self._edges.isdisjoint(text):
            return set()
        found: set[int] = set()
        for start, end, _ in self._find(text):
            found.update(at for at in range(start, end) if text[at] in self._edges)
        left, right = len(text) - len(text.lstrip()), len(text.rstrip())  # templates trim
        for length in range(1, self._longest):
            if text[right - length : right] in self._heads and length <= right:
                found.add(right - length)
            if text[left : left + length] in self._tails and left + length <= len(text):
                found.add(left + length - 1)
        return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return [_map_strings(item, change) for item in value] if isinstance(value, list) else value
