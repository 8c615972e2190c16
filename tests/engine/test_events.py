"""What leaves the engine: log-probabilities on the right rows, origins, text, statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.engine import host
from paceline.errors import InvalidRequest
from paceline.kernels.base import PAGE_SIZE
from paceline.sampling.sampler import logprobs_of
from paceline.types import Finish, Logprob, Origin, Request, SamplingParams
from tests.odd_drafters import Scripted
from tests.rig import build
from tests.rig_drafters import RIGS, Made, always
from tests.runs import Run, Told, prompt, run
from tests.tiny_models import VOCAB, tiny_tokenizer
from tests.toy import ToyForward

PROMPT = prompt(40, seed=2)
DRAFTERS: Mapping[str, Mapping[str, Made]] = {"plain": {}, "noisy": {"noisy": RIGS["model"]["noisy"]}}
both = pytest.mark.parametrize("drafters", DRAFTERS.values(), ids=DRAFTERS)


def tell(drafters: Mapping[str, Made], **params: object) -> Told:
    sampling = SamplingParams(**{"max_tokens": 25, "seed": 1, **params})
    rig = build("toy", drafters, tokenizer=tiny_tokenizer())
    return run(rig, [Request(id="a", prompt=PROMPT, sampling=sampling)])["a", 0]


def scores(context: list[int]) -> torch.Tensor:
    forward = ToyForward(num_pages=1)
    return torch.from_numpy(forward.logits_after(np.array(context))).log_softmax(-1)


@both
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_logprobs_are_the_target_s_own(drafters: Mapping[str, Made], temperature: float) -> None:
    """Before bias and temperature, of the token at hand and of the best."""
    told = tell(drafters, temperature=temperature, logprobs=3, logit_bias={7: 1.5})
    assert len(told.logprobs) == len(told.tokens)
    for i, each in enumerate(told.logprobs):
        expected = scores([*PROMPT, *told.tokens[:i]])
        assert each.token == told.tokens[i]
        assert each.logprob == pytest.approx(float(expected[each.token]), abs=1e-5)
        assert each.rank == int((expected > expected[each.token]).sum())
        best = expected.topk(3)
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [score for _, score in each.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@both
@pytest.mark.parametrize("rows", [5, 32, 256])
def test_prompt_logprobs(drafters: Mapping[str, Made], rows: int) -> None:
    """One for each token of the prompt but the first, however it was cut into chunks, also when all of it is cached."""
    sampling = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=2)
    rig = build("toy", drafters, max_step_tokens=rows)
    for name in "ab":
        told = run(rig, [Request(id=name, prompt=PROMPT, sampling=sampling)])[name, 0]
        assert told.prompt_logprobs is not None
        assert told.prompt_logprobs[0] is None
        assert len(told.prompt_logprobs) == len(PROMPT)
        for i, each in enumerate(told.prompt_logprobs[1:], start=1):
            assert each is not None
            expected = scores(list(PROMPT[:i]))
            assert each.token == PROMPT[i]
            assert each.logprob == pytest.approx(float(expected[PROMPT[i]]), abs=1e-5)
            assert len(each.top) == 2


@both
@pytest.mark.parametrize("rows", [5, 256])
@pytest.mark.parametrize("first", [1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE + 3])
def test_tokens_before_the_first_scored_one_come_from_the_cache(
    drafters: Mapping[str, Made], rows: int, first: int
) -> None:
    """The scores are those of a prompt that is read as a whole. The row before the first scored token is computed."""
    sampling = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)
    rig = build("toy", drafters, max_step_tokens=rows)
    whole = run(rig, [Request(id="whole", prompt=PROMPT, sampling=sampling)])["whole", 0]
    part = run(rig, [Request(id="part", prompt=PROMPT, sampling=sampling, scores_from=first)])["part", 0]
    assert whole.prompt_logprobs is not None
    assert part.prompt_logprobs == (*(None,) * first, *whole.prompt_logprobs[first:])
    assert (whole.stats.cached_tokens, part.stats.cached_tokens) == (0, (first - 1) // PAGE_SIZE * PAGE_SIZE)


def test_the_first_scored_token_is_one_of_the_prompt() -> None:
    with pytest.raises(InvalidRequest, match="scores_from must be between 0 and 40, not 41"):
        Request(id="a", prompt=PROMPT, scores_from=41)


@both
@pytest.mark.parametrize("rows", [7, 256])
def test_samples_share_the_scores_of_their_prompt(
    drafters: Mapping[str, Made], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is scored once for all samples, and read once but for its last page. Nothing that is said changes."""
    scored: list[int] = []

    def counted(logits: torch.Tensor, tokens: list[int], top: int) -> list[Logprob]:
        scored.extend(tokens)
        return logprobs_of(logits, tokens, top)

    monkeypatch.setattr(host, "logprobs_of", counted)
    sampling = SamplingParams(max_tokens=9, seed=3, prompt_logprobs=1, n=5)
    bare = Request(id="bare", prompt=PROMPT, sampling=replace(sampling, prompt_logprobs=None))
    expected = run(build("toy", drafters, max_step_tokens=rows), [bare])
    told = run(build("toy", drafters, max_step_tokens=rows), [Request(id="a", prompt=PROMPT, sampling=sampling)])
    assert scored == list(PROMPT[1:])
    assert len({told["a", i].prompt_logprobs for i in range(5)}) == 1
    assert [told["a", i].tokens for i in range(5)] == [expected["bare", i].tokens for i in range(5)]
    shared = (len(PROMPT) - 1) // PAGE_SIZE * PAGE_SIZE
    assert [told["a", i].stats.cached_tokens for i in range(5)] == [0, *[shared] * 4]


