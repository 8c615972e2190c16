"""What a training asks of prompt files: one text a prompt, and where it is from, for the model card.

How files look and what is wrong with a line is the business of `paceline.prompts.files`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.prompts.files import Prompt, read_file


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts that are a user's text and nothing else: more could not be asked of the target as it was meant."""
    prompts = read_file(path)
    for prompt in prompts:
        if len(prompt.messages) != 1:
            found = "the tokens of a recorded request" if prompt.tokens else "messages before the user's"
            raise InvalidRequest(f"{prompt.where}: holds {found}; give the user's text alone, or remove the line")
    return prompts


def read_texts(path: Path) -> list[str]:
    """Every text that a set asks: all turns of its questions."""
    return [text for prompt in read_prompts(path) for text in (prompt.text, *prompt.later)]


def sources(prompts: Iterable[Prompt]) -> list[tuple[str, str, int]]:
    """Source, licence and number of prompts, the most first."""
    counts = Counter((prompt.source, prompt.license) for prompt in prompts)
    return [(source, license, count) for (source, license), count in counts.most_common()]
