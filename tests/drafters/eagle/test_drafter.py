"""The eagle drafter with a head that sees through everything: it asserts that each row comes with the hidden states of
its own position and the token after it, and then says what the target will say. So whatever it drafts is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.drafters.base import Ask
from paceline.drafters.eagle import EagleDrafter, reading
from paceline.drafters.eagle.hidden_states import HiddenStateStore
from paceline.drafters.registry import BuildContext
from paceline.engine.cost import CostModel
from paceline.engine.governor import Governor
from paceline.errors import InvalidRequest
from paceline.kernels.base import PAGE_SIZE, Batch, Output
from paceline.kernels.noise import pick
from paceline.runner.heads.compiled import CompiledHead
from paceline.runner.heads.protocol import TreeRequest
from paceline.types import OFF, Request, Rule, SamplingParams, Speculation
from tests.rig import Rig, build
from tests.rig_drafters import EagleMade
from tests.runs import Run, plain, prompt, run, tokens_of
from tests.tiny_models import VOCAB
from tests.toy import HIDDEN, ToyForward, ToyKV

TAPS = (0, 2, 1)  # in another order than the target keeps them
GREEDY = SamplingParams(temperature=0, max_tokens=20)


class SeeingHead:
    """A HeadForward that keeps, in each slot, the token at its position and the one after it."""

    device = "cpu"
    mask = None

    def __init__(self, target: ToyForward, ids: Tensor) -> None:
        self.ids = ids
        self.kv = ToyKV(target.kv.num_pages)
        self.next = np.full(target.kv.num_pages * PAGE_SIZE, -1)
        self.passes = self.rows = 0
        self._target = target
        self._last: tuple[list[int], list[int]] = ([], [])  # positions and next tokens of the pass before

    def __call__(self, batch: Batch, *, features: Tensor | None = None, carry: Sequence[int] = ()) -> Output:
        self.passes += 1
        slots, positions, following = (part.tolist() for part in (batch.slots, batch.positions, batch.tokens))
        owners = np.searchsorted(batch.row_starts.numpy(), np.arange(len(slots)), side="right") - 1
        for row, (slot, position, after) in enumerate(zip(slots, positions, following, strict=True)):
            before = self._token_before(batch, int(owners[row]), position)
            if features is None:
                assert (self._last[0][carry[row]], self._last[1][carry[row]]) == (position - 1, before), "carried"
                token = before
            else:
                token = self._read(features[row], position, before)
            self.kv.tokens[slot], self.kv.positions[slot], self.next[slot] = token, position, after
        self._last = positions, following
        outs = batch.logit_rows.tolist()
        logits = (
            torch.stack([self._logits(batch, row, int(owners[row])) for row in outs]) if outs else torch.empty(0, 1)
        )
        return Output(logits=logits, argmax=logits.argmax(-1).int())

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return pick(logits, inverse_temperatures, keys, ids=self.ids)

    def _token_before(self, batch: Batch, owner: int, position: int) -> int:
        """What the row before said would stand here; -1 at the beginning."""
        if position == 0:
            return -1
        at = position - 1
        slot = int(batch.page_table[owner, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE
        assert self.kv.positions[slot] == at, "a row without the one before it"
        return int(self.next[slot])

    def _read(self, features: Tensor, position: int, before: int) -> int:
        """The token that these hidden states are of."""
        self.rows += 1
        everything = np.arange(self._target.vocab_size)
        kept = self._target.features_of(everything, np.full(len(everything), position)).chunk(len(TAPS), dim=1)
        expected = torch.cat([kept[tap] for tap in TAPS], dim=1)
        [token] = (expected == features).all(dim=1).nonzero()[:, 0].tolist()
        # The last row of a page from the prefix cache was read for another sequence, with another next token.
        assert before in (-1, token) or position % PAGE_SIZE == 0, "hidden states of another token"
        return int(token)

    def _logits(self, batch: Batch, row: int, owner: int) -> Tensor:
        index = np.arange(int(batch.positions[row]) + 1)
        slots = batch.page_table[owner].numpy()[index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
        assert np.array_equal(self.kv.positions[slots], index), "a context out of order"
        context = np.append(self.kv.tokens[slots], int(batch.tokens[row]))
        return torch.from_numpy(self._target.logits_after(context))[self.ids.long()]


@dataclass
class Seeing:
    """Makes the drafter, and keeps it."""

    ids: Tensor = field(default_factory=lambda: torch.arange(VOCAB, dtype=torch.int32))
    taps: tuple[int, ...] = TAPS
    options: dict[str, Any] = field(default_factory=lambda: {"min_confidence": 0.0})
    head: SeeingHead = field(init=False)

    def __call__(self, context: BuildContext, backend: str) -> EagleDrafter:
        assert isinstance(context.target, ToyForward)
        self.head = SeeingHead(context.target, self.ids)
        return EagleDrafter(
            self.head,
            taps=TAPS,
            width=3 * HIDDEN,
            lanes=context.lanes,
            pool=context.pool,
            vocab_size=context.vocab_size,
            pick=context.target.pick,
            **self.options,
        )


@pytest.fixture(autouse=True)
def nothing_raised(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What a drafter raises does not reach the engine, so that it must be looked for."""
    yield
    assert not [record.getMessage() for record in caplog.get_records("call")]


