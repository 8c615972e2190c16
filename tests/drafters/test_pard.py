"""PARD models: a draft comes from one pass over masks, whose keys and values nobody reads afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.base import Ask
from paceline.drafters.model import ModelDrafter, recipe
from paceline.errors import InvalidRequest, ModelFileError
from paceline.kernels.base import Forward
from paceline.kv.pages import PagePool
from paceline.models.hf_config import config_from_hf
from paceline.rules import BUILT_IN
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from paceline.runner.loading.models import read_model
from paceline.sampling.sampler import Sampler
from paceline.types import Rule, SamplingParams, Speculation
from tests.cli.tiny_model import write_model
from tests.rig import build
from tests.rig_drafters import RIGS
from tests.runs import mixed_requests, plain, run, tokens_of
from tests.tiny_models import TARGET, VOCAB

MASK = 5
TEXT = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
LENGTH = 21  # committed tokens
PARAMS = [SamplingParams(temperature=0), SamplingParams(temperature=1, seed=3, top_k=8)]


def lanes_of(count: int = 2) -> tuple[Lanes, PagePool]:
    lanes, pool = Lanes(count=count, max_context=60, max_draft=8), PagePool(10)
    for lane in range(count):
        lanes.tokens_np[lane, : len(TEXT)] = np.roll(TEXT, lane)
        lanes.lengths_np[lane] = LENGTH
        lanes.pages_np[lane, :3] = pool.take(3)
    return lanes, pool


def alone(backend: str, **options: Any) -> tuple[ModelDrafter, Lanes]:
    lanes, pool = lanes_of()
    forward = TARGET.forward(backend, num_pages=10)
    settings = {"min_confidence": 0.0, "mask": MASK, **options}
    drafter = ModelDrafter(forward, lanes=lanes, pool=pool, vocab_size=VOCAB, chunk=64, **settings)
    for key in range(2):
        drafter.start(key, key, lanes.tokens_np[key, :LENGTH])
    return drafter, lanes


def ask(lanes: Lanes, *, key: int = 0, longest: int = 5, rule: Rule = Rule.COUPLED, **of: Any) -> Ask:
    options = {name: of.pop(name) for name in ("p_min", "row_prices", "row_price") if name in of}
    sampler = Sampler(SamplingParams(**of), seed=4, vocab_size=VOCAB, eos_ids=())
    tokens = lanes.tokens_np[key, : int(lanes.lengths_np[key])]
    return Ask(key=key, lane=key, tokens=tokens, max_draft=longest, sampler=sampler, rule=rule, **options)


def logits_by_definition(forward: Forward, tokens: list[int], count: int) -> torch.Tensor:
    """Logits [count, vocab] of a text with masks behind it, in a lane of its own."""
    lanes, pool = lanes_of(1)
    text = [*tokens, *[MASK] * (count - 1)]
    lanes.tokens_np[0, : len(text)] = text
    lanes.pages_np[0, :3] = pool.take(3)
    return forward(build_batch(lanes, [Share(lane=0, start=0, count=len(text), outs=count)])).logits


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_a_draft_is_what_the_masks_say(backend: str) -> None:
    """Two sequences in one pass; greedy, so that a token is the best of its row."""
    drafter, lanes = alone(backend)
    drafts = drafter.propose([ask(lanes, temperature=0), ask(lanes, key=1, longest=3, temperature=0)])
    for key, (draft, count) in enumerate(zip(drafts, (5, 3), strict=True)):
        told = logits_by_definition(TARGET.forward(backend, num_pages=10), np.roll(TEXT, key)[:LENGTH].tolist(), count)
        assert list(draft.tokens) == told.argmax(-1).tolist()
        assert draft.passes == 1
        assert draft.is_chain


def test_the_noise_is_the_targets() -> None:
    drafter, lanes = alone("eager")
    [draft] = drafter.propose([ask(lanes, temperature=1.5)])
    told = logits_by_definition(TARGET.forward("eager", num_pages=10), TEXT[:LENGTH], 5)
    sampler = Sampler(SamplingParams(temperature=1.5), seed=4, vocab_size=VOCAB, eos_ids=())
    drawn = sampler.draw(told, np.arange(LENGTH, LENGTH + 5), drafter.forward.pick)
    assert list(draft.tokens) == drawn.tolist()


def test_accepted_tokens_are_read_again() -> None:
    """The next draft is that of a model which has never seen a mask."""
    drafter, lanes = alone("eager")
    [draft] = drafter.propose([ask(lanes, temperature=0)])
    lanes.tokens_np[0, LENGTH : LENGTH + 4] = [*draft.tokens[:3], 9]  # three are accepted, then a bonus
    lanes.lengths_np[0] = LENGTH + 4
    drafter.observe(0, lanes.tokens_np[0, : LENGTH + 4], 3)
    [again] = drafter.propose([ask(lanes, temperature=0)])
    told = logits_by_definition(TARGET.forward("eager", num_pages=10), [*TEXT[:LENGTH], *draft.tokens[:3], 9], 5)
    assert list(again.tokens) == told.argmax(-1).tolist()


def test_a_draft_ends_where_its_next_row_does_not_pay() -> None:
    costs = (0.0, 0.0, 0.999, 0.999)
    for given, length in ({}, 3), ({"p_min": 0.0}, 5):  # the third is not sure enough for its row, and is the last
        drafter, lanes = alone("eager", min_confidence=None)
        [draft] = drafter.propose([ask(lanes, temperature=0, row_prices=costs, **given)])
        assert len(draft) == length


def test_parameters_act_along_the_draft() -> None:
    drafter, lanes = alone("eager")
    [draft] = drafter.propose([ask(lanes, temperature=0, presence_penalty=100.0, longest=8)])
    assert len(set(draft.tokens)) == 8


@pytest.mark.parametrize("rule", BUILT_IN)
def test_rules_get_the_distributions_they_want(rule: Rule) -> None:
    drafter, lanes = alone("eager")
    [draft] = drafter.propose([ask(lanes, temperature=1.0, rule=rule)])
    assert draft.problem(vocab_size=VOCAB, max_length=5) is None
    assert (draft.probs is not None) == (rule in (Rule.REJECTION, Rule.BLOCK))


@pytest.mark.parametrize("backend", ["toy", "compiled"])
def test_same_text_under_pressure(backend: str) -> None:
    """Few pages, so that sequences are preempted and prefixes shared; drafts are accepted now and then."""
    asked = mixed_requests(PARAMS, [Speculation()], count=8)
    rig = build(backend, {"model": RIGS["model"]["parallel"]}, num_pages=24)
    told = tokens_of(run(rig, asked))
    assert rig.engine.stats.accepted > 0
    assert told == tokens_of(run(build(backend, num_pages=24), plain(asked)))


# ── from files ──


def plain_model(folder: Path) -> Path:
    (folder / "target").mkdir()
    return write_model(folder / "target", seed=0)


def pard(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    write_model(folder, seed=0)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": MASK, **changes}))
    return folder


def test_a_checkpoint_says_that_it_is_one(tmp_path: Path) -> None:
    target = read_model(str(plain_model(tmp_path)))
    made = recipe(str(pard(tmp_path / "pard")), target, None)
    assert "one pass a draft (PARD)" in made.how
    assert recipe(str(pard(tmp_path / "other", pard_token=None, ptd_token_id=7)), target, None).how == made.how
    assert "PARD" not in recipe(str(tmp_path / "target"), target, None).how


def test_what_it_cannot_do_is_an_error(tmp_path: Path) -> None:
    target = read_model(str(plain_model(tmp_path)))
    with pytest.raises(InvalidRequest, match="branches 3: a PARD model drafts chains; leave it out"):
        recipe(f"{pard(tmp_path / 'pard')},branches=3", target, None)
    with pytest.raises(ModelFileError, match="pard_token is 1048576; allowed: a whole number from 0 to"):
        recipe(str(pard(tmp_path / "outside", pard_token=1 << 20)), target, None)
    with pytest.raises(ModelFileError, match="pard_token is 'x'; allowed: a whole number"):
        recipe(str(pard(tmp_path / "text", pard_token="x")), target, None)


def test_a_model_without_a_mask_has_none() -> None:
    values = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "vocab_size": 9}
    values |= {"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8}
    assert config_from_hf(values, source="a file").mask_token is None
