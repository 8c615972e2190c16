"""Works whose pass drew without filters, and the tokens that sampling with filters draws."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from paceline.accept.coupled import accept_coupled
from paceline.draft import Draft
from paceline.kernels import noise
from paceline.kernels.base import Output
from paceline.sampling.sampler import Sampler
from paceline.types import Grammar, SamplingParams, Speculation

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
    for row in arbitrary:  # anything may stand there, the best token above all
        drawn[row] = int(logits[row].argmax()) if seed % 2 else int(torch.randint(VOCAB, (1,), generator=random))
    return work, Output(logits, logits.argmax(-1).to(torch.int32), drawn=drawn), wanted


def _on_path(row: int, tokens: list[int], drawn: list[int]) -> bool:
    """True if the pass drew every token up to this row."""
    node = row - 1
    above = PARENTS[node] + 1
    return tokens[node] == drawn[above] and (above == 0 or _on_path(above, tokens, drawn))


def check_filters(judge: Callable, params: SamplingParams, *, seeds: int) -> int:
    """Check that judged tokens are those of sampling with filters. Return how often a filter changed a token."""
    redrawn = 0
    for seed in range(seeds):
        work, output, wanted = case(seed, params)
        [verdict] = judge([work], output, noise.pick).values()
        assert verdict == accept_coupled(work.draft, wanted.tolist())
        assert work.sequence.sampler.draws <= len(verdict.path) + 1, "rows off the path are not drawn"
        redrawn += verdict.token != output.drawn[verdict.path[-1] + 1 if verdict.path else 0]
    return redrawn


def check_best_tokens(judge: Callable) -> None:
    """Check that rows whose best token was drawn are not drawn again."""
    work, output, _ = case(0, SamplingParams(temperature=0.01, top_p=0.9))
    judge([work], output, noise.pick)
    assert work.sequence.sampler.draws == 0


class Thirds:
    """A grammar that forbids every third token, and counts the masks that it is asked for."""

    masks = 0

    def fitting(self, path: tuple[int, ...]) -> int:
        return next((i for i, token in enumerate(path) if token % 3 == 0), len(path))

    def allowed(self, path: tuple[int, ...]) -> torch.Tensor:
        self.masks += 1
        return torch.arange(VOCAB) % 3 != 0


def check_grammars(judge: Callable) -> None:
    """Check that judged tokens are those drawn with masks, and that masks are for forbidden tokens alone."""
    masks = 0
    for temperature in (0.0, 1.0):
        for seed in range(40):
            work, output, _ = case(seed, SamplingParams(temperature=temperature))
            masked = output.logits.masked_fill(torch.arange(VOCAB) % 3 == 0, -torch.inf)
            sampler = work.sequence.sampler
            wanted = sampler.draw(masked, COMMITTED + DEPTHS, noise.pick).tolist()
            sampler.params = SamplingParams(temperature=temperature, grammar=Grammar.json_object())
            sampler.grammar = Thirds()
            if temperature == 0:
                output = Output(output.logits, output.argmax, drawn=output.argmax.tolist())
            [verdict] = judge([work], output, noise.pick).values()
            assert verdict == accept_coupled(work.draft, wanted)
            if output.drawn[0] % 3 and not verdict.path:
                assert not sampler.grammar.masks
            masks += sampler.grammar.masks
    assert masks
