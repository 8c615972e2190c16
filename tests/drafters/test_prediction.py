"""Following a prediction: as long as the answer says the same, and again after it said something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from paceline.drafters.base import Ask
from paceline.drafters.ngram import LookupOnDevice
from paceline.drafters.prediction import Prediction, PredictionDrafter, Trail
from paceline.kernels.lookup_reference import FAR_MATCH_TOKENS, NEAR_TOKENS
from paceline.sampling.sampler import Sampler
from paceline.types import Origin, Request, SamplingParams, Speculation
from tests.laws import under_law
from tests.rig import build
from tests.rig_drafters import DEVICE_RIGS, RIGS
from tests.runs import plain, prompt, run, tokens_of

TEXT = tuple(range(100, 140))  # every token once


def after(answer: Sequence[int], prediction: Sequence[int] = TEXT, *, count: int = 3) -> tuple[int, ...]:
    trail = Trail(Prediction(prediction))
    trail.advance(answer)
    return trail.ahead(count)


def test_it_begins_at_the_beginning() -> None:
    assert after([]) == (100, 101, 102)
    assert after([100, 101]) == (102, 103, 104)
    assert after([], []) == ()


def test_at_the_end_there_is_nothing_left() -> None:
    assert after(TEXT[:-1]) == (139,)
    assert after(TEXT) == ()
    assert after([*TEXT, 1, 2]) == ()


@pytest.mark.parametrize(
    "answer",
    [
        [1, 2, *TEXT[:5]],  # said before
        [*TEXT[:3], 1, *TEXT[4:5]],  # said instead
        [*TEXT[:3], 1, 2, 3, 4, *TEXT[3:5]],  # said in between
        [*TEXT[:3], *TEXT[4:5]],  # left out
        [*TEXT[:20], 1, *TEXT[:5]],  # said again from the beginning
    ],
)
def test_it_finds_the_place_again(answer: list[int]) -> None:
    assert after(answer) == (105, 106, 107)


def test_where_the_answer_goes_its_own_way_it_is_silent() -> None:
    assert after([100, 101, 1]) == ()
    assert after([100, 101, 1, 2, 3, 4, 5, 6, 7, 8, 9]) == ()
    assert after([1]) == ()


def test_far_away_a_single_token_says_too_little() -> None:
    far = 3 + NEAR_TOKENS + 5
    for length in range(1, FAR_MATCH_TOKENS + 1):
        answer = [*TEXT[:3], 1, *TEXT[far : far + length]]
        assert after(answer, count=1) == ((TEXT[far + length],) if length >= FAR_MATCH_TOKENS else ())


def test_of_several_places_the_longer_match_counts_then_the_nearer() -> None:
    text = [1, 2, 9, 50, 51, 3, 9, 60, 61, 4, 9, 70]
    assert after([1, 2, 8, 9], text, count=1) == (50,)  # the nearest 9
    assert after([1, 2, 8, 3, 9], text, count=1) == (60,)
    assert after([*text[:10], 8, 4, 9], text, count=1) == (70,)


def test_a_wrong_place_does_not_lead_away() -> None:
    """A token that stands elsewhere by chance: the place where the answer last followed is still what is near."""
    text = [*TEXT[:12], 7, *TEXT[12:]]
    assert after([*TEXT[:5], 1, 7], text, count=1) == (TEXT[12],)
    assert after([*TEXT[:5], 1, 7, 2, TEXT[3]], text, count=1) == (TEXT[4],)


def test_a_place_that_proves_right_does() -> None:
    assert after([*TEXT[:5], 1, *TEXT[20:23], 1, TEXT[25]], count=1) == (TEXT[26],)


def test_a_text_that_repeats_itself_is_followed_step_by_step() -> None:
    assert after([1] * 12, [1] * 20 + [2], count=20) == (1,) * 8 + (2,)


@hypothesis.given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
@hypothesis.settings(max_examples=200, deadline=None)
def test_what_lies_ahead_is_of_the_prediction(text: list[int], answer: list[int], step: int) -> None:
    """However the tokens arrive; and where it goes on, the token before stands in the answer, too."""
    trail = Trail(Prediction(text))
    for start in range(0, len(answer), step):
        trail.advance(answer[start : start + step])
    whole = Trail(Prediction(text))
    whole.advance(answer)
    ahead = trail.ahead(len(text))
    assert ahead == whole.ahead(len(text))
    assert ahead == tuple(text[len(text) - len(ahead) :]) if ahead else True
    if answer and ahead:
        assert text[len(text) - len(ahead) - 1] == answer[-1]


# In the engine.

SAMPLING = SamplingParams(temperature=1, seed=4, max_tokens=40)


def ask(prediction: Sequence[int] = (), *, drafter: str | None = None, id: str = "r") -> Request:
    speculation = Speculation(drafter=drafter)
    return Request(
        id=id, prompt=prompt(9, seed=1), sampling=SAMPLING, speculation=speculation, prediction=tuple(prediction)
    )


@pytest.fixture(scope="module")
def answer() -> list[int]:
    return tokens_of(run(build("toy"), plain([ask()])))["r", 0]


def test_with_a_right_prediction_rounds_are_few(answer: list[int]) -> None:
    rig = build("toy", RIGS["prediction"], max_draft=16)
    told = run(rig, [ask(answer)])["r", 0]
    assert told.tokens == answer
    assert told.stats.rounds <= 4
    assert told.stats.prediction_accepted == told.stats.accepted == told.origins.count(Origin.ACCEPTED) > 30
    assert told.stats.prediction_rejected == 0
    assert told.stats.off_reason is None


def test_what_comes_after_a_stop_is_not_counted(answer: list[int]) -> None:
    stop = next(token for token in answer[10:] if token not in answer[:10])
    asked = ask(answer)
    rig = build("toy", RIGS["prediction"], max_draft=16)
    told = run(rig, [replace(asked, sampling=replace(SAMPLING, stop_ids=(stop,)))])["r", 0]
    assert told.tokens == answer[: answer.index(stop) + 1]
    assert told.stats.prediction_accepted == told.stats.accepted == told.origins.count(Origin.ACCEPTED)
    assert told.stats.drafted == told.stats.accepted, "tokens behind the stop are not drafted, either"


def test_after_an_edit_it_is_followed_again(answer: list[int]) -> None:
    edited = [*answer[:12], 1, 2, 3, *answer[15:25], *answer[28:]]
    told = run(build("toy", RIGS["prediction"], max_draft=16), [ask(edited)])["r", 0]
    assert told.tokens == answer
    assert told.stats.prediction_accepted > 22
    assert told.stats.prediction_rejected > 0


def test_where_it_is_silent_the_other_drafter_drafts(answer: list[int]) -> None:
    """Half of the answer is predicted; a draft model knows the rest."""
    alone = run(build("toy", RIGS["prediction"]), [ask(answer[:20])])["r", 0]
    rig = build("toy", {"good": RIGS["model"]["good"], **RIGS["prediction"]})
    told = run(rig, [ask(answer[:20])])["r", 0]
    assert told.tokens == alone.tokens == answer
    assert told.stats.drafter == "prediction+good"
    assert told.stats.prediction_accepted == alone.stats.prediction_accepted > 10
    assert told.stats.accepted > told.stats.prediction_accepted + 10
    assert told.stats.off_reason is alone.stats.off_reason is None


def test_each_drafter_has_its_own_pace(answer: list[int]) -> None:
    """A prediction that is never right pauses itself, and not the drafter beside it."""
    rig = build("toy", {"good": RIGS["model"]["good"], **RIGS["prediction"]}, acceptance_window=1)
    wrong = [token for right in answer for token in (right, (right + 1) % 97)]
    told = run(rig, [ask(wrong)])["r", 0]
    assert told.tokens == answer
    assert told.stats.pauses > 0
    assert told.stats.prediction_accepted < 5
    assert told.origins.count(Origin.PLAIN) <= 2  # the first token, and the last


def test_alone_it_looks_in_prompt_and_output() -> None:
    """With nothing right predicted, the drafts are those of `ngram`, and none counts as predicted."""
    loop = replace(ask(), prompt=prompt(24, seed=4, repeat=True), sampling=replace(SAMPLING, temperature=0))
    plainly = tokens_of(run(build("toy"), plain([loop])))["r", 0]
    ngram = run(build("toy", {"ngram": RIGS["ngram"]["ngram"]}), [loop])["r", 0]
    unseen = next(token for token in range(97) if token not in (*loop.prompt, *plainly))
    told = run(build("toy", RIGS["prediction"]), [replace(loop, prediction=(unseen,) * 9)])["r", 0]
    assert told.tokens == ngram.tokens == plainly
    assert (told.stats.rounds, told.stats.drafted) == (ngram.stats.rounds, ngram.stats.drafted)
    assert told.stats.accepted == ngram.stats.accepted > 5
    assert told.stats.prediction_accepted == told.stats.prediction_rejected == 0


def test_of_both_texts_the_longer_match_drafts() -> None:
    drafter = PredictionDrafter()
    tokens = np.array([1, 2, 3, 4, 9, 1, 2, 3], dtype=np.int32)
    drafter.start(0, 0, tokens)
    sampler = Sampler(SamplingParams(), seed=0, vocab_size=100, eos_ids=())
    asked = Ask(key=0, lane=0, tokens=tokens, max_draft=2, sampler=sampler, predicted=(7, 8, 9))
    for matched, drafted in ((0, (4, 9)), (2, (4, 9)), (3, (7, 8)), (6, (7, 8))):
        [draft] = drafter.propose([replace(asked, matched=matched)])
        assert draft.tokens == drafted
    [draft] = drafter.propose([replace(asked, predicted=())])
    assert draft.tokens == (4, 9)
    [draft] = drafter.propose([replace(asked, alone=False)])
    assert draft.tokens == (7, 8), "beside another drafter it keeps to the prediction"


ON_DEVICE = {"prediction": LookupOnDevice(reads_prediction=True)}


@pytest.mark.unwatched
@pytest.mark.parametrize("law", ["greedy", "sampled"])
@pytest.mark.parametrize("backend", ["toy", "compiled"])
def test_a_device_looks_in_the_prediction_itself(backend: str, law: str) -> None:
    """Mixed requests, some preempted: the texts are plain ones, and nothing is offered by the host."""
    answers = under_law.plain_device_answers(backend, law)
    requests = [
        replace(request, prediction=under_law.nearly(answers[request.id, 0].tokens, seed=i))
        for i, request in enumerate(under_law.device_requests(law))
    ]
    rig = build(backend, RIGS["prediction"], on_device=ON_DEVICE)
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(answers)
    assert rig.rounds.most_in_flight == 2
    assert all(seat.offer is None for seats in rig.rounds.seats for seat in seats)
    assert sum(each.stats.prediction_accepted for each in told.values()) > rig.engine.stats.accepted / 2 > 0


def test_a_device_follows_it_as_a_cpu_does(answer: list[int]) -> None:
    edited = [*answer[:12], 1, 2, 3, *answer[15:25], *answer[28:]]
    here = run(build("toy", RIGS["prediction"], max_draft=16), [ask(edited)])["r", 0]
    rig = build("toy", RIGS["prediction"], on_device=ON_DEVICE, max_draft=16)
    there = run(rig, [ask(edited)])["r", 0]
    assert there.tokens == here.tokens == answer
    assert there.stats.prediction_accepted >= here.stats.prediction_accepted - 2 > 20
    assert there.stats.prediction_rejected > 0


def test_a_device_goes_on_where_the_prediction_ends(answer: list[int]) -> None:
    """The host offers what is predicted, and the device's own drafter takes over; no step waits for the host."""
    rig = build("toy", RIGS["prediction"], on_device={"ngram": DEVICE_RIGS["ngram"]})
    told = run(rig, [ask(answer[:20], drafter="ngram")])
    assert told["r", 0].tokens == answer
    assert told["r", 0].stats.prediction_accepted > 10
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.rounds.most_in_flight == 2


