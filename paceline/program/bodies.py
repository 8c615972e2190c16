"""Bodies of HTTP requests for the calls of a program, and the fields that only some servers know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paceline.errors import InvalidRequest
from paceline.program.expressions import Gen
from paceline.program.prompt import Prompt
from paceline.types import Grammar, Speculation

# Names of sampling parameters that a body spells in another way.
RENAMED = {
    "stop_ids": "stop_token_ids",
    "include_stop": "include_stop_str_in_output",
    "allowed_tokens": "allowed_token_ids",
}
# Fields that every OpenAI server knows; others are Paceline's.
OPENAI = {
    *("prompt", "messages", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "stop", "seed", "stream", "stream_options", "response_format", "prediction"),
}
SPECIAL_CHARACTERS = re.compile(r"[\\.+*?()|\[\]{}^$]")  # of regular expressions
Body = dict[str, Any]


def gen_body(ask: Gen, prompt: Prompt, *, seed: int, cache_salt: str = "") -> tuple[str, Body]:
    """Return the path and the body of a generation, which is streamed."""
    if "logprobs" in ask.sampling:
        raise InvalidRequest(
            "logprobs of a gen are not read from a Remote: run the program on an LLM", param="logprobs"
        )
    path, body = _beginning(prompt, cache_salt)
    for name, value in ask.sampling.items():
        if name == "grammar":
            body["response_format"] = _format(value)
        elif name == "logit_bias":
            body[name] = {str(token): bias for token, bias in value.items()}
        else:
            body[RENAMED.get(name, name)] = value
    body |= {"seed": seed, "stream": True, "stream_options": {"include_usage": True}}
    if ask.speculation != Speculation():
        body["speculation"] = _changed(ask.speculation)
    if ask.prediction is not None:
        body["prediction"] = {"type": "content", "content": ask.prediction}
    return path, body


def score_body(prompt: Prompt, *, cache_salt: str = "") -> tuple[str, Body]:
    """Return the path and the body of a request that scores a text. Its one token is thrown away."""
    path, body = _beginning(prompt, cache_salt)
    return path, body | {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}


def check_fields(body: Mapping[str, Any], *, ours: bool, root: str, besides: tuple[str, ...] = ()) -> None:
    """Raise for a field that a server might ignore. `ours`: it is one of Paceline's, which knows all of them."""
    if ours:
        return
    form = (body.get("response_format") or {}).get("type")
    names = ["a regex or choices"] if form == "regex" else []
    names += [name for name in body if name not in OPENAI and name not in besides]
    if names:
        raise InvalidRequest(
            f"{', '.join(names)}: {root} is no server of Paceline's and may not know that; leave it out, or run the "
            "program on an LLM or a server of Paceline's",
            param=names[0],
        )


def _beginning(prompt: Prompt, cache_salt: str) -> tuple[str, Body]:
    salt = {"cache_salt": cache_salt} if cache_salt else {}
    if not prompt.messages:
        return "/v1/completions", {"prompt": prompt.text, **salt}
    messages = [*prompt.messages]
    if not prompt.text:
        return "/v1/chat/completions", {"messages": messages, **salt}
    messages.append({"role": "assistant", "content": prompt.text})
    return "/v1/chat/completions", {"messages": messages, "continue_final_message": True, **salt}


def _format(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "json_object":
        return {"type": "json_object"}
    if grammar.kind == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(grammar.text)}}
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    if grammar.kind == "choice":
        texts = [SPECIAL_CHARACTERS.sub(r"\\\g<0>", text) for text in json.loads(grammar.text)]
        return {"type": "regex", "pattern": "|".join(texts)}
    raise InvalidRequest(f"a grammar of kind {grammar.kind} cannot be asked of a Remote: use regex or schema")


def _changed(speculation: Speculation) -> dict[str, Any]:
    """Return the fields that differ from the usual ones, as JSON has them."""
    usual = Speculation()
    given = {field.name: getattr(speculation, field.name) for field in fields(speculation)}
    changed = {
        name: str(value) if name in ("rule", "threshold") and not isinstance(value, float) else value
        for name, value in given.items()
        if value != getattr(usual, name)
    }
    if speculation.target_tpot is not None:
        changed["target_tpot_ms"] = 1000 * changed.pop("target_tpot")
    return changed
