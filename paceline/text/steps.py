"""The steps of a Hugging Face encoder, read from its own description, and an encoder without one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers


def steps(part: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer, decoder or post-processor, with nested sequences flattened."""
    if part is None:
        return
    todo = [json.loads(part.__getstate__())]
    while todo:
        step = todo.pop(0)
        if step["type"] == "Sequence":
            todo = step[key] + todo
        else:
            yield step


def without_leading_space(encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the encoder, or a copy of it that puts no space before a text."""
    normal = list(steps(encoder.normalizer, "normalizers"))
    words = list(steps(encoder.pre_tokenizer, "pretokenizers"))
    prepends = any(step["type"] == "Prepend" for step in normal)
    spaces = [step for step in words if step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"]
    if not prepends and not spaces:
        return encoder
    copy = tokenizers.Tokenizer.from_str(encoder.to_str())
    copy.encode_special_tokens = True
    if prepends:
        kept = [normalizers.Replace(" ", step["content"]) for step in normal if step["type"] == "Replace"]
        copy.normalizer = normalizers.Sequence(kept)
    if spaces:
        copy.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=spaces[0]["replacement"], prepend_scheme="never", split=spaces[0].get("split", True)
        )
    return copy
