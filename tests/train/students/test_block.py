"""Block drafters in training: what a row sees, what training and drafting share, and where they begin."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import InvalidRequest, UnsupportedModel
from paceline.models.block_heads import load_block
from paceline.train.data.answers import Exchange
from paceline.train.data.teacher import TargetStates
from paceline.train.students.block import W2, BlockShape, BlockStudent, block_mask
from paceline.train.students.block_start import block_shape, block_taps, new_block, rarest_token, read_block_student
from tests.block_heads import LAYOUTS
from tests.train.toy_training import TARGET, teacher_for, texts_of, toy_options

TAPS = (0, 1)


def student_for(*, markov: int = 8, block: int = 4, packing: str = "bf16", noise: float = 0.3) -> BlockStudent:
    """A drafter with random weights, so that every weight matters."""
    teacher, config = teacher_for(layers=TAPS), TARGET.config
    shape = BlockShape(
        hidden=config.hidden_size,
        intermediate=96,
        layers=2,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        taps=TAPS,
        block=block,
        markov=markov,
        mask_token=5,
        eps=config.norm_eps,
        theta=config.rope_theta,
        max_context=256,
    )
    scale = torch.rand(len(TAPS) * config.hidden_size, generator=torch.Generator().manual_seed(2)) + 0.5
    made = new_block(shape, teacher, scale=scale, dtype=torch.float32, seed=0, packing=packing)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in made.params.values():
            param += noise * (0.5 if param.dim() == 2 else 1.0) * torch.randn(param.shape, generator=random)
    return made


def written(student: BlockStudent, folder: Path) -> Path:
    folder.mkdir()
    for name, content in student.files().items():
        (folder / name).write_bytes(content)
    return folder


def test_a_row_sees_what_is_before_its_anchor_and_its_own_block() -> None:
    mask = block_mask(torch.tensor([[2, 3]]), rows=2, length=4)[0, 0].int().tolist()
    assert mask == [
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("markov", [0, 8])
def test_guesses_depend_on_the_past_alone(markov: int) -> None:
    """States from the anchor on, and tokens after the one before a guess, change nothing."""
    student, teacher = student_for(markov=markov), teacher_for(layers=TAPS)
    if markov:
        student.params[W2].data *= 100
    texts = texts_of(lengths=[32], starts=[8])
    states = teacher(texts.ids)
    before = student.guesses(teacher, states, texts, 3)
    features = states.features.clone()
    features[:, 20:] += 1.0
    after = student.guesses(teacher, TargetStates(features, states.hidden), texts, 3)
    assert torch.equal(before[:, :20], after[:, :20])  # the anchor of row 19 is at 20
    assert not torch.equal(before[:, 20:], after[:, 20:])
    other = replace(texts, ids=torch.cat([texts.ids[:, :20], (texts.ids[:, 20:] + 1) % 97], dim=1))
    changed = student.guesses(teacher, states, other, 3)
    assert torch.equal(before[:, :17], changed[:, :17])  # step 2 of row 17 reads token 20
    assert torch.equal(before[:, :19, 0], changed[:, :19, 0])
    assert torch.equal(before[:, 18, 1], changed[:, 18, 1]) == (markov == 0)


@pytest.mark.parametrize("markov", [0, 8])
def test_the_loss_falls_by_its_gradient(markov: int) -> None:
    student, teacher = student_for(markov=markov, noise=0.1), teacher_for(layers=TAPS)
    texts = texts_of(lengths=[32, 20], starts=[6, 4])
    states, anchors = teacher(texts.ids), student._anchors(texts)
    student._anchors = lambda texts: anchors  # type: ignore[method-assign]  # the weights, which change, choose them
    first = student.losses(teacher, states, texts, "likelihood")
    assert first.by_step.shape == (4 - (not markov),)
    assert bool((first.by_step > 0).all())
    first.total.backward()
    assert all(param.grad is not None and bool((param.grad != 0).any()) for param in student.params.values())
    with torch.no_grad():
        for param in student.params.values():
            param -= 0.002 * param.grad / param.grad.norm()
    second = student.losses(teacher, states, texts, "likelihood")
    assert second.total.item() < first.total.item()


def test_rows_beyond_an_answer_do_not_count() -> None:
    student, teacher = student_for(markov=8, noise=0.1), teacher_for(layers=TAPS)
    texts = texts_of(lengths=[32, 12], starts=[6, 4])
    states = teacher(texts.ids)
    before = student.losses(teacher, states, texts, "likelihood").by_step
    states.hidden[1, 11:] = 7.0  # the last state of an answer, and padding: no token of it follows
    assert torch.equal(before, student.losses(teacher, states, texts, "likelihood").by_step)
    states.hidden[1, 5:11] = 7.0
    assert not torch.equal(before, student.losses(teacher, states, texts, "likelihood").by_step)


def test_anchors_stay_in_their_answers_and_follow_the_weights() -> None:
    student, texts = student_for(), texts_of(lengths=[64, 9, 11], starts=[30, 7, 10])
    anchors = student._anchors(texts)
    assert anchors.shape == (3, 16)
    assert bool((anchors >= texts.starts[:, None]).all())
    assert bool((anchors[:2] < texts.ends[:2, None] - 1).all())
    assert bool((anchors[2] == 10).all()), "an answer of one token has one anchor, without a label"
    assert torch.equal(anchors, student._anchors(texts))
    with torch.no_grad():
        student.params["norm.weight"] += 0.01
    assert not torch.equal(anchors, student._anchors(texts))


@pytest.mark.parametrize("packing", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("markov", [0, 32])
def test_a_written_drafter_reads_back(markov: int, packing: str, tmp_path: Path) -> None:
    student, teacher = student_for(markov=markov, packing=packing), teacher_for(layers=TAPS)
    folder = written(student, tmp_path / "block")
    head = load_block(folder, TARGET.config)
    assert head.config.taps == TAPS
    assert head.config.anchor_first == bool(markov)
    again = read_block_student(folder, TARGET.config, dtype=torch.float32, device=torch.device("cpu"))
    texts = texts_of(lengths=[40, 24], starts=[8, 8])
    states = teacher(texts.ids)
    found, wanted = (each.guesses(teacher, states, texts, 3) for each in (again, student))
    assert float((found == wanted).float().mean()) > 0.9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_causal": True}, "causal"),
        ({"markov_head_type": "gated"}, "vanilla"),
        ({"sample_from_anchor": False}, "layout"),
        ({"output_multiplier": 2.0}, "scaled"),
        ({"target_layer_ids": [0, 1]}, "after the last layer"),
    ],
)
def test_what_training_does_not_have_is_not_measured(change: dict[str, object], words: str, tmp_path: Path) -> None:
    folder = written(student_for(), tmp_path / "block")
    values = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(values))
    if "gated" in change.values():
        folder = LAYOUTS["dspark, gated"].write(tmp_path / "gated", vocab=97)
    with pytest.raises(UnsupportedModel, match=words):
        read_block_student(folder, TARGET.config, dtype=torch.float32, device=torch.device("cpu"))


def test_taps_are_spread_over_the_target() -> None:
    assert block_taps(30, 3) == (2, 15, 27)
    assert block_taps(30, 1) == (27,)
    assert block_taps(2, 2) == (0, 1)
    with pytest.raises(InvalidRequest, match="--taps 3 must be 1 to 2"):
        block_taps(2, 3)


def test_the_mask_is_a_token_that_is_never_said(tmp_path: Path) -> None:
    said = [Exchange(tokens=torch.tensor([0, *range(90), 96]).numpy(), prompt=1)]
    assert rarest_token(said, 97) == 95
    options = toy_options(tmp_path, tmp_path, tmp_path / "out", kind="block", block=1)
    with pytest.raises(InvalidRequest, match="--block 1 must be at least 2"):
        block_shape(options, TARGET.config, said)