def requests(count: int, params: SamplingParams = GREEDY, **speculation: Any) -> list[Request]:
    lengths = (2, 50, 17, 9, 33, 16, 70, 40, 3)
    return [
        Request(
            id=str(i),
            prompt=prompt(lengths[i % len(lengths)], seed=i),
            sampling=replace(params, seed=i),
            speculation=Speculation(**speculation),
        )
        for i in range(count)
    ]


def finished(rig: Rig, asked: Sequence[Request]) -> None:
    assert tokens_of(run(rig, asked)) == tokens_of(run(build(), plain(asked)))
    assert rig.engine.drafters["seeing"].out is None


@pytest.mark.unwatched
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1, max_tokens=20),
        SamplingParams(temperature=0.8, top_p=0.7, max_tokens=20),
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=20),
        SamplingParams(temperature=1, logit_bias={5: 3.0}, frequency_penalty=0.5, max_tokens=20),
    ],
)
def test_every_row_has_its_hidden_states_and_every_draft_is_right(params: SamplingParams) -> None:
    seeing = Seeing()
    rig = build("toy", {"seeing": seeing})
    finished(rig, requests(9, params))
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 100


@pytest.mark.parametrize(
    "options", [{"max_step_tokens": 5}, {"num_pages": 14}, {"prefix_cache": False}, {"max_draft": 16}]
)
def test_whatever_the_steps_are_like(options: dict[str, Any]) -> None:
    seeing = Seeing(options={"min_confidence": 0.0, "max_draft": 16})
    rig = build("toy", {"seeing": seeing}, **options)
    finished(rig, requests(9))
    stats = rig.engine.stats
    assert (stats.preemptions > 0) == ("num_pages" in options)
    assert stats.accepted == stats.drafted > 40


def test_who_never_drafts_is_never_read() -> None:
    seeing = Seeing()
    rig = build("toy", {"seeing": seeing}, max_draft_batch=0)
    finished(rig, requests(5))
    assert (seeing.head.passes, seeing.head.rows) == (0, 0)


def test_what_has_piled_up_is_read_in_chunks_when_the_load_falls() -> None:
    seeing = Seeing(options={"min_confidence": 0.0, "chunk": 24})
    rig = build("toy", {"seeing": seeing}, max_draft_batch=1)
    long, short = requests(2)
    asked = [
        replace(long, sampling=replace(GREEDY, max_tokens=120)),
        replace(short, sampling=replace(GREEDY, max_tokens=90)),
    ]
    going = Run(rig)
    going.submit(asked)
    while len(rig.engine._scheduler.running) != 1:
        going.step()
        assert seeing.head.passes == 0
    rows = []
    while not rig.engine.stats.drafted:
        going.step()
        rows.append(seeing.head.rows - sum(rows))
    assert rows[:-1] == [24] * (len(rows) - 1)
    assert len(rows) > 2
    assert tokens_of(going.finish()) == tokens_of(run(build(), plain(asked)))
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 10


