"""What a drafted token costs, and who then still drafts."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import pytest

from paceline.config import EngineConfig
from paceline.engine.cost import CostModel, Line
from paceline.engine.pace import Pace
from paceline.types import OFF, Request, SamplingParams
from tests.rig import build
from tests.rig_drafters import model_drafter
from tests.runs import prompt, run
from tests.tiny_models import TARGET, Model

CONFIG = EngineConfig()


def observed(*, base: float, row: float, sequences: int, drafted: int, accepted: int, steps: int = 60) -> CostModel:
    """A machine whose passes take base + row · rows; every other step drafts."""
    cost = CostModel()
    for step in range(steps):
        rows = sequences + (drafted if step % 2 else 0)
        tokens = sequences + (accepted if step % 2 else 0)
        seconds = base + row * rows
        cost.observe(sequences=sequences, rows=rows, pass_seconds=seconds, step_seconds=seconds, tokens=tokens)
    return cost


def test_the_price_before_anything_is_known_is_nothing() -> None:
    cost = CostModel()
    assert cost.price("ngram") == cost.entry("ngram") == 0
    for _ in range(9):  # rows never differ: no line can be fitted
        cost.observe(sequences=4, rows=4, pass_seconds=0.01, step_seconds=0.01, tokens=4)
    assert cost.price("ngram") == 0


@pytest.mark.parametrize(
    ("base", "row", "sequences", "cheap"), [(5.0, 0.2, 1, True), (1.0, 0.8, 10, False), (0.0, 1.0, 1, False)]
)
def test_rows_that_cost_little_are_worth_a_try_and_rows_that_cost_a_step_are_not(
    base: float, row: float, sequences: int, cheap: bool
) -> None:
    cost = observed(base=base, row=row, sequences=sequences, drafted=4 * sequences, accepted=sequences)
    assert cost.entry("ngram") == pytest.approx(row * sequences / (base + row * sequences))
    assert (cost.price("ngram") < 0.2) == cheap
    assert (cost.price("ngram") > 0.4) == (not cheap)


def test_the_price_is_that_of_the_definition() -> None:
    """Plain decoding of one sequence, 10 ms + 1 ms a row, and a drafter of 2 ms a token: 3 ms of 11."""
    cost = observed(base=0.010, row=0.001, sequences=1, drafted=1, accepted=0)
    cost.observe_draft("model", tokens=4, depth=4, seconds=0.008)
    for _ in range(400):
        cost.observe(sequences=1, rows=1, pass_seconds=0.011, step_seconds=0.011, tokens=1)
    assert cost.price("model") == pytest.approx(0.003 / 0.011, rel=0.02)
    assert cost.price("ngram") == pytest.approx(0.001 / 0.011, rel=0.02)


def test_what_a_draft_costs_to_begin_is_no_reason_to_end_it() -> None:
    """Drafts 1 and 5 levels deep in turns, 6 ms to begin and 1 ms a level of two tokens, 1 ms a row: one more token
    costs 2 ms, beside others 1; one level at all 3 for itself and 2 for its rows."""
    cost = observed(base=0.010, row=0.001, sequences=1, drafted=1, accepted=0)
    for depth in (1, 5) * 200:
        cost.observe_draft("head", tokens=2 * depth, depth=depth, seconds=0.006 + 0.001 * depth)
        cost.observe(sequences=1, rows=1, pass_seconds=0.011, step_seconds=0.011, tokens=1)
    assert cost.price("head") == pytest.approx(0.002 / 0.011, rel=0.02)
    assert cost.row_price == pytest.approx(0.001 / 0.011, rel=0.02)
    assert cost.entry("head") == pytest.approx(0.005 / 0.011, rel=0.1)


def test_a_hiccup_of_the_machine_is_not_believed_but_a_change_is() -> None:
    calm, rough, changed = Line(), Line(), Line()
    for step in range(60):
        for line in (calm, rough, changed):
            seconds = 0.004 + 0.001 * (step % 4)
            hiccup = 0.050 if line is rough and step == 58 else 0.0
            line.add(step % 4, seconds * (5 if line is changed and step > 30 else 1) + hiccup)
    assert rough.share < 1.2 * calm.share
    assert changed.share > 3 * calm.share


def test_an_affordable_draft_ends_before_its_last_token_is_too_unlikely() -> None:
    pace = Pace()
    assert pace.affordable(entry=0.9, price=0.9) is None  # nothing known yet
    for _ in range(30):
        pace.learn(4, 3, output_tokens=0, config=CONFIG)
        pace.learn(4, 0, output_tokens=0, config=CONFIG)  # half of the first tokens, all behind them
    first = pace.chance(whole=False)
    assert 0.4 < first < 0.6
    length = pace.affordable(entry=0.1, price=0.3)
    assert length is not None
    paths = [*accumulate(pace.survival(length + 1), mul)]
    assert paths[length - 1] >= 0.3 > paths[length]
    assert pace.affordable(entry=0.1, price=0.99) == 1
    assert pace.affordable(entry=first + 0.01, price=0.99) == 0
    assert pace.affordable(entry=0.0, price=0.0) is None


def test_after_a_pause_one_draft_is_free() -> None:
    pace = Pace()
    pace.learn(4, 0, output_tokens=10, config=CONFIG)
    assert pace.affordable(entry=0.9, price=0.9) == 0
    pace.pause("dear", output_tokens=10, tokens=8)
    assert pace.paused(17)
    assert not pace.paused(18)
    assert pace.affordable(entry=0.9, price=0.9) is None
    pace.learn(4, 0, output_tokens=50, config=CONFIG)
    assert pace.affordable(entry=0.9, price=0.9) == 0


@pytest.mark.parametrize("weighs", [False, True])
def test_an_engine_whose_rows_are_dear_stops_drafting_and_says_why(weighs: bool) -> None:
    """A clock that charges each pass by its rows: a draft never pays, and the text is the same. A drafter that weighs
    its cost itself is never paused for it."""
    tokens = 120
    request = Request(id="a", prompt=prompt(5, seed=1), sampling=SamplingParams(temperature=0, max_tokens=tokens))
    plain = run(build(), [Request(id="a", prompt=request.prompt, sampling=request.sampling, speculation=OFF)])
    now = [0.0]
    forward = TARGET.forward("toy", num_pages=160)
    slow = type(forward).__call__

    class Charged(type(forward)):
        def __call__(self, batch):
            now[0] += 0.001 * len(batch.tokens)
            return slow(self, batch)

    forward.__class__ = Charged
    drafters = {"model": model_drafter(Model(seed=5))}
    options = {"measure_cost": True, "max_context": 200, "min_acceptance": 0.0}
    rig = build("toy", drafters, forward=forward, clock=lambda: now[0], **options)
    rig.engine.drafters["model"].weighs_cost = weighs
    told = run(rig, [request])
    stats = told["a", 0].stats
    assert told["a", 0].tokens == plain["a", 0].tokens
    assert (stats.pauses >= 1) is not weighs
    if weighs:
        return
    assert stats.off_reason is not None
    assert "it would pay" in stats.off_reason
    assert stats.drafted < tokens / 2


def test_drafts_that_took_no_pass_make_the_entry_lower_and_leave_the_price() -> None:
    computing, mixed = CostModel(), CostModel()
    for cost in (computing, mixed):
        for rows in (1, 4, 2, 6):
            cost.observe(sequences=1, rows=rows, tokens=2, pass_seconds=0.01 + 0.001 * rows, step_seconds=0.02)
        for depth in (2, 4, 2, 4):
            cost.observe_draft("portfolio", tokens=depth, depth=depth, passes=depth, seconds=0.001 * depth)
            if cost is mixed:
                cost.observe_draft("portfolio", tokens=8, depth=8, passes=0, seconds=0.00001)
    assert mixed.price("portfolio") == pytest.approx(computing.price("portfolio"))
    assert mixed.entry("portfolio") < 0.8 * computing.entry("portfolio")