@pytest.mark.parametrize("device", [False, True])
def test_beside_a_head_the_head_drafts_where_nothing_is_predicted(device: bool, answer: list[int]) -> None:
    """The usual case of a server: the shipped head is the default, and one of the requests has a prediction."""
    eagle = {"eagle": RIGS["eagle"]["eagle"]} if not device else {}
    rig = build("eager", {**eagle, **RIGS["prediction"]}, on_device={"eagle": DEVICE_RIGS["eagle"]} if device else None)
    [plainly] = tokens_of(run(build("eager"), plain([ask()]))).values()
    told = run(rig, [ask(plainly[:15]), ask(id="s")])
    assert [each.tokens for each in told.values()] == [plainly] * 2
    stats = told["r", 0].stats
    assert stats.drafter == "prediction+eagle"
    assert stats.prediction_accepted > 8
    assert stats.drafted > stats.prediction_accepted + stats.prediction_rejected, "the head never drafted"
    assert told["s", 0].stats.prediction_accepted == 0


def test_a_drafter_that_reads_catches_up_after_the_prediction(answer: list[int]) -> None:
    rig = build("toy", RIGS["prediction"], on_device={"good": DEVICE_RIGS["good"]})
    told = run(rig, [ask(answer[:15]), ask(answer[5:25], id="s"), ask(id="t")])
    assert [each.tokens for each in told.values()] == [answer] * 3
    assert told["r", 0].stats.accepted > told["r", 0].stats.prediction_accepted > 5


def test_samples_follow_on_their_own() -> None:
    request = Request(id="n", prompt=(5, 6), sampling=SamplingParams(temperature=1, seed=1, n=3, max_tokens=30))
    answers = tokens_of(run(build("toy"), plain([request])))
    predicted = Request(
        **{name: getattr(request, name) for name in ("id", "prompt", "sampling")}, prediction=tuple(answers["n", 1])
    )
    told = run(build("toy", RIGS["prediction"]), [predicted])
    assert tokens_of(told) == answers
    assert told["n", 1].stats.prediction_accepted > 20 > told["n", 0].stats.prediction_accepted