def test_drafts_before_which_much_was_read_say_nothing_of_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(CostModel, "observe_draft", lambda self, *_, tokens, **__: told.append(tokens))
    rig = build("toy", {"seeing": Seeing()}, max_draft_batch=1)
    going, stats = Run(rig), rig.engine.stats

    def next_draft() -> int:
        before = stats.drafted
        while stats.drafted == before:
            going.step()
        return stats.drafted - before

    going.submit([Request("long", prompt(40, seed=0), replace(GREEDY, max_tokens=110))])
    first, second = next_draft(), next_draft()  # before the first the prompt was read
    assert told == [second]
    going.submit([Request("short", prompt(40, seed=1), replace(GREEDY, max_tokens=50))])
    resumed = next_draft()
    assert told == [second]
    going.finish()
    assert sum(told) == stats.drafted - first - resumed > second


def test_states_that_were_read_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []
    drop = HiddenStateStore.drop
    monkeypatch.setattr(HiddenStateStore, "drop", lambda self, pages: (dropped.extend(pages), drop(self, pages))[1])
    finished(build("toy", {"seeing": Seeing()}), [Request("x", prompt(40, seed=1), replace(GREEDY, max_tokens=60))])
    assert len(dropped) == len(set(dropped)) >= 90 // PAGE_SIZE  # the last draft begins near the end


