"""Trainings that start from a trained head: their first score, what they refuse, and what the card says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import InvalidRequest, UnsupportedModel
from paceline.models.load import load_model
from paceline.train.data.answers import HELD_OUT, TRAIN, AnswerStore
from paceline.train.data.split import split_prompts
from paceline.train.data.teacher import Teacher
from paceline.train.loop import checkpoint
from paceline.train.loop.checkpoint import Progress
from paceline.train.loop.score import Score, evaluate
from paceline.train.options import TrainOptions
from paceline.train.run import train
from paceline.train.storage import read_tensors
from paceline.train.students.eagle import EagleStudent
from paceline.train.students.kinds import Start, new_student, read_student
from paceline.train.students.packing import PACKINGS, Packing
from paceline.train.students.published import PublishedHead
from paceline.train.students.student import Student
from tests.train.conftest import MakeOptions

CPU = torch.device("cpu")
LATER = {"max_steps": 4, "evaluations": 1, "draft_vocab": None, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def first(answered: MakeOptions, tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    """A training that has ended, of a head with a width of its own."""
    options = answered(tmp_path_factory.mktemp("first") / "eagle", intermediate=64, max_steps=40, license="apache-2.0")
    train(options, lambda text: None)
    return options


def going_on(answered: MakeOptions, first: TrainOptions, out: Path, **changes: object) -> TrainOptions:
    return answered(out, initial_head=str(first.out), **LATER | changes)


def score(student: Student, teacher: Teacher, options: TrainOptions) -> Score:
    held_out = AnswerStore.open(options.work / "answers").read()[HELD_OUT]
    return evaluate(student, teacher, held_out, draft=4, tokens=1024, device=CPU)


def started(options: TrainOptions) -> Start:
    trained = AnswerStore.open(options.work / "answers").read()[TRAIN]
    return new_student(options, load_model(options.target.model, format="fp32"), trained, device=CPU)


# ── the first score ──


@pytest.mark.parametrize("packing", PACKINGS)
def test_it_starts_as_good_as_the_initial_head(
    answered: MakeOptions, first: TrainOptions, tmp_path: Path, packing: Packing
) -> None:
    options = going_on(answered, first, tmp_path / "later", packing=packing)
    before = score(*read_student(first.out, load_model(first.target.model, format="fp32"), device=CPU), first)
    there = started(options)
    assert before.tokens_per_round > 1.5, "a head that has learnt nothing would do as well"
    tolerance = 0.05 if packing == "int4" else 1e-9
    assert score(there.student, there.teacher, options).tokens_per_round == pytest.approx(
        before.tokens_per_round, rel=tolerance
    )
    assert isinstance(there.student, EagleStudent)
    assert (there.student.shape.intermediate, there.student.shape.draft_vocab) == (64, 40)
    scale = there.student.constants["feature_scale"]
    assert scale.std() > 0.01, "features have been measured"


@pytest.mark.parametrize("packing", PACKINGS)
def test_written_again_it_is_the_same_head(
    answered: MakeOptions, first: TrainOptions, tmp_path: Path, packing: Packing
) -> None:
    """Packing what has been packed loses nothing more than rounding."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    for folder, source in ((once, first.out), (twice, once)):
        options = replace(going_on(answered, first, folder, packing=packing), initial_head=str(source))
        folder.mkdir()
        for name, data in started(options).student.files().items():
            (folder / name).write_bytes(data)
    config = load_model(first.target.model).config
    one, two = (PublishedHead.read(folder, config, steps=1) for folder in (once, twice))
    assert torch.equal(one.draft_ids, two.draft_ids)
    for name, tensor in one.params.items():
        distance = (two.params[name] - tensor).norm() / tensor.norm()
        assert distance < 0.005, name


def test_a_training_that_goes_on_never_ends_below_its_first_score(
    answered: MakeOptions, first: TrainOptions, tmp_path: Path
) -> None:
    """With a learning rate that ruins it: the first measurement is the best, and its weights are what is written."""
    options = going_on(answered, first, tmp_path / "later", learning_rate=3.0, max_steps=2)
    said: list[str] = []
    scores = train(options, said.append)
    found = [line for line in said if line.startswith("held-out: ")]
    assert [line.endswith("(best)") for line in found] == [True, False, False]
    initial = read_student(first.out, load_model(first.target.model, format="fp32"), device=CPU)
    assert scores[HELD_OUT].tokens_per_round == pytest.approx(score(*initial, first).tokens_per_round, rel=0.02)


def test_the_card_says_with_what_it_began(answered: MakeOptions, first: TrainOptions, tmp_path: Path) -> None:
    options = going_on(answered, first, tmp_path / "later", command="paceline train eagle toy --begin eagle")
    train(options, lambda text: None)
    card = (options.out / "README.md").read_text()
    assert "It began with the weights of `eagle` (licence: apache-2.0)" in card
    assert "paceline train eagle toy --begin eagle" in card
    assert "It drafts 40 tokens of the vocabulary" in card
    assert "began with" not in (first.out / "README.md").read_text()


