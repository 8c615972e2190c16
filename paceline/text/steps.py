"""The steps of a Hugging Face encoder, read from its own description."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


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
