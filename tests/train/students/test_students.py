"""Medusa heads and small models: what they guess, and that others can load what they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import InvalidRequest, ModelFileError, UnknownOption, UnsupportedModel
from paceline.llm import LLM
from paceline.models.heads import load_eagle, load_medusa
from paceline.models.load import load_model
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import Teacher
from paceline.train.measure import measure
from paceline.train.options import EvalOptions
from paceline.train.run import train
from paceline.train.students.kinds import new_student, read_student
from paceline.train.students.medusa import MedusaShape, MedusaStudent
from paceline.train.students.packing import PACKINGS
from paceline.train.students.small import SmallShape, SmallStudent
from paceline.types import SamplingParams
from tests.heads import medusa_tensors, random_medusa, write_head
from tests.train.conftest import MakeOptions
from tests.train.toy_training import head_for, teacher_for, texts_of, toy_options, write_prompts

SHORT = {"max_steps": 25, "evaluations": 1}


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return teacher_for(layers=())


@pytest.fixture(scope="module")
def texts() -> TextBatch:
    return texts_of(lengths=(20, 32), starts=(5, 9))


def test_new_medusa_heads_say_what_the_target_does(teacher: Teacher, texts: TextBatch) -> None:
    """All of them what the target says of the next token: so they agree with one another."""
    heads = MedusaStudent.new(MedusaShape(hidden=64, vocab=97, heads=3), teacher, dtype=torch.float32, packing="bf16")
    states = teacher(texts.ids)
    guesses = heads.guesses(teacher, states, texts, 4)
    best = (states.hidden @ teacher.head.T).argmax(-1)
    for step in range(3):
        assert torch.equal(guesses[..., step], best)
    assert bool((guesses[..., 3] == -1).all()), "there is no fourth head"


def test_medusa_learns_every_head(teacher: Teacher, texts: TextBatch) -> None:
    """Head i is about token p + 2 + i: its labels are the target's at row p + 1 + i."""
    heads = MedusaStudent.new(MedusaShape(hidden=64, vocab=97, heads=2), teacher, dtype=torch.float32, packing="bf16")
    states = teacher(texts.ids)
    found = heads.losses(teacher, states, texts, "likelihood")
    for index in range(2):
        distances = []
        for b, (start, end) in enumerate(zip(texts.starts.tolist(), texts.ends.tolist(), strict=True)):
            rows = torch.arange(start - 1, end - 2 - index)
            wanted = (states.hidden[b, rows + 1 + index] @ teacher.head.T).log_softmax(-1)
            said = (states.hidden[b, rows] @ teacher.head.T).log_softmax(-1)
            distances.append((wanted.exp() * (wanted - said)).sum(-1))
        assert found.by_step[index] == pytest.approx(torch.cat(distances).mean().item(), abs=1e-4)
    found.total.backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in heads.params.values())


