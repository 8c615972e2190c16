"""Chat templates, from messages to the prompt that a model was trained on. The template comes with the model.

Control tokens that the template writes become control tokens; the same characters in a message stay text (see
chat/shield.py). The template is the model's, never a request's; chat/sandbox.py keeps it harmless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError

from paceline.chat.budget import TooExpensive
from paceline.chat.messages import Message, check_json, check_messages, check_tools
from paceline.chat.sandbox import MAX_SOURCE, Refused, Sandbox
from paceline.chat.shield import Shield, strings, swapped
from paceline.errors import InvalidRequest, ModelFileError
from paceline.text.tokenizer import Tokenizer

# Errors that evaluating an expression can raise, for template bugs and unexpected messages alike.
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
        self._render, literals = _compile(source)
        self._shield = Shield(tokenizer, source, literals)
        self.words = frozenset(re.findall(r"\w+", source))  # a message's field that is not among them has no effect

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the prompt as text."""
        inputs = _inputs(messages, tools)
        return self._run(inputs, add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continuation: str = "",
        limit: int | None = None,
    ) -> list[int]:
        """Render the prompt as token ids. `continuation`: text after it, in which nothing is a control token.

        Raises ContextTooLong once the prompt is known to have more than `limit` tokens."""
        inputs = _inputs(messages, tools)
        hidden, back = self._shield.hide(inputs)
        marked = self._run(hidden, add_generation_prompt)
        # Marks have four bytes each: the size of the text counts, the control tokens of the marked one.
        text = swapped(marked, back) + continuation
        self._tokenizer.check_size(text, limit)
        return self._tokenizer.encode_spans(text, self._tokenizer.find_control(marked), limit=limit)

    def _run(self, inputs: dict[str, Any], add_generation_prompt: bool) -> str:
        names = {"documents": None, **self._tokenizer.token_names}
        size = sum(map(len, strings(inputs)))
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


def _inputs(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Make the variables of a template: messages and tools, checked and copied."""
    inputs = {"messages": check_messages(messages), "tools": check_tools(tools)}
    return {name: check_json(value, name) for name, value in inputs.items()}


def _compile(source: str) -> tuple[Callable[[Mapping[str, Any], int], str], frozenset[str]]:
    """Compile a template. Return a function that renders it, and its string constants."""
    if len(source) > MAX_SOURCE:
        raise ModelFileError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed")
    try:
        sandbox = Sandbox()
        return sandbox.compiled(source), sandbox.literals(source)
    except (*_RUN_ERRORS, SyntaxError, TooExpensive, RecursionError, MemoryError) as error:
        raise ModelFileError(f"the model's chat template cannot be used: {type(error).__name__}: {error}") from error
