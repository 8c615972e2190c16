"""Labels and the loss: values and gradients against their definitions."""

from __future__ import annotations

import pytest
import torch

from paceline.train.students.labels import Aim, Labels, soft_loss


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
