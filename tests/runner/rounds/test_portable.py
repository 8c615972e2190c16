"""Steps on a device, without an engine: what a launch does to a lane, and what is collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from paceline.drafters.base import Ask
from paceline.drafters.model import ModelOnDevice
from paceline.drafters.ngram import LookupOnDevice, NgramDrafter
from paceline.kernels.base import PAGE_SIZE, Batch, Forward, Output
from paceline.runner.rounds.portable import PortableRounds
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter, Landed, Seat, read_landed
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams
from tests.odd_drafters import AgainOnDevice
from tests.runs import prompt
from tests.tiny_models import TARGET, VOCAB, Model
from tests.toy import ToyForward

PAGES = 40


class Recording(ToyForward):
    """Writes down the positions of every pass."""

    def __init__(self, **options: int) -> None:
        super().__init__(num_pages=PAGES, **options)
        self.passes: list[list[int]] = []

    def __call__(self, batch: Batch) -> Output:
        self.passes.append(batch.positions.tolist())
        return super().__call__(batch)


def sampler(**params: float | int) -> Sampler:
    given = SamplingParams.of(**{"temperature": 0, **params})
    return Sampler(given, seed=given.seed or 0, vocab_size=VOCAB, eos_ids=())


def rounds(drafters: Mapping[str, DeviceDrafter] | None = None, *, target: Forward | None = None) -> PortableRounds:
    target = target or TARGET.forward("toy", num_pages=PAGES)
    made = PortableRounds(target, lanes=4, max_context=100, max_draft=8, drafters=drafters)
    for lane in range(4):
        made.write(lane, np.array([1]), sampler())
        made.set_pages(lane, 0, range(7 * lane, 7 * lane + 7))
    return made


def a_model(vocab_size: int) -> ModelOnDevice:
    return ModelOnDevice(Model(seed=5, vocab_size=vocab_size).forward("toy", num_pages=PAGES))


def enter(made: PortableRounds, lane: int, tokens: Sequence[int], by: Sampler | None = None) -> None:
    made.write(lane, np.array(tokens), by or sampler())
    made.set_pages(lane, 0, range(7 * lane, 7 * lane + 7))


def truth(tokens: Sequence[int], count: int, by: Sampler | None = None) -> list[int]:
    """What plain decoding says after these, token by token."""
    forward, by, text = ToyForward(num_pages=1), by or sampler(), list(tokens)
    for _ in range(count):
        logits = torch.from_numpy(forward.logits_after(np.array(text)))[None]
        text.append(int(by.draw(logits, np.array([len(text)]), forward.pick)[0]))
    return text[len(tokens) :]


def step(made: PortableRounds, seats: Sequence[Seat], drafter: str | None = None) -> list[Landed]:
    return made.collect(made.launch([], seats, drafter=drafter, context=100))[1]


def read(made: PortableRounds, lane: int, tokens: Sequence[int], by: Sampler | None = None, *, drafts: bool) -> Landed:
    enter(made, lane, tokens, by)
    chunk = Chunk(lane, 0, len(tokens), draws=True, drafts=drafts)
    (landed,), seats, _ = made.collect(made.launch([chunk], [], drafter="model" if drafts else None, context=100))
    assert landed is not None
    assert seats == []
    return landed


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1, "seed": 2**64 - 1}, {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.01}],
)
def test_plain_steps_say_what_sampling_says(params: dict[str, float]) -> None:
    made, text, by = rounds(), prompt(20, seed=1), sampler(**params)
    said = [*read(made, 2, text, by, drafts=False).tokens]
    for _ in range(5):
        (landed,) = step(made, [Seat(2, 0)])
        assert (landed.accepted, landed.drafted) == (0, ())
        said += landed.tokens
    assert said == truth(text, 6, by)


def test_prompts_in_chunks_beside_a_round() -> None:
    made, first, second = rounds(), prompt(20, seed=1), prompt(30, seed=2)
    said = [*read(made, 0, first, drafts=False).tokens]
    enter(made, 1, second)
    for start, count in ((0, 7), (7, 16), (23, 7)):
        chunk = Chunk(1, start, count, draws=start + count == 30)
        (drawn,), (seat,), times = made.collect(made.launch([chunk], [Seat(0, 0)], drafter=None, context=40))
        said += seat.tokens
        assert (drawn is not None) == chunk.draws
        assert times.step >= times.verify > 0
    assert said == truth(first, 4)
    assert drawn is not None
    assert list(drawn.tokens) == truth(second, 1)


@pytest.mark.parametrize("length", [1, 2, 17, 40])
def test_a_model_drafts(length: int) -> None:
    """One that knows the target is always right, and reads the last two tokens before it drafts."""
    model, text = Recording(), prompt(length, seed=1)
    made = rounds({"model": ModelOnDevice(model)})
    said = [*read(made, 0, text, drafts=True).tokens]
    for limit in (3, 1, 4):
        at = length + len(said)
        model.passes.clear()
        (landed,) = step(made, [Seat(0, limit)], "model")
        assert landed.accepted == limit
        assert landed.drafted == landed.tokens[:-1]
        assert model.passes == [[max(at - 2, 0), at - 1], *([at + turn] for turn in range(limit - 1))]
        said += landed.tokens
    assert said == truth(text, len(said))


def test_seats_have_limits_of_their_own() -> None:
    made, texts = rounds({"model": ModelOnDevice(Recording())}), [prompt(10 + lane, seed=lane) for lane in range(3)]
    said = [[*read(made, lane, text, drafts=True).tokens] for lane, text in enumerate(texts)]
    for limits in ((4, 0, 2), (1, 3, 0)):
        landed = step(made, [Seat(lane, limit) for lane, limit in enumerate(limits)], "model")
        assert tuple(len(each.drafted) for each in landed) == limits
        for lane, each in enumerate(landed):
            said[lane] += each.tokens
        # Who went plain has not been read: it is caught up with before the next round.
        read_so_far = [len(text) + len(tokens) - 2 for text, tokens in zip(texts, said, strict=True)]
        behind = [Chunk(i, 0, count, draws=False, target=False, drafts=True) for i, count in enumerate(read_so_far)]
        assert made.collect(made.launch(behind, [], drafter="model", context=50))[:2] == ([None] * 3, [])
    assert said == [truth(text, len(tokens)) for text, tokens in zip(texts, said, strict=True)]


@pytest.mark.unwatched
@pytest.mark.parametrize("vocab", [80, VOCAB, 128])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_drafter_that_is_wrong(vocab: int, temperature: float) -> None:
    made, text = rounds({"model": a_model(vocab)}), prompt(20, seed=1)
    by = sampler(temperature=temperature, seed=3)
    said = [*read(made, 0, text, by, drafts=True).tokens]
    while len(said) < 20:
        (landed,) = step(made, [Seat(0, 4)], "model")
        assert len(landed.drafted) == 4
        assert landed.tokens[:-1] == landed.drafted[: landed.accepted]
        said += landed.tokens
    assert said == truth(text, len(said), by)


def test_lookup_drafts_what_the_drafter_on_the_host_does() -> None:
    made, text = rounds({"ngram": LookupOnDevice(min_ngram=1, max_ngram=3)}), prompt(24, seed=4, repeat=True)
    host = NgramDrafter(min_ngram=1, max_ngram=3)
    tokens = [*text, *read(made, 0, text, drafts=False).tokens]
    host.start(0, 0, np.array(tokens))
    drafted = 0
    for _ in range(12):
        (expected,) = host.propose([Ask(0, 0, np.array(tokens), 5, sampler())])
        (landed,) = step(made, [Seat(0, 5)], "ngram")
        assert landed.drafted == expected.tokens
        tokens += landed.tokens
        drafted += len(landed.drafted)
    assert drafted > 10
    assert tokens[24:] == truth(text, len(tokens) - 24)


@pytest.mark.parametrize("stops", [False, True])
def test_a_device_drafter_from_outside(stops: bool) -> None:
    """It writes tokens with operations of its own, and may stop short."""
    made, text = rounds({"again": AgainOnDevice(finds_fewer=stops)}), prompt(20, seed=1)
    said = [*read(made, 0, text, drafts=False).tokens]
    for limit in (3, 1, 4):
        last = said[-1]
        (landed,) = step(made, [Seat(0, limit)], "again")
        assert landed.drafted == (last,) * (limit // 2 if stops else limit)
        said += landed.tokens
    assert made.readers == []
    assert said == truth(text, len(said))


def test_a_lane_forgets_whoever_had_it() -> None:
    """Pages above all: those of the former sequence may be somebody else's by now."""
    made = rounds()
    read(made, 1, prompt(60, seed=1), drafts=False)
    made.write(1, np.array(prompt(5, seed=2)), sampler())
    made.set_pages(1, 0, [39])
    made.launch([], [], drafter=None, context=1)
    assert made._state.pages[1].tolist() == [39] + [PAGES] * (made._state.pages.shape[1] - 1)
    made.set_pages(1, 1, [38, 37])
    made.launch([], [], drafter=None, context=1)
    assert made._state.pages[1, :4].tolist() == [39, 38, 37, PAGES]