def test_a_small_model_guesses_along_the_text(teacher: Teacher, texts: TextBatch) -> None:
    shape = SmallShape(
        hidden=32, intermediate=64, layers=2, heads=2, head_dim=16, vocab=97, max_context=64, eos_ids=(0,), bos_id=None
    )
    model = SmallStudent.new(shape, tokenizer={}, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    guesses = model.guesses(teacher, teacher(texts.ids), texts, 3)
    weights = model._cast()
    for row, step in ((4, 0), (4, 2), (10, 1)):
        read = texts.ids[:1, : row + step + 2]  # token row + 2 + step is what follows these
        said = model._forward(read, weights)[0, -1] @ weights["model.embed_tokens.weight"].T
        assert int(guesses[0, row, step]) == int(said.argmax())


def test_trained_medusa_heads_load(answered: MakeOptions, target: Path, prompts: Path, tmp_path: Path) -> None:
    options = answered(tmp_path / "medusa", kind="medusa", heads=2, **SHORT)
    scores = train(options, lambda text: None)
    heads = load_medusa(options.out, load_model(str(target)).config)
    assert len(heads) == 2
    assert scores["held-out"].tokens_per_round > 1.2
    few = write_prompts(tmp_path / "few.jsonl", count=6, seed=4)
    again = measure(EvalOptions(options.target, options.out, evals={"few": few}), lambda text: None)
    assert again["few"].tokens_per_round > 1.2


@pytest.mark.parametrize(
    ("values", "dropped", "error", "said"),
    [
        ({"medusa_num_heads": "two"}, None, ModelFileError, "medusa_num_heads is 'two'; allowed: a whole number"),
        ({"medusa_num_heads": 4}, None, ModelFileError, "tensor '3.0.linear.weight' .* is missing"),
        ({}, "1.1.weight", ModelFileError, "tensor '1.1.weight' .* is missing"),
        ({"medusa_num_layers": 2}, None, ModelFileError, "tensor '0.1.linear.weight' .* is missing"),
        ({"hidden_size": 32}, None, InvalidRequest, "heads for hidden size 32"),
    ],
)
def test_broken_medusa_heads_are_not_measured(
    values: dict[str, Any], dropped: str | None, error: type[Exception], said: str, target: Path, tmp_path: Path
) -> None:
    model = load_model(str(target))
    tensors = {name: tensor for name, tensor in medusa_tensors(random_medusa(model.config)).items() if name != dropped}
    folder = write_head(tmp_path / "heads", {"medusa_num_heads": 3, **values}, tensors)
    with pytest.raises(error, match=said):
        read_student(folder, model, device=torch.device("cpu"))


def test_medusa_heads_of_two_layers_are_not_measured(target: Path, tmp_path: Path) -> None:
    model = load_model(str(target))
    tensors = medusa_tensors(random_medusa(model.config, layers=2))
    folder = write_head(tmp_path / "heads", {"medusa_num_heads": 3, "medusa_num_layers": 2}, tensors)
    with pytest.raises(UnsupportedModel, match="Medusa heads with a medusa_num_layers of 2 draft, but are not trained"):
        read_student(folder, model, device=torch.device("cpu"))


def test_a_trained_small_model_is_a_model(answered: MakeOptions, target: Path, tmp_path: Path) -> None:
    options = answered(tmp_path / "small", kind="small", hidden=32, layers=1, **SHORT)
    scores = train(options, lambda text: None)
    assert scores["held-out"].tokens_per_round > 1.2
    llm = LLM(
        str(target),
        drafter=f"model:{options.out}",
        format="fp32",
        max_context=128,
        fixed_draft=True,
        max_draft_batch=64,
        threads=1,
    )
    plain = LLM(str(target), format="fp32", max_context=128, threads=1)
    sampling = SamplingParams(temperature=0, max_tokens=30)
    drafted = llm.generate(["the cat"], sampling)[0]
    assert drafted.tokens == plain.generate(["the cat"], sampling)[0].tokens
    assert drafted.stats.accepted
    with pytest.raises(InvalidRequest, match="bench offline"):
        measure(EvalOptions(options.target, options.out, evals={}), lambda text: None)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_heads_loader_reads_what_is_written(tmp_path: Path, packing: str) -> None:
    teacher = teacher_for(layers=(0, 1, 1))
    head = head_for(teacher, draft_vocab=60, steps=2)
    head._packing = packing
    for name, data in head.files().items():
        (tmp_path / name).write_bytes(data)
    found = load_eagle(tmp_path, teacher.config)
    assert found.ids.tolist() == head.constants["draft_ids"].tolist()
    assert found.config.taps == (0, 1, 1)


@pytest.mark.parametrize("hidden", [33, 80])
def test_shapes_that_cannot_be_are_said(target: Path, prompts: Path, tmp_path: Path, hidden: int) -> None:
    options = toy_options(target, prompts, tmp_path / "x", kind="small", hidden=hidden)
    with pytest.raises(InvalidRequest, match=f"--hidden must be .* not {hidden}"):
        new_student(options, load_model(str(target)), [], device=torch.device("cpu"))


def test_a_kind_that_is_not_known_is_said(target: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownOption, match="kind of drafter 'eagel'; did you mean 'eagle'"):
        new_student(
            toy_options(target, prompts, tmp_path / "x", kind="eagel"),
            load_model(str(target)),
            [],
            device=torch.device("cpu"),
        )
