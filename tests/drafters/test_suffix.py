"""The suffix drafter: what it drafts from, what it remembers and for whom, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.drafters.base import Ask, Ended
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.suffix.drafter import judged
from paceline.drafters.suffix.past import PastAnswers
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.suffix import Drafted
from paceline.sampling.sampler import Sampler
from paceline.types import Finish, Request, SamplingParams, Speculation
from tests.rig import Rig, build
from tests.rig_drafters import always
from tests.runs import Run, plain, prompt, run, tokens_of

SAMPLER = Sampler(SamplingParams(), seed=0, vocab_size=100, eos_ids=())
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def ask(tokens: Sequence[int], *, key: int = 0, longest: int = 6, **options: Any) -> Ask:
    return Ask(key, 0, np.array(tokens, dtype=np.int32), longest, SAMPLER, **options)


def drafter_of(*answers: Sequence[int], salt: str = "", **options: Any) -> SuffixDrafter:
    """A drafter that remembers answers, and has one sequence."""
    made = SuffixDrafter(load_library(), **options)
    for answer in answers:
        made.learn(Ended(np.array([9, *answer], dtype=np.int32), 1, salt))
    made.start(0, 0, np.array([1], dtype=np.int32))
    return made


def chain(drafter: SuffixDrafter, tokens: Sequence[int], **options: Any) -> tuple[int, ...]:
    """The likeliest path of its draft."""
    (draft,) = drafter.propose([ask(tokens, **options)])
    path, node = [], -1
    parents = draft.parents or tuple(range(-1, len(draft.tokens) - 1))
    while node in parents:
        node = parents.index(node)
        path.append(draft.tokens[node])
    return tuple(path)


# ── what it drafts from ──


def test_prompt_and_output() -> None:
    drafter = drafter_of()
    assert chain(drafter, [1, 2, 3, 4, 5, 9, 1, 2], longest=3) == (3, 4, 5)
    assert chain(drafter, [1, 2, 3, 4, 5, 9, 1, 2, 7, 7, 3, 4], longest=2) == (5, 9)


def test_copies_that_gain_little_are_left_out() -> None:
    drafter, text = drafter_of(), [1, 2, 3, 4, 5, 9, 1, 2]
    (draft,) = drafter.propose([ask(text, row_price=0.3, row_prices=(0.3,), longest=1)])
    assert draft.confidence is not None
    most = draft.confidence[0] - 0.1
    for price, tokens in ((most - 0.01, (3,)), (most + 0.01, ())):
        (draft,) = drafter.propose([ask(text, row_price=price, row_prices=(price,), longest=1, copies_only=True)])
        assert draft.tokens == tokens


def test_a_past_answer() -> None:
    assert chain(drafter_of(), [50, 11, 12]) == ()
    assert chain(drafter_of([10, 11, 12, 13, 14, 15]), [50, 11, 12], longest=2) == (13, 14)


def test_the_text_itself_counts_for_more_than_past_answers() -> None:
    drafter = drafter_of([2, 3, 4, 8])
    assert chain(drafter, [2, 3, 4, 7, 2, 3, 4], longest=1) == (7,)


def test_frequent_continuations_of_past_answers_come_first() -> None:
    drafter = drafter_of([4, 5, 6], [4, 5, 7], [4, 5, 6], [4, 5, 7], [4, 5, 6])
    (draft,) = drafter.propose([ask([50, 4, 5], longest=2)])
    assert (draft.tokens, draft.parents) == ((6, 7), (-1, -1))


def test_a_chain_where_trees_are_not_wanted() -> None:
    drafter = drafter_of([4, 5, 6], [4, 5, 7], [4, 5, 6, 8], branches=1)
    (draft,) = drafter.propose([ask([50, 4, 5], longest=4)])
    assert draft.is_chain
    assert draft.tokens[0] == 6


def test_tokens_may_come_without_being_asked_for() -> None:
    """Plain steps and other drafters' drafts are seen at the next ask."""
    often, seldom = drafter_of(), drafter_of()
    text = np.random.default_rng(1).integers(0, 4, 60).tolist()
    for end in range(2, 60):
        often.propose([ask(text[:end])])
    assert often.propose([ask(text)]) == seldom.propose([ask(text)])