def test_after_a_kill_the_checkpoint_counts(
    answered: MakeOptions, first: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = (going_on(answered, first, tmp_path / name, evaluations=4) for name in ("whole", "parts"))
    train(whole, lambda text: None)
    save = checkpoint.save

    def stop(path: Path, progress: Progress, *rest: object) -> None:
        save(path, progress, *rest)
        if progress.step == 2:
            raise _Stopped

    monkeypatch.setattr(checkpoint, "save", stop)
    with pytest.raises(_Stopped):
        train(parts, lambda text: None)
    monkeypatch.setattr(checkpoint, "save", save)
    said: list[str] = []
    train(parts, said.append)
    assert any("going on from step 2" in line for line in said)
    one, other = (read_tensors(options.work / "checkpoint.safetensors") for options in (whole, parts))
    assert one[0].keys() == other[0].keys()
    assert all(torch.allclose(one[0][name], other[0][name], atol=1e-6) for name in one[0])
    steps = [record["step"] for record in json.loads(other[1])["history"]]
    assert steps == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidRequest, match=r"a training with begin = .*, not None"):
        train(replace(parts, initial_head=None, draft_vocab=None), lambda text: None)


class _Stopped(Exception):
    pass


def test_what_is_held_out_does_not_depend_on_the_seed(answered: MakeOptions, tmp_path: Path) -> None:
    """Or a head would be judged by prompts that the one it began with has learnt from."""
    one, other = (split_prompts(answered(tmp_path / str(seed), seed=seed)).questions for seed in (0, 1))
    held_out = [[question.text for question in some if question.set == HELD_OUT] for some in (one, other)]
    assert held_out[0] == held_out[1]
    assert [question.temperature for question in one] != [question.temperature for question in other]


# ── what it refuses ──


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_vocab": 41}, r"--draft-vocab 41, but the head in .* has 40"),
        ({"intermediate": 96}, r"--intermediate 96, but the head in .* has 64"),
    ],
)
def test_contradictions_are_said_before_anything_is_written(
    first: TrainOptions, tmp_path: Path, options: dict[str, int], said: str
) -> None:
    asked = {"draft_vocab": 40, "intermediate": 64} | options
    options = replace(first, out=tmp_path / "later", initial_head=str(first.out), **asked)
    with pytest.raises(InvalidRequest, match=said):
        train(options, lambda text: None)
    assert not list(tmp_path.iterdir())


def test_a_head_is_not_written_over_itself(first: TrainOptions) -> None:
    with pytest.raises(InvalidRequest, match="--out and --begin are both"):
        train(replace(first, initial_head=str(first.out)), lambda text: None)


def changed(first: TrainOptions, folder: Path, config: dict[str, object]) -> TrainOptions:
    shutil.copytree(first.out, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return replace(first, initial_head=str(folder), out=folder.with_name("out"), draft_vocab=None, intermediate=None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"norm_before_residual": True}, "a head with norm_before_residual drafts"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "the activation .gelu_tanh. drafts"),
    ],
)
def test_heads_that_are_not_trained_here_are_said(
    first: TrainOptions, tmp_path: Path, config: dict[str, object], said: str
) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        train(changed(first, tmp_path / "head", config), lambda text: None)


SCALINGS: list[dict[str, object]] = [
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_stretched_rotation_is_kept(first: TrainOptions, tmp_path: Path, scaling: dict[str, object]) -> None:
    changed(first, tmp_path / "head", {"rope_scaling": scaling})
    model = load_model(first.target.model, format="fp32")
    plain, stretched = (read_student(path, model, device=CPU)[0] for path in (first.out, tmp_path / "head"))
    assert isinstance(plain, EagleStudent)
    assert isinstance(stretched, EagleStudent)
    assert not torch.equal(stretched._layer.frequencies, plain._layer.frequencies)
    assert json.loads(stretched.files()["config.json"])["rope_scaling"] == scaling
    assert "rope_scaling" not in json.loads(plain.files()["config.json"])


@pytest.mark.parametrize("own", [False, True])
def test_an_embedding_in_the_file_must_be_the_targets(first: TrainOptions, tmp_path: Path, own: bool) -> None:
    changed(first, tmp_path / "head", {})
    path, model = tmp_path / "head" / "model.safetensors", load_model(first.target.model, format="fp32")
    embedding = model.weights["embed"]
    assert isinstance(embedding, torch.Tensor)
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0)) * embedding.std()
    save_file(load_file(path) | {"embed_tokens.weight": embedding.clone() + own * noise}, path)
    head = PublishedHead.read(tmp_path / "head", model.config, steps=1)
    assert head.embedding is not None
    if own:
        with pytest.raises(UnsupportedModel, match="an embedding of its own, 100% away"):
            read_student(tmp_path / "head", model, device=CPU)
    else:
        found = score(*read_student(tmp_path / "head", model, device=CPU), first)
        assert found == score(*read_student(first.out, model, device=CPU), first)
