"""Filters under the coupled rule: the pass draws without them, and the tokens are those of sampling with them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.accept.coupled import accept_coupled
from paceline.draft import Draft
from paceline.engine.judge import judge
from paceline.kernels import noise
from paceline.kernels.base import Output
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams, Speculation

VOCAB, COMMITTED = 40, 7
PARENTS = (-1, -1, 0, 0, 1, 2, 4)
DEPTHS = np.array([0, 1, 1, 2, 2, 2, 3, 3])  # of the root and each node
FILTERS = [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.9}, {"top_p": 1e-6}]


class Counted(Sampler):
    """A sampler that counts the rows that are drawn on the host."""

    draws = 0

    def draw(self, logits, positions, pick, **options):
        self.draws += len(logits)
        return super().draw(logits, positions, pick, **options)


def case(seed: int, params: SamplingParams) -> tuple[SimpleNamespace, Output, torch.Tensor]:
    """A work with a tree, the output of its pass, and the tokens of sampling on the host, all rows at once."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(DEPTHS), VOCAB, generator=random) * 2
    sampler = Counted(params, seed=seed, vocab_size=VOCAB, eos_ids=())
    plain = Sampler(SamplingParams(temperature=params.temperature), seed=seed, vocab_size=VOCAB, eos_ids=())
    positions = COMMITTED + DEPTHS
    unfiltered, wanted = (each.draw(logits, positions, noise.pick) for each in (plain, sampler))
    sampler.draws = 0
    first, second = (int(token) for token in torch.randperm(VOCAB, generator=random)[:2])
    tokens = [int(wanted[0]), first, int(wanted[1]), second, 3, int(unfiltered[3]), 5]
    if len({tokens[0], tokens[1]}) < 2 or len({tokens[2], tokens[3]}) < 2:
        tokens[1], tokens[3] = (tokens[0] + 1) % VOCAB, (tokens[2] + 1) % VOCAB
    sequence = SimpleNamespace(
        key=1, tokens=[0] * COMMITTED, sampler=sampler, request=SimpleNamespace(speculation=Speculation())
    )
    work = SimpleNamespace(root=0, draft=Draft(tuple(tokens), PARENTS), drawn=True, sequence=sequence)
    drawn = unfiltered.tolist()
    arbitrary = [row for row in range(1, len(drawn)) if not _on_path(row, tokens, drawn)]
    for row in arbitrary:
        drawn[row] = int(torch.randint(VOCAB, (1,), generator=random))
    return work, Output(logits, logits.argmax(-1).to(torch.int32), drawn=drawn), wanted


def _on_path(row: int, tokens: list[int], drawn: list[int]) -> bool:
    """True if the pass drew every token up to this row."""
    node = row - 1
    above = PARENTS[node] + 1
    return tokens[node] == drawn[above] and (above == 0 or _on_path(above, tokens, drawn))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_filters_after_the_pass_give_the_tokens_of_sampling(filters: dict[str, float], temperature: float) -> None:
    redrawn = 0
    for seed in range(40):
        work, output, wanted = case(seed, SamplingParams(temperature=temperature, **filters))
        [verdict] = judge([work], output, noise.pick).values()
        assert verdict == accept_coupled(work.draft, wanted.tolist())
        assert work.sequence.sampler.draws <= len(verdict.path) + 1, "rows off the path are not drawn"
        redrawn += verdict.token != output.drawn[verdict.path[-1] + 1 if verdict.path else 0]
    assert redrawn or temperature < 1, "no case in which a filter changed a token"


def test_the_best_token_needs_no_floor() -> None:
    work, output, _ = case(0, SamplingParams(temperature=0.01, top_p=0.9))
    judge([work], output, noise.pick)
    assert work.sequence.sampler.draws == 0
