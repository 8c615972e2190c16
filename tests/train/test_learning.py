"""Labels, batches and rounds: the small arithmetic that training and its numbers stand on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.train.data.answers import Exchange
from paceline.train.data.batches import STEP, Texts, epoch_batches, in_order, pad
from paceline.train.data.labels import Aim, Labels, soft_loss
from paceline.train.loop.score import Score, reaches, replay
from paceline.train.output.packing import PACKINGS, as_written, packed, unpacked
from paceline.train.students.initial_weights import draft_vocabulary, feature_layers


def exchange(length: int, prompt: int = 3) -> Exchange:
    return Exchange(np.arange(length, dtype=np.int32) % 50, prompt)


# ── labels ──


@pytest.mark.parametrize("aim", ["likelihood", "overlap"])
def test_the_loss_has_the_gradient_of_its_definition(aim: Aim) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(6, 8, generator=random), torch.randn(11, 8, generator=random)
    labels, weights = Labels.of(hidden, head, aim), torch.rand(6, generator=random)
    logits = torch.randn(6, 11, generator=random, requires_grad=True)
    plain = logits.detach().clone().requires_grad_()
    loss, distance, best = soft_loss(logits, labels, weights)
    (3 * loss).backward()
    wanted = (hidden @ head.T).softmax(-1)
    rows = {
        "likelihood": -(wanted * plain.log_softmax(-1)).sum(-1),
        "overlap": -torch.minimum(wanted, plain.softmax(-1)).sum(-1).log(),
    }
    expected = (rows[aim] * weights).sum()
    (3 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(logits.grad, plain.grad, atol=1e-6)
    assert torch.equal(best, plain.argmax(-1))
    assert torch.equal(labels.best, wanted.argmax(-1))
    assert torch.allclose(labels.entropy, -(wanted * wanted.log()).sum(-1), atol=1e-5)
    assert not distance.requires_grad
    assert distance > 0.1
    assert soft_loss(hidden @ head.T, labels, weights)[1].item() == pytest.approx(0, abs=1e-5), "what says the same"


def test_a_model_too_small_for_all_overlaps_more_where_that_is_the_aim() -> None:
    """One distribution for three, of which two agree: by likelihood it is their mean, and overlaps less."""
    wanted = torch.full((3, 22), 0.01)
    wanted[:, :2] = torch.tensor([[0.8, 0.0], [0.8, 0.0], [0.0, 0.8]])
    overlaps = {}
    for aim in ("likelihood", "overlap"):
        labels = Labels.of(wanted.clamp_min(1e-9).log(), torch.eye(22), aim)
        logits = torch.zeros(1, 22, requires_grad=True)
        for _ in range(1500):
            loss, _, _ = soft_loss(logits.expand(3, -1), labels, torch.full((3,), 1 / 3))
            (gradient,) = torch.autograd.grad(loss, logits)
            logits = (logits - 0.3 * gradient).detach().requires_grad_()
        overlaps[aim] = torch.minimum(logits.softmax(-1), wanted).sum(-1).mean().item()
    assert overlaps["overlap"] > overlaps["likelihood"] + 0.015


# ── batches ──


def test_an_epoch_has_every_exchange_once_and_fits() -> None:
    lengths = np.random.default_rng(0).integers(5, 90, size=300)
    exchanges = [exchange(int(length)) for length in lengths]
    batches = epoch_batches(exchanges, tokens=512, seed=1, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(300))
    for batch in batches:
        texts = pad([exchanges[index] for index in batch])
        assert texts.ids.numel() <= 512
        assert texts.ids.shape[1] % STEP == 0
    assert sum(pad([exchanges[i] for i in batch]).ids.numel() for batch in batches) < 1.5 * lengths.sum()


def test_epochs_differ_and_can_be_made_again() -> None:
    exchanges = [exchange(20 + i) for i in range(40)]
    first, again, other, seeded = (
        epoch_batches(exchanges, tokens=256, seed=seed, epoch=epoch) for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert first == again
    assert first != other
    assert first != seeded


def test_a_text_longer_than_a_batch_is_a_batch() -> None:
    assert epoch_batches([exchange(100)], tokens=64, seed=0, epoch=0) == [[0]]


def test_in_order_keeps_all() -> None:
    found = [int(end) for texts in in_order([exchange(n) for n in (9, 30, 17)], tokens=64) for end in texts.ends]
    assert found == [9, 17, 30]


# ── rounds ──


def test_rounds_are_replayed_as_the_engine_would() -> None:
    """The answer is tokens 4 … 13; token 4 comes with the prompt. Reach is by the row before the last committed."""
    reach = np.zeros(16, dtype=int)
    reach[3], reach[6], reach[7], reach[12] = 2, 0, 4, 4
    # last = 4: row 3 → 2 accepted, last = 7: row 6 → 0, last = 8: row 7 → 4, last = 13: the end
    assert replay(reach, start=4, end=14).tolist() == [2, 0, 4]


def test_nothing_is_accepted_beyond_the_end() -> None:
    assert replay(np.full(16, 4), start=4, end=8).tolist() == [3]
    assert replay(np.full(16, 4), start=4, end=5).tolist() == []


def test_reach_ends_at_the_first_wrong_guess() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    texts = Texts(ids=ids, starts=torch.tensor([1]), ends=torch.tensor([6]))
    guesses = torch.zeros((1, 6, 3), dtype=torch.long)
    guesses[0, 0] = torch.tensor([7, 8, 9])
    guesses[0, 1] = torch.tensor([8, 0, 10])
    guesses[0, 2] = torch.tensor([0, 10, 0])
    assert reaches(guesses, texts)[0, :3].tolist() == [3, 1, 0]


def test_scores_say_how_often_each_position_was_right() -> None:
    score = Score(draft=3, rounds=10, accepted=(8, 4, 1))
    assert score.tokens_per_round == pytest.approx(2.3)
    assert score.by_position == pytest.approx((0.8, 0.5, 0.25))
    assert Score(draft=2, rounds=0, accepted=(0, 0)).tokens_per_round == 1.0


# ── beginnings and packing ──


def test_the_draft_vocabulary_is_what_answers_say() -> None:
    """Prompts do not count; end tokens are always there."""
    said = [Exchange(np.array([9, 9, 9, 1, 1, 2, 3, 3, 3]), 3)]
    vocabulary = draft_vocabulary(said, size=3, vocab=12, always={11})
    assert vocabulary.ids.tolist() == [1, 3, 11]
    assert vocabulary.coverage == pytest.approx(5 / 6)
    assert len(draft_vocabulary(said, size=99, vocab=12, always={11}).ids) == 12


@pytest.mark.parametrize(
    ("layers", "wanted"), [(30, (2, 15, 27)), (5, (2, 2, 2)), (2, (1, 1, 1)), (1, (0, 0, 0)), (8, (2, 4, 5))]
)
def test_features_are_of_layers_that_there_are(layers: int, wanted: tuple[int, ...]) -> None:
    assert feature_layers(layers) == wanted


@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_comes_back_close(packing: str) -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {
        "fc.weight": torch.randn(4, 64, generator=random) * torch.logspace(-4, 0, 64),
        "lm_head.weight": torch.randn(8, 64, generator=random),
        "norm.weight": torch.rand(64, generator=random),
    }
    file = packed(tensors, packing)
    assert file["lm_head.weight"].dtype == {"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}[packing]
    assert file["fc.weight"].dtype == torch.bfloat16
    back = unpacked(file)
    assert back.keys() == tensors.keys()
    assert torch.equal(back["norm.weight"], tensors["norm.weight"])
    assert torch.allclose(back["fc.weight"], tensors["fc.weight"], rtol=0.005)
    atol = 0.3 if packing == "int4" else 0.02
    assert torch.allclose(back["lm_head.weight"], tensors["lm_head.weight"], atol=atol)


def test_who_is_written_in_4_bits_learns_in_them() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    written = as_written("lm_head.weight", weight, "int4")
    file = unpacked(packed({"lm_head.weight": weight.detach()}, "int4"))
    assert torch.allclose(written, file["lm_head.weight"], atol=1e-6)
    (written * torch.arange(64)).sum().backward()
    assert torch.equal(weight.grad, torch.arange(64).float().expand(4, 64))
    assert as_written("fc.weight", weight, "int4") is weight
    assert as_written("lm_head.weight", weight, "int8") is weight
