"""Sampling that a model's authors advise: from the model's own files, else from a table of well-known families.

Most GGUF files and some directories leave it out, and a small model at temperature 1 answers with nonsense. The table
has only values that the authors publish, in a generation_config.json or on the model's card.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.models.fields import Fields

GENERATION = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")  # generation_config.json
# names in the metadata of a GGUF file → names of GENERATION
GGUF_GENERATION = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


@dataclass(frozen=True, slots=True)
class Advice:
    """Values by the names of GENERATION, and where they come from. Empty: nobody advises anything."""

    values: Mapping[str, float | bool] = field(default_factory=dict)
    source: str = "nobody: no file and no row of Paceline's table says anything"

    def __str__(self) -> str:
        if self.values.get("do_sample") is False:
            return "temperature 0"
        said = {"temperature": 1.0, **self.values}
        return ", ".join(f"{name} {value:g}" for name, value in said.items() if name != "do_sample")


@dataclass(frozen=True, slots=True)
class Family:
    """Advice for the models whose names match both patterns. `tuned` keeps base models out: it is not for them."""

    title: str
    name: str
    tuned: str
    values: Mapping[str, float]


NO_ADVICE = Advice()
FAMILIES = (  # the first match counts
    Family("DeepSeek-R1-Distill", r"deepseek-r1-distill", "", {"temperature": 0.6, "top_p": 0.95}),
    Family("SmolLM2 Instruct", r"smollm2", "instruct", {"temperature": 0.2, "top_p": 0.9}),
    Family(
        "Qwen2 and 2.5 Instruct, up to 1.5B",
        r"qwen2(\.5)?-.*\b(0\.5|1\.5)b\b",
        "instruct",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
    ),
    Family(
        "Qwen2 and 2.5 Instruct",
        r"qwen2(\.5)?-",
        "instruct",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    ),
    Family("Qwen3 Instruct", r"qwen3-", "instruct", {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
    Family("Qwen3", r"qwen3-(?!.*\bbase\b)", "", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    Family("Llama 3 Instruct", r"llama-?3\b", "instruct", {"temperature": 0.6, "top_p": 0.9}),
    Family("Llama 2 Chat", r"llama-?2\b", "chat", {"temperature": 0.6, "top_p": 0.9}),
    Family("TinyLlama Chat", r"tinyllama", "chat", {"temperature": 0.7, "top_p": 0.95, "top_k": 50}),
    Family("Gemma 3", r"gemma-?3\b", r"\bit\b", {"temperature": 1.0, "top_p": 0.95, "top_k": 64}),
    Family("Mistral Nemo Instruct", r"mistral-nemo", "instruct", {"temperature": 0.3}),
    Family("Mistral Small Instruct", r"mistral-small(-3\.\d)?-24b", "instruct", {"temperature": 0.15}),
)


def advice_of_directory(fields: Fields | None, names: Iterable[object]) -> Advice:
    """Advice of a generation_config.json, None if there is none; else of the table, by the model's `names`."""
    values = {} if fields is None else numbers(fields, {key: key for key in GENERATION})
    return Advice(values, "generation_config.json") if values else advice_by_name(names)


def advice_of_gguf(metadata: Mapping[str, object], *, source: str, file_name: str) -> Advice:
    """Advice of a file's metadata, else of the table, by the names in the metadata and that of the file."""
    values = numbers(Fields(metadata, source=source, prefix="general.sampling."), GGUF_GENERATION)
    if values:
        return Advice(values, "the file's metadata (general.sampling)")
    return advice_by_name([*(metadata.get(f"general.{key}") for key in ("basename", "name", "finetune")), file_name])


def advice_by_name(names: Iterable[object]) -> Advice:
    """Look the names of a model up in the table. What is no text is no name."""
    texts = [re.sub(r"[^a-z0-9.]+", "-", name.lower()[:200]) for name in names if isinstance(name, str)]
    for family in FAMILIES:
        if any(re.search(family.name, text) for text in texts) and any(re.search(family.tuned, text) for text in texts):
            return Advice(family.values, f"Paceline's table of what authors advise, row {family.title!r}")
    return NO_ADVICE


def numbers(fields: Fields, keys: Mapping[str, str]) -> dict[str, float | bool]:
    """Read the fields in `keys` that are there, under their new names; ModelFileError where one is no number."""
    found = {new: fields.get(key) for key, new in keys.items() if fields.get(key) is not None}
    for key, value in found.items():
        if type(value) not in (int, float, bool) or not -1e12 <= value <= 1e12:
            raise fields.error(key, f"is {value!r:.100}; allowed: a number")
    return found
