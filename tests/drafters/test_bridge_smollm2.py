"""SmolLM2 with its ids permuted and a tenth of its tokens removed, as its own drafter: counts beside equal ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters import model
from paceline.llm import LLM
from paceline.models.load import LoadedModel, load_model
from paceline.runner.loading.models import ReadyModel
from paceline.text.tokenizer import Tokenizer
from paceline.types import SamplingParams, Speculation
from tests.text.vocabularies import smollm2

QUESTIONS = ("Write a Python function that reverses a string.", "Why is the sky blue? 😀", "List three fruits.")
OPTIONS: dict[str, Any] = {"measure_cost": False, "measure_speedup": False, "max_context": 256, "threads": 1}


def other(*, share: float) -> tuple[ReadyModel, frozenset[int]]:
    """SmolLM2 in other ids, without a share of its tokens: those that no longer token is merged from."""
    loaded = load_model("smollm2", format="fp32")
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in loaded.metadata.items()}
    tokens, merges, kinds = fields["tokens"], fields["merges"], fields["token_type"]
    drawn = np.random.default_rng(0)
    parts = {part for merge in merges for part in merge.split(" ")}
    leaves = [i for i, token in enumerate(tokens) if token not in parts and kinds[i] == 1 and len(token) > 1]
    removed = frozenset(drawn.choice(leaves, int(share * len(tokens)), replace=False).tolist())
    order = [int(i) for i in drawn.permutation(len(tokens)) if i not in removed]
    places = {token: place for place, token in enumerate(order)}
    kept = {tokens[i] for i in order}
    ids = {name: places[int(fields[name])] for name in fields if name.endswith("_token_id")}
    changed = {
        "tokens": [tokens[i] for i in order],
        "token_type": [int(kinds[i]) for i in order],
        "merges": [merge for merge in merges if merge.replace(" ", "") in kept],
        **ids,
    }
    metadata = dict(loaded.metadata) | {f"tokenizer.ggml.{name}": value for name, value in changed.items()}
    rows = torch.tensor(order)
    weights = {
        name: weight[rows] if name in ("embed", "head") else weight  # type: ignore[index]
        for name, weight in loaded.weights.items()
    }
    config = replace(loaded.config, vocab_size=len(order), eos_ids=tuple(places[i] for i in loaded.config.eos_ids))
    return ready(replace(loaded, config=config, weights=weights, metadata=metadata)), removed


def ready(loaded: LoadedModel) -> ReadyModel:
    return ReadyModel("other", loaded, Tokenizer.from_gguf(loaded.metadata), compiled=False, why="in torch")


def counts(
    drafter: ReadyModel, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[int]], int, int]:
    """Texts, drafted and accepted tokens."""
    monkeypatch.setattr(model, "read_model", lambda name, **_: drafter)
    llm = LLM("smollm2", drafter="model:other", device="cpu", **OPTIONS)
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=32)
    speculation = Speculation(drafter="model", max_draft=3, p_min=0.0)
    answers = [
        llm.chat([{"role": "user", "content": question}], sampling, speculation=speculation) for question in QUESTIONS
    ]
    stats = [answer.stats for answer in answers]
    return [list(answer.tokens) for answer in answers], sum(s.drafted for s in stats), sum(s.accepted for s in stats)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_ids_accept_as_equal_ids(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2()  # skips where the model is not installed
    texts, drafted, accepted = counts(ready(load_model("smollm2", format="fp32")), temperature, monkeypatch)
    permuted = counts(other(share=0.0)[0], temperature, monkeypatch)
    assert permuted == (texts, drafted, accepted)
    made, removed = other(share=0.1)
    same, _, fewer = counts(made, temperature, monkeypatch)
    assert same == texts
    lacking = sum(token in removed for text in texts for token in text)
    assert fewer >= accepted - 3 * lacking - 0.05 * accepted  # a lacking token ends at most one draft of three