def test_sequences_are_kept_apart() -> None:
    drafter = drafter_of()
    drafter.start(1, 0, np.array([1], dtype=np.int32))
    drafts = drafter.propose([ask([1, 2, 1], key=0, longest=1), ask([1, 3, 1], key=1, longest=1)])
    assert [draft.tokens for draft in drafts] == [(2,), (3,)]
    drafter.stop(0)
    drafter.start(0, 0, np.array([1, 4, 1], dtype=np.int32))
    assert chain(drafter, [1, 4, 1], longest=1) == (4,)


# ── how far it drafts ──


def test_prices_and_p_min_end_drafts() -> None:
    text = [*range(10, 30), 10, 11]
    sizes = [len(drafter_of().propose([ask(text, longest=16, price=price)])[0]) for price in (0.0, 0.1, 0.3, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[2] >= sizes[3] == 0
    assert len(drafter_of().propose([ask(text, longest=16, p_min=0.6)])[0]) < sizes[0]


def test_a_dear_row_may_begin_a_block_of_cheap_ones() -> None:
    """Prices of rows go before the usual price; rows behind those that were measured have the usual row price."""
    text = [*range(10, 30)] * 4
    sizes = [
        len(drafter_of().propose([ask(text, longest=16, row_prices=(0.0, 0.0, 1.0), row_price=price)])[0])
        for price in (0.0, 1.0)
    ]
    assert sizes == [16, 2]


def test_wrong_drafts_make_it_careful() -> None:
    """In a text that repeats contexts and never what follows them, drafts become shorter; where they are right, not."""
    wrong, right = drafter_of(), drafter_of()
    right.start(1, 0, np.array([1], dtype=np.int32))
    text: list[int] = []
    for turn in range(12):
        text += [1, 2, 3]
        (draft,) = wrong.propose([ask(text, longest=16, price=0.12)])
        text.append(50 + turn)
        if draft:
            wrong.observe(0, np.array(text, dtype=np.int32), 0)
    loop = [1, 2, 3, 4, 5] * 3
    for _ in range(6):
        (draft,) = right.propose([ask(loop, key=1, longest=4, price=0.12)])
        loop += [*draft.tokens[:4], 1 + len(loop + list(draft.tokens)) % 5]
        right.observe(1, np.array(loop, dtype=np.int32), 4)
    passage = [*range(20, 40), 20, 21, 22]
    careful, sure = (
        len(each.propose([ask([*said, *passage], key=key, longest=16, price=0.12)])[0])
        for each, said, key in ((wrong, text, 0), (right, loop, 1))
    )
    assert careful < sure


def test_levels_that_the_text_reached_are_judged() -> None:
    tree = Drafted((5, 6, 7, 8), (-1, -1, 0, 2), (0.6, 0.2, 0.3, 0.15))
    assert judged(*tree, 1.0, [5, 7, 9, 1]) == [(True, pytest.approx(0.8)), (True, pytest.approx(0.5)), (False, 0.5)]
    assert judged(*tree, 0.5, [4]) == [(False, pytest.approx(1.6))]
    assert judged(*tree, 1.0, [6, 9]) == [(True, pytest.approx(0.8))]  # nothing was guessed after 6


def test_drafts_that_are_never_observed_are_forgotten() -> None:
    drafter = drafter_of()
    for end in range(3, 200):
        drafter.propose([ask(([1, 2] * 100)[:end])])
    assert len(drafter._texts[0].drafts) < 10


# ── for whom it remembers ──


def test_answers_stay_within_their_salt() -> None:
    drafter = drafter_of([10, 11, 12, 13, 14], salt="mine")
    assert chain(drafter, [50, 11, 12], salt="mine", longest=2) == (13, 14)
    assert chain(drafter, [50, 11, 12], salt="theirs") == ()
    assert chain(drafter, [50, 11, 12]) == ()


def test_prompts_are_not_remembered() -> None:
    drafter = SuffixDrafter(load_library())
    drafter.learn(Ended(np.array([1, 2, 3, 4, 5], dtype=np.int32), 3, ""))
    drafter.start(0, 0, np.array([1], dtype=np.int32))
    assert chain(drafter, [1, 2]) == ()
    assert chain(drafter, [1, 4], longest=1) == (5,)


def engine(**options: Any) -> tuple[Rig, SuffixDrafter]:
    drafter = SuffixDrafter(load_library())
    return build("toy", {"suffix": always(drafter)}, **options), drafter


def request(id: str, **changes: Any) -> Request:
    return replace(Request(id=id, prompt=prompt(12, seed=4), sampling=GREEDY), **changes)


@pytest.mark.parametrize("on_device", [None, {}])
def test_an_engine_remembers_for_one_salt(on_device: dict[str, Any] | None) -> None:
    """The same question again takes fewer steps, under another salt as many as at first; the text is the same."""
    rig, _ = engine(on_device=on_device)
    asked = [request("first"), request("again"), request("theirs", cache_salt="theirs"), request("own", cache_salt="x")]
    told = {each.id: run(rig, [each])[each.id, 0] for each in asked}
    expected = tokens_of(run(build("toy"), plain(asked[:1])))["first", 0]
    assert all(each.tokens == expected for each in told.values())
    steps = {id: each.stats.steps for id, each in told.items()}
    assert steps["again"] < steps["first"] == steps["theirs"] == steps["own"]


def test_only_whole_answers_are_remembered() -> None:
    rig, drafter = engine()
    going = Run(rig)
    going.submit([request("gone")])
    for _ in range(6):
        going.step()
    rig.engine.abort("gone")
    assert going.finish()["gone", 0].finish is Finish.ABORT
    assert drafter.past.bytes == 0
    run(rig, [request("off", speculation=Speculation(enabled=False))])
    assert drafter.past.bytes == 0
    run(rig, [request("whole")])
    assert drafter.past.bytes > 0
    assert not drafter._texts


def test_a_preempted_sequence_is_remembered_once() -> None:
    rig, drafter = engine(num_pages=14)
    learnt: list[int] = []
    drafter.learn = lambda ended: learnt.append(len(ended.tokens) - ended.prompt_length)  # type: ignore[method-assign]
    told = run(rig, [request(str(i), prompt=prompt(20, seed=i)) for i in range(6)])
    assert rig.engine.stats.preemptions > 0
    assert sorted(learnt) == sorted(len(each.tokens) for each in told.values())


# ── how much it remembers ──


def answer(seed: int, length: int = 200) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 30_000, length).astype(np.int32)


def knows(past: PastAnswers, salt: str, text: np.ndarray) -> bool:
    drafter = SuffixDrafter(load_library())
    drafter.past = past
    drafter.start(0, 0, text[:1])
    return chain(drafter, text[50:60].tolist(), salt=salt, longest=2, p_min=0.1) == tuple(text[60:62].tolist())


def test_memory_is_bounded_and_old_answers_go_first() -> None:
    past, memory = PastAnswers(load_library(), memory=1 << 20), 1 << 20
    sizes = []
    for number in range(150):
        past.learn("", answer(number))
        sizes.append(past.bytes)
    assert max(sizes) <= memory
    assert sizes[-1] > memory // 8
    assert past.bytes == sum(each.bytes for each in past.sources(""))
    known = [knows(past, "", answer(number)) for number in range(150)]
    assert not any(known[:50])
    assert all(known[-10:])


def test_one_answer_that_is_too_long_for_the_memory_is_forgotten() -> None:
    past = PastAnswers(load_library(), memory=1 << 20)
    past.learn("", answer(0, length=50_000))
    assert past.bytes <= 1 << 20
    past.learn("", answer(1))
    assert knows(past, "", answer(1))


def test_salts_that_were_not_used_for_long_go_first() -> None:
    past = PastAnswers(load_library(), memory=1 << 20)
    for number in range(300):
        past.learn(f"salt {number}", answer(number))
        past.sources("salt 0")  # somebody drafts from it all the time
        assert past.bytes <= 1 << 20
    assert knows(past, "salt 0", answer(0))
    assert knows(past, "salt 299", answer(299))
    assert not past.sources("salt 1")


def test_no_memory_remembers_nothing() -> None:
    past = PastAnswers(load_library(), memory=0)
    past.learn("", answer(0))
    assert (past.bytes, past.sources("")) == (0, [])