@pytest.mark.parametrize(("left", "reads"), [(12, True), (2, False)])
def test_who_is_nearly_at_the_end_is_not_read_any_more(left: int, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_ROWS_PER_TOKEN", 32)
    monkeypatch.setattr(Governor, "price", lambda self, drafter: 0.01)
    seeing = Seeing()
    rig = build("toy", {"seeing": seeing}, max_draft_batch=1)
    lengths = 40, 40 + left
    asked = [
        Request(str(i), prompt(50, seed=i), replace(GREEDY, max_tokens=length)) for i, length in enumerate(lengths)
    ]
    finished(rig, asked)
    assert (seeing.head.rows > 80) == (rig.engine.stats.drafted > 0) == reads


def test_a_step_is_held_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    write = HiddenStateStore.write
    monkeypatch.setattr(HiddenStateStore, "write", lambda self, *of: (rows.append(len(of[1])), write(self, *of))[1])
    rig = build("toy", {"seeing": Seeing()}, max_draft_batch=0)
    finished(rig, requests(8))
    assert len(rows) < rig.engine.stats.steps  # in the last one all end
    assert max(rows) >= 8


def test_where_nothing_more_can_be_held_a_crowd_is_given_up() -> None:
    """It costs their drafts, and they say so."""
    seeing = Seeing(options={"min_confidence": 0.0, "chunk": 16, "state_bytes": 1})
    rig = build("toy", {"seeing": seeing}, max_draft_batch=7)
    asked = [replace(one, prompt=prompt(40, seed=int(one.id))) for one in requests(8)]
    asked[0] = replace(asked[0], sampling=replace(GREEDY, max_tokens=3))
    told = run(rig, asked)
    assert tokens_of(told) == tokens_of(run(build(), plain(asked)))
    reasons = [told[str(i), 0].stats.off_reason for i in range(1, 8)]
    assert "no room for more than 144 hidden states for drafter eagle" in reasons
    drafted = [told[str(i), 0].stats.drafted > 0 for i in range(1, 8)]
    assert drafted == [reason is None for reason in reasons]
    assert any(drafted)
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 0


def test_where_nothing_more_can_be_held_the_others_are_read() -> None:
    seeing = Seeing(options={"min_confidence": 0.0, "chunk": 16, "state_bytes": 1})
    rig = build("toy", {"seeing": seeing}, max_draft_context=10)
    asked = requests(9, replace(GREEDY, max_tokens=60))
    told = run(rig, asked)
    assert tokens_of(told) == tokens_of(run(build(), plain(asked)))
    assert seeing.head.rows > 200  # though hardly anybody drafted
    assert not any("no room" in (told[one.id, 0].stats.off_reason or "") for one in asked)


def test_hidden_states_are_kept_for_those_who_want_them_only() -> None:
    forward = WantedOnly(num_pages=160, taps=(0, 1, 2))
    rig = build("toy", {"seeing": Seeing()}, forward=forward)
    run(rig, [replace(one, speculation=OFF) for one in requests(3)])
    assert forward.kept == {False}
    finished(rig, requests(3))
    assert forward.kept == {False, True}


class WantedOnly(ToyForward):
    """Notes whether passes gave hidden states."""

    def __init__(self, *, num_pages: int, taps: Sequence[int]) -> None:
        super().__init__(num_pages=num_pages, taps=taps)
        self.kept: set[bool] = set()

    def __call__(self, batch: Batch) -> Output:
        output = super().__call__(batch)
        self.kept.add(output.features is not None)
        return output


def test_a_prefix_that_is_only_held_is_found_again() -> None:
    """By two at once, of whom the second need not read what the first has read."""
    seeing = Seeing(options={"min_confidence": 0.0, "chunk": 32})
    rig = build("toy", {"seeing": seeing}, max_draft_batch=2)
    whole = prompt(70, seed=1)
    run(rig, [Request(str(i), whole if i == 0 else prompt(70, seed=i), GREEDY) for i in range(3)])
    assert seeing.head.passes == 0
    asked = [Request("a", (*whole[:66], 7, 8), GREEDY), Request("b", (*whole[:66], 9), GREEDY)]
    told = run(rig, asked)
    assert [told[name, 0].stats.cached_tokens for name in "ab"] == [64, 64]
    assert tokens_of(told) == tokens_of(run(build(), plain(asked)))
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 20
    assert seeing.head.rows < 64 + 32 + 2 * 30


def test_a_prefix_is_not_computed_again_where_nothing_can_be_held() -> None:
    seeing = Seeing(options={"min_confidence": 0.0, "chunk": 16, "state_bytes": 1})
    rig = build("toy", {"seeing": seeing}, max_draft_batch=1)
    going = Run(rig)
    whole = prompt(70, seed=1)
    going.submit([Request("first", whole, GREEDY, speculation=OFF)])
    going.finish()
    many = [Request(str(i), prompt(70, seed=2 + i), replace(GREEDY, max_tokens=40)) for i in range(4)]
    going.submit(many)
    for _ in range(20):
        going.step()
    going.submit([Request("again", whole, GREEDY)])
    told = going.finish()["again", 0]
    assert told.stats.cached_tokens == 64
    assert told.stats.drafted == 0


def test_a_prefix_that_the_head_has_read_is_found_again() -> None:
    seeing = Seeing()
    rig = build("toy", {"seeing": seeing})
    first = Request("a", prompt(70, seed=1), GREEDY)
    finished(rig, [first])
    before = rig.engine.stats.drafted
    again = Run(rig)
    again.submit([Request("b", (*first.prompt[:60], 7, 8), GREEDY)])
    told = again.finish()["b", 0]
    assert told.stats.cached_tokens == 48
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > before


def test_a_prefix_that_the_head_has_not_read_is_computed_again() -> None:
    """Once: what was computed again is what is found by the next."""
    rig = build("toy", {"seeing": Seeing()})
    whole = prompt(70, seed=1)
    wanted = run(build(), plain([Request("x", whole, GREEDY)]))["x", 0].tokens
    cached = []
    for name, speculation in (("a", OFF), ("b", Speculation()), ("c", OFF), ("d", Speculation())):
        told = run(rig, [Request(name, whole, GREEDY, speculation=speculation)])[name, 0]
        assert told.tokens == wanted
        cached.append(told.stats.cached_tokens)
    assert cached == [0, 0, 64, 64]
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 20


def test_steps_that_were_not_fed_end_the_drafting_of_a_sequence() -> None:
    rig = build("toy", {"seeing": Seeing()})
    going = Run(rig)
    going.submit(requests(1))
    going.step()
    guard = rig.engine.drafters["seeing"]
    feed, guard.feed = guard.feed, lambda *_, **__: {}
    going.step()
    before, guard.feed = rig.engine.stats.drafted, feed
    told = going.finish()["0", 0]
    assert told.tokens == run(build(), plain(requests(1)))["0", 0].tokens
    assert rig.engine.stats.drafted == before > 0


def test_tokens_that_the_head_cannot_say() -> None:
    ids = torch.arange(0, VOCAB, 2, dtype=torch.int32)
    for params in (GREEDY, SamplingParams(temperature=1, max_tokens=20)):
        rig = build("toy", {"seeing": Seeing(ids)})
        asked = requests(9, params)
        told = run(rig, asked)
        assert tokens_of(told) == tokens_of(run(build(), plain(asked)))
        assert 20 < rig.engine.stats.accepted < rig.engine.stats.drafted


def test_rules_that_want_distributions_get_them() -> None:
    rig = build("toy", {"seeing": Seeing()})
    asked = requests(4, SamplingParams(temperature=1, max_tokens=20), rule=Rule.REJECTION)
    run(rig, asked)
    assert rig.engine.drafters["seeing"].out is None
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 40  # q is p: no coin can fall on the wrong side


def test_a_head_that_hesitates_drafts_less() -> None:
    counts = []
    for least in (0.0, 0.5, 0.99):
        rig = build("toy", {"seeing": Seeing(options={"min_confidence": least})})
        finished(rig, requests(5))
        counts.append(rig.engine.stats.drafted)
    assert counts[0] > counts[1] > counts[2] > 0


def test_the_request_says_how_sure_the_head_must_be() -> None:
    counts = []
    for p_min in (0.0, 0.99):
        rig = build("toy", {"seeing": Seeing()})
        finished(rig, requests(5, p_min=p_min))
        counts.append(rig.engine.stats.drafted)
    assert counts[1] < counts[0]


def test_a_prompt_of_one_token_has_nothing_to_go_by() -> None:
    rig = build("toy", {"seeing": Seeing()})
    finished(rig, [Request("x", (5,), GREEDY)])
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 10


@pytest.mark.parametrize(
    ("params", "at_once"),
    [
        ({}, True),
        ({"top_p": 0.8}, True),
        ({"top_k": 9, "min_p": 0.01}, True),
        ({"frequency_penalty": 0.5}, False),
        ({"top_p": 0.8, "logit_bias": {5: 1.0}}, False),
    ],
)
def test_whatever_needs_no_host_between_two_tokens_is_one_call(
    params: dict[str, Any], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    draft = CompiledHead.draft
    monkeypatch.setattr(
        CompiledHead, "draft", lambda self, *of, width: (calls.append(len(of[2])), draft(self, *of, width=width))[1]
    )
    rig = build("compiled", {"eagle": EagleMade()})
    asked = requests(4, SamplingParams(temperature=0.9, max_tokens=12, **params))
    assert tokens_of(run(rig, asked)) == tokens_of(run(build("compiled"), plain(asked)))
    assert rig.engine.stats.drafted > 10
    assert bool(calls) == at_once


@pytest.mark.parametrize(("price", "row_price"), [(0.4, 0.4), (0.4, 0.0)])
def test_a_tree_leaves_out_what_does_not_pay(price: float, row_price: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random head is sure of nothing: neither of a token, where rows cost, nor of a level, where passes do."""
    wanted: list[TreeRequest] = []
    draft = CompiledHead.draft
    monkeypatch.setattr(
        CompiledHead, "draft", lambda self, *of, width: (wanted.extend(of[2]), draft(self, *of, width=width))[1]
    )
    monkeypatch.setattr(Governor, "price", lambda self, drafter: price)
    monkeypatch.setattr(Governor, "row_price", row_price)
    monkeypatch.setattr(Governor, "row_prices", lambda self, sequences: ())
    rig = build("compiled", {"eagle": EagleMade(min_confidence=None)})
    run(rig, requests(2, replace(GREEDY, max_tokens=12)))
    assert {(each.min_confidence, each.level_price) for each in wanted} == {(row_price, price - row_price)}


def test_what_it_was_not_fed_it_does_not_guess() -> None:
    rig = build("toy", {"seeing": Seeing()})
    going = Run(rig)
    going.submit(requests(1))
    going.step()
    [sequence] = rig.engine._scheduler.running
    tokens = np.array(sequence.tokens, dtype=np.int32)
    guard = rig.engine.drafters["seeing"]
    drafts = [
        guard.propose([Ask(sequence.key, sequence.lane, known, 3, sequence.sampler)])[0]
        for known in (np.append(tokens, 5), tokens)
    ]
    assert [len(draft) for draft in drafts] == [0, 3]
    going.finish()


def test_bad_limits_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_draft 0 must be at least 1"):
        build("toy", {"seeing": Seeing(options={"max_draft": 0})})
    with pytest.raises(InvalidRequest, match=r"min_confidence 2 in \[0, 1\]"):
        build("toy", {"seeing": Seeing(options={"min_confidence": 2})})
