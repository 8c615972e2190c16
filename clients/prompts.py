"""Requests of many kinds whose answers can be compared: what is asked, how it is sampled, and the text that came."""

from __future__ import annotations

from typing import Any

from wire import Answer

TOPICS = ("rain", "bees", "bread", "clocks", "rivers", "paper", "glass", "salt", "trains", "maps", "moss", "tides")
FORMS = (
    "Write a short note about {}.",
    "Repeat after me, three times: {0}, {0} and {0}.",
    "List five facts about {}, numbered.",
    "Complete this code:\ndef count_{0}(items):\n    total = 0\n    for item in items:\n",
    'Give JSON with the keys "name", "kind" and "size" for three sorts of {}.',
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.1},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "presence_penalty": 0.3},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {"28": -2}},
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(index: int, *, tokens: int) -> tuple[str, dict[str, Any]]:
    """The path and the body of one request; no two of the first 300 are the same. Every other one is a chat."""
    question = FORMS[index % len(FORMS)].format(TOPICS[index // len(FORMS) % len(TOPICS)])
    fields = {"max_tokens": tokens, "seed": index, **SAMPLING[index // 3 % len(SAMPLING)]}
    if index % 2:
        return CHAT, {"messages": [{"role": "user", "content": question}], **fields}
    return COMPLETIONS, {"prompt": question, "min_tokens": 8, **fields}


def said(answer: Answer) -> tuple[str, str]:
    """The text and how it ended, streamed or not. Raises where it did not end exactly once, and well."""
    if answer.status != 200 or not answer.whole:
        raise AssertionError(f"status {answer.status}, whole: {answer.whole}: {answer.body[-300:]!r}")
    if answer.headers["content-type"].startswith("application/json"):
        [choice] = answer.json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return text, choice["finish_reason"]
    choices = [choice for event in answer.events() for choice in event["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if len(ends) != 1 or answer.body.count(b"data: [DONE]") != 1:
        raise AssertionError(f"a stream ends once, not {ends}: {answer.body[-300:]!r}")
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices), ends[0]
