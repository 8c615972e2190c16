"""Gumbel noise: it has the right distribution, keys and tokens are independent, and picking follows softmax."""

from __future__ import annotations

import math

import torch

from paceline.kernels.noise import _log, _uniform, gumbel_noise, pick

KEYS = torch.randint(0, 2**32, (200, 2), generator=torch.Generator().manual_seed(7))


def test_noise_is_gumbel():
    """Kolmogorov-Smirnov: the largest gap to exp(-exp(-x)) over a million numbers."""
    values = gumbel_noise(KEYS, 5000).flatten().double().sort().values
    ranks = (torch.arange(len(values)) + 0.5) / len(values)
    gap = (torch.exp(-torch.exp(-values)) - ranks).abs().max()
    assert gap * math.sqrt(len(values)) < 1.95  # exceeded by chance once in a thousand


def test_keys_and_tokens_share_nothing():
    near = torch.tensor([[5, 9], [6, 9], [7, 9], [5, 0x9E3779B9], [5, 0x7F4A7C15]])
    noise = gumbel_noise(near, 20000)
    standard = (noise - noise.mean(1, keepdim=True)) / noise.std(1, keepdim=True)
    correlation = standard @ standard.T / 20000
    assert (correlation - torch.eye(5)).abs().max() < 0.03
    for lag in (1, 2, 16, 256):
        assert (standard[:, lag:] * standard[:, :-lag]).mean(1).abs().max() < 0.03


def test_picking_follows_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf]).expand(20000, -1)
    keys = torch.stack([torch.arange(20000) * 977 % 2**32, torch.arange(20000) * 7919 % 2**32], dim=1)
    counts = torch.bincount(pick(logits, torch.full((20000,), 0.5), keys), minlength=5)
    wanted = (logits[0] * 0.5).softmax(0) * 20000
    assert counts[4] == 0
    chi = ((counts - wanted)[:4].square() / wanted[:4]).sum()
    assert chi < 16.3  # three degrees of freedom: exceeded by chance once in a thousand


def test_a_prefix_of_the_vocabulary_has_the_same_noise():
    assert torch.equal(gumbel_noise(KEYS[:3], 1000)[:, :77], gumbel_noise(KEYS[:3], 77))
    assert torch.equal(gumbel_noise(KEYS[:3], 77)[1:2], gumbel_noise(KEYS[1:2], 77))


def test_uniform_numbers_stay_inside():
    u = _uniform(KEYS, torch.arange(5000))
    assert u.min() > 0
    assert u.max() < 1


def test_the_logarithm_is_one():
    x = torch.logspace(-8, 2, 100000)
    x = torch.cat([x, 1 + torch.linspace(-1e-3, 1e-3, 10001), torch.tensor([2.0**-24, 1 - 2.0**-24, 1.0])])
    torch.testing.assert_close(_log(x).double(), x.double().log(), rtol=3e-7, atol=1e-10)
