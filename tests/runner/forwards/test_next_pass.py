"""A plain step's next pass begins while the host still looks at the drawn tokens: results stay the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.kernels.base import PAGE_SIZE, Output
from paceline.runner.batch import Share, build_batch
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.lanes import Lanes
from paceline.sampling.sampler import Stream, noise_keys
from tests.kernels.tiny_forward import RUNNABLE
from tests.runner.heads.test_prefetch import Pair, small
from tests.runner.heads.test_torch import CONFIG, INTEGERS

PROMPT, STEPS = 5, 20
TABLES = torch.arange(20).view(4, 5)  # pages of four sequences


@dataclass
class Decoding:
    """Sequences that decode plainly, one token a pass."""

    forward: CompiledForward
    lanes: Lanes
    length: int
    inverse_temperature: float

    @classmethod
    def of(cls, *, threads: int = 2, sequences: int = 1, inverse_temperature: float = 0.0) -> Decoding:
        forward = CompiledForward(CONFIG, dict(INTEGERS), num_pages=20, threads=threads, taps=(0, 2))
        lanes = Lanes(count=sequences, max_context=64, max_draft=8)
        random = torch.Generator().manual_seed(3)
        lanes.tokens_np[:] = torch.randint(0, CONFIG.vocab_size, lanes.tokens_np.shape, generator=random).numpy()
        lanes.pages_np[:] = TABLES[:sequences].numpy()
        forward(build_batch(lanes, [Share(lane, 0, PROMPT) for lane in range(sequences)]))
        return cls(forward, lanes, PROMPT, inverse_temperature)

    def step(self, *, features: bool = False, draft: Draft | None = None) -> Output:
        """Compute the last token of every sequence, and append the token drawn after it."""
        factor, lanes = self.inverse_temperature, range(len(self.lanes.lengths))
        guess = draft or Draft()
        shares = [Share(lane, self.length, 1, guess, seed=7 + lane, inverse_temperature=factor) for lane in lanes]
        for lane in lanes:
            self.lanes.write(lane, self.length + 1, guess.tokens)
        output = self.forward(build_batch(self.lanes, shares, features=features))
        assert output.drawn is not None
        for lane in lanes:
            self.lanes.write(lane, self.length + 1, [output.drawn[lane * (1 + len(guess))]])
        self.length += 1
        return output

    @property
    def prefetched(self) -> int:
        return self.forward.program.prefetched

    def results(self, output: Output, sequence: int = 0) -> list[Tensor]:
        """Copy what a pass has left: logits, hidden states, keys and values of all positions so far."""
        positions = torch.arange(self.length)
        slots = TABLES[sequence][positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        kept = [output.logits, output.argmax, *([] if output.features is None else [output.features])]
        return [each.clone() for each in (*kept, *self.forward.kv.read(slots))]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


MIXES = [(0.0, 1, False), (1.0, 1, True), (0.0, 3, True), (1.0, 3, False)]  # every pair of values somewhere


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize(("inverse_temperature", "sequences", "features"), MIXES)
def test_prefetched_passes_are_the_same_passes(
    variant: str, inverse_temperature: float, sequences: int, features: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    pair, alone = (Decoding.of(sequences=sequences, inverse_temperature=inverse_temperature, threads=n) for n in (2, 1))
    for _ in range(STEPS):
        one, other = pair.step(features=features), alone.step(features=features)
        assert equal(pair.results(one, sequences - 1), alone.results(other, sequences - 1))
    # All but the first pass, and those whose tokens are the first of a page: nobody has reserved such a page before.
    assert pair.prefetched == STEPS - 1 - (PROMPT + STEPS - 1) // PAGE_SIZE
    assert alone.prefetched == 0  # a pool of one thread has no helpers


def test_logits_of_a_pass_stay_while_the_next_one_runs() -> None:
    decoding = Decoding.of()
    for _ in range(8):
        output = decoding.step()
        logits = output.logits.clone()
        for _ in range(20):
            assert torch.equal(output.logits, logits)
            assert int(output.argmax[0]) == int(logits[0].argmax())
    assert decoding.prefetched == 7


def _other_token(decoding: Decoding) -> Output:
    decoding.lanes.tokens_np[0, decoding.length] ^= 1
    return decoding.step()


CHANGES: dict[str, Callable[[Decoding], Output]] = {
    "another token": _other_token,
    "hidden states": lambda decoding: decoding.step(features=True),
    "a draft": lambda decoding: decoding.step(draft=Draft((3, 4))),
    "a tree": lambda decoding: decoding.step(draft=Draft((3, 4, 5), (-1, -1, 0))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_pass_is_computed_as_usual(change: str) -> None:
    found = []
    for threads in (2, 1):
        decoding = Decoding.of(threads=threads)
        decoding.step()
        output = CHANGES[change](decoding)
        assert decoding.prefetched == 0
        found.append([*decoding.results(output), *decoding.results(decoding.step())])
    assert equal(*found)


def test_tokens_that_the_host_draws_cancel_nothing() -> None:
    """A short work of the caller runs beside the pass in flight."""
    decoding, alone = Decoding.of(), Decoding.of(threads=1)
    keys = torch.from_numpy(noise_keys(3, torch.arange(1).numpy(), Stream.TOKEN))
    for _ in range(8):
        one, other = (each.forward.pick(each.step().logits, torch.ones(1), keys).tolist() for each in (decoding, alone))
        assert one == other
    assert decoding.prefetched == 7


def test_another_program_cancels_the_pass_in_flight() -> None:
    """The next pass of the target is then computed anew, with the same result."""
    found = []
    for threads in (2, 1):
        pair = Pair.of(small(), threads=threads)
        shares = [Share(0, 19, 1)]
        tokens = [*(pair.target(build_batch(pair.lanes, shares)).drawn or ())]
        pair.lanes.write(0, 20, tokens)
        pair.draft([Share(0, 19, 1, seed=1)], torch.ones((1, 3 * CONFIG.hidden_size)))
        logits = pair.target(build_batch(pair.lanes, [Share(0, 20, 1)])).logits.clone()
        assert pair.target.program.prefetched == 0
        found.append(logits)
    assert torch.equal(*found)


def test_two_models_on_the_same_threads_cancel_each_other() -> None:
    one, other, alone = Decoding.of(), Decoding.of(inverse_temperature=1.0), Decoding.of(threads=1)
    for _ in range(8):
        found = one.step()
        other.step()
        assert equal(one.results(found), alone.results(alone.step()))
    assert one.prefetched == other.prefetched == 0


def test_prefetching_pauses_after_misses_and_comes_back() -> None:
    """Ten passes that are never asked for; then they are asked for again, after at most 32 passes."""
    decoding = Decoding.of()
    for _ in range(10):
        decoding.step()
        decoding.length -= 1  # the same pass again
    assert decoding.prefetched == 0
    for _ in range(4):
        for _ in range(9):
            decoding.step()
        decoding.length -= 9
    assert decoding.prefetched > 0


def test_a_forward_may_be_freed_while_its_next_pass_runs() -> None:
    for _ in range(8):
        decoding = Decoding.of()
        decoding.step()
        del decoding


def test_a_forked_child_computes_the_pass_that_its_parent_prefetched() -> None:
    decoding, alone = Decoding.of(), Decoding.of(threads=1)
    decoding.step()
    alone.step()
    expected = alone.results(alone.step())
    child = os.fork()
    if not child:
        found = decoding.results(decoding.step())
        os._exit(0 if equal(found, expected) and decoding.prefetched == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert equal(decoding.results(decoding.step()), expected)
    assert decoding.prefetched == 1