def test_a_device_writes_to_pages_of_its_lanes_alone() -> None:
    target, model = ToyForward(num_pages=PAGES), ToyForward(num_pages=PAGES)
    made = rounds({"model": ModelOnDevice(model)}, target=target)
    read(made, 1, prompt(20, seed=1), drafts=True)
    step(made, [Seat(1, 8)], "model")
    for kv in (target._kv, model._kv):
        assert {*(np.nonzero(kv.positions >= 0)[0] // PAGE_SIZE).tolist()} == {7, 8}


def test_coins_instead_of_the_target() -> None:
    made, text = rounds({"model": a_model(VOCAB)}), prompt(20, seed=1)
    made.synthetic_acceptance = 1.0
    read(made, 0, text, drafts=True)
    (landed,) = step(made, [Seat(0, 4)], "model")
    assert landed.accepted == 4
    assert landed.tokens[:4] == landed.drafted


def test_what_acceptance_writes() -> None:
    assert read_landed([0, 0, 7, 21]) == Landed((), (), (7,))
    assert read_landed([1, 2, 5, 7, 0, 0, 5, 6, 0, 30]) == Landed((0,), (5, 6), (5, 7))
    assert read_landed([3, 3, 5, 6, 8, 7, 5, 6, 8, 30]) == Landed((0, 1, 2), (5, 6, 8), (5, 6, 8, 7))