def test_samples_that_wait_for_scores_hold_nobody_up() -> None:
    rig = build("toy", max_step_tokens=8)
    scoring = Request(id="long", prompt=PROMPT, sampling=SamplingParams(max_tokens=2, prompt_logprobs=0, n=3))
    play = Run(rig)
    play.submit([scoring, Request(id="other", prompt=PROMPT[:2], sampling=SamplingParams(max_tokens=9))])
    play.step()
    assert rig.engine.snapshot().running == 2, "the first sample, and the request that came later"
    assert rig.engine.snapshot().waiting == 2
    rig.engine.abort("long")
    while rig.engine.has_work:
        play.step()
    assert {told.finish for (name, _), told in play.told.items() if name == "long"} == {Finish.ABORT}


def test_prompt_logprobs_survive_a_preemption() -> None:
    rig = build("toy", num_pages=11, max_step_tokens=16)
    sampling = SamplingParams(max_tokens=50, temperature=0, prompt_logprobs=0)
    requests = [Request(id=str(i), prompt=prompt(50, seed=i), sampling=sampling) for i in range(4)]
    told = run(rig, requests)
    assert rig.engine.stats.preemptions > 0
    for request in requests:
        scored = told[request.id, 0].prompt_logprobs
        assert scored is not None
        assert [each.token for each in scored[1:] if each is not None] == list(request.prompt[1:])


def test_more_logprobs_than_tokens() -> None:
    told = tell({}, logprobs=100)
    assert all(len(each.top) == VOCAB for each in told.logprobs)


def test_none_unless_asked_for() -> None:
    told = tell({})
    assert told.logprobs == []
    assert told.prompt_logprobs is None


def test_origins() -> None:
    plain = tell({}, temperature=0)
    assert set(plain.origins) == {Origin.PLAIN}
    drafter = Scripted([[*PROMPT, *plain.tokens]], wrong=0.0)
    told = tell({"scripted": always(drafter)}, temperature=0)
    accepted = told.origins.count(Origin.ACCEPTED)
    assert accepted == told.stats.accepted > 0
    assert told.origins.count(Origin.BONUS) == told.stats.rounds
    assert told.origins.count(Origin.PLAIN) == told.stats.steps - told.stats.rounds


@both
def test_statistics_add_up(drafters: Mapping[str, Made]) -> None:
    rig = build("toy", drafters, tokenizer=tiny_tokenizer())
    requests = [
        Request(id=str(i), prompt=prompt(20 + i, seed=0), sampling=SamplingParams(seed=i, max_tokens=20, n=2))
        for i in range(4)
    ]
    told = run(rig, requests)
    for (request_id, _), each in told.items():
        stats = each.stats
        assert stats.prompt_tokens == 20 + int(request_id)
        assert stats.output_tokens == len(each.tokens) == 20
        assert stats.steps >= stats.rounds
        assert stats.drafted >= stats.accepted == sum(stats.accepted_by_position)
        assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)
        assert stats.tokens_per_step == 20 / stats.steps
        assert stats.cached_tokens % PAGE_SIZE == 0
        assert 0 < stats.time_to_first <= stats.time_total
    engine = rig.engine.stats
    assert engine.output_tokens == 160
    assert engine.finished == 8
    assert engine.drafted == sum(each.stats.drafted for each in told.values())
    assert engine.accepted == sum(each.stats.accepted for each in told.values())
    assert bool(drafters) == bool(engine.accepted)
    for name in ("time_verify", "time_draft"):
        shared = sum(getattr(each.stats, name) for each in told.values())
        assert shared == pytest.approx(getattr(engine, name))


def test_time_is_that_of_the_clock() -> None:
    times = iter(range(10_000))
    rig = build("toy", clock=lambda: float(next(times)))
    going = Run(rig)
    going.submit([Request(id="a", prompt=(1, 2), sampling=SamplingParams(max_tokens=3))])
    stats = going.finish()["a", 0].stats
    assert 1 < stats.time_to_first < stats.time_total
    assert 0 <= stats.time_queued < stats.time_to_first
    engine = rig.engine.stats
    assert engine.time_host == engine.time_plan + engine.time_accept + engine.time_emit
    assert engine.time_draft == engine.steps == 3


def test_text_is_never_half_a_character() -> None:
    """Halves of an é come as one character or, at the very end, as a replacement for each."""
    tokenizer = tiny_tokenizer()
    told = tell(DRAFTERS["noisy"], allowed_tokens=(28, 29, 3), temperature=3.0, max_tokens=60)
    assert "é" in told.text
    assert told.text == tokenizer.decode(told.tokens, continuation=True)


def test_the_members_of_a_portfolio_are_named_and_counted() -> None:
    rig = build("toy", {"portfolio": RIGS["portfolio"]["portfolio-model"]})
    events = []
    rig.engine.submit(Request(id="a", prompt=PROMPT, sampling=SamplingParams(max_tokens=40, temperature=0)))
    while rig.engine.has_work:
        events += rig.engine.step()
    stats = events[-1].stats
    assert stats is not None
    assert stats.drafter == "portfolio"
    assert {event.drafter for event in events if event.drafted} == {*stats.by_member}
    assert {name for names in stats.by_member for name in names.split("+")} == {"ngram", "model"}
    assert tuple(map(sum, zip(*stats.by_member.values(), strict=True))) == (stats.drafted, stats.accepted)
    assert stats.accepted > 0
