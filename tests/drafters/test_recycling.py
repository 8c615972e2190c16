"""Token recycling: a table of the target's likeliest successors, and the trees that come from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.draft import EMPTY, Draft
from paceline.drafters import recycling, registry
from paceline.drafters.base import Ask, Verified
from paceline.drafters.paying import paying
from paceline.drafters.recycling import MAX_SALTS, Rates, RecyclingDrafter, likeliest
from paceline.errors import InvalidRequest, UnknownOption
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams

VOCAB = 20
SAMPLER = Sampler(SamplingParams(temperature=0), seed=0, vocab_size=VOCAB, eos_ids=())


def ask(*tokens: int, key: int = 1, **fields: Any) -> Ask:
    given = {"max_draft": 6, "sampler": SAMPLER} | fields
    return Ask(key=key, lane=0, tokens=np.array(tokens, dtype=np.int32), **given)


def said(token: int, *likely: int, draft: Draft = EMPTY, rows: Any = (), salt: str = "") -> Verified:
    """What the target thinks likely after a token, the likeliest first, and after each drafted one."""
    logits = torch.zeros((1 + len(draft), VOCAB))
    for row, tokens in enumerate((likely, *rows)):
        for rank, each in enumerate(tokens):
            logits[row, each] = 10.0 - rank
    return Verified(1, salt, token, draft, logits, logits.argmax(1).tolist())


def filled(*heard: Verified, **options: Any) -> RecyclingDrafter:
    drafter = RecyclingDrafter(vocab_size=VOCAB, **{"successors": 2} | options)
    drafter.hear(heard)
    return drafter


def drafted(drafter: RecyclingDrafter, one: Ask) -> Draft:
    [draft] = drafter.propose([one])
    assert draft.problem(vocab_size=VOCAB, max_length=one.max_draft) is None or not draft.tokens
    return draft


def test_a_tree_follows_the_table_the_likeliest_first() -> None:
    drafter = filled(said(1, 2, 3), said(2, 4, 5), said(4, 1, 2))
    draft = drafted(drafter, ask(9, 1))
    # 0.4, then behind 2: 0.16 twice, for 3 and for 2 ─ 4; of equals the one with the earlier parent
    assert draft.tokens == (2, 3, 4, 5, 1, 2)
    assert draft.parents == (-1, -1, 0, 0, 2, 2)
    assert draft.confidence == pytest.approx((0.4, 0.16, 0.16, 0.064, 0.064, 0.0256))
    assert draft.passes == 0


def test_nothing_is_drafted_behind_a_token_that_nobody_has_read() -> None:
    assert drafted(RecyclingDrafter(vocab_size=VOCAB), ask(1)) == EMPTY
    assert not drafted(filled(said(1, 2, 3)), ask(7)).tokens


def test_prices_and_limits_of_an_ask() -> None:
    drafter = filled(said(1, 2, 3), said(2, 4, 5))
    assert drafted(drafter, ask(1, max_draft=2)).tokens == (2, 3)
    assert drafted(drafter, ask(1, row_price=0.1)).tokens == (2, 3, 4)
    assert drafted(drafter, ask(1, row_price=0.9)).tokens == (2,), "whether to draft at all is the governor's question"
    assert drafted(drafter, ask(1, row_prices=(0.3, 0.3), row_price=0.01)).tokens == (2, 3, 4, 5), (
        "a dear row, then cheap"
    )
    assert drafted(drafter, ask(1, p_min=0.1)).tokens == (2, 3, 4)
    assert not drafted(drafter, ask(1, p_min=0.5)).tokens


def test_rows_of_rejected_tokens_count_too() -> None:
    draft = Draft(tokens=(2, 3), parents=(-1, -1))
    drafter = filled(said(1, 2, 3, draft=draft, rows=((6, 7), (8, 9))))
    assert drafter._tables[""][[1, 2, 3]].tolist() == [[2, 3], [6, 7], [8, 9]]


def test_a_plain_step_fills_only_what_is_unknown() -> None:
    drafter = filled(said(1, 2, 3))
    drafter.hear([said(1, 8, 9)])
    assert drafter._tables[""][1].tolist() == [2, 3]
    drafter.hear([said(1, 8, 9, draft=Draft(tokens=(4,)), rows=((5, 6),))])
    assert drafter._tables[""][1].tolist() == [8, 9]


def test_salts_share_nothing_and_the_latest_are_kept() -> None:
    drafter = filled(said(1, 2, 3, salt="a"))
    assert drafted(drafter, ask(1, salt="a")).tokens
    assert not drafted(drafter, ask(1, salt="b")).tokens
    assert not drafted(drafter, ask(1)).tokens
    for i in range(MAX_SALTS - 1):
        drafter.hear([said(1, 2, 3, salt=str(i))])
    drafter.hear([said(5, 2, 3, salt="a")])  # used again
    drafter.hear([said(1, 2, 3, salt="new")])
    assert [*drafter._tables] == [*map(str, range(1, MAX_SALTS - 1)), "a", "new"]


def test_ranks_are_counted_while_drafts_are_judged() -> None:
    drafter = filled(said(1, 2, 3), said(2, 4, 5))
    drafted(drafter, ask(9, 1))
    for _ in range(200):
        drafter.observe(1, np.array([9, 1, 3]), 0)  # after 1 came 3, of rank 1
    draft = drafted(drafter, ask(9, 1))
    first, second = draft.confidence[:2]
    assert draft.tokens[:2] == (2, 3), "a rank does not go before a better one"
    assert first == second < 0.1
    for _ in range(2000):
        drafter.observe(1, np.array([9, 1, 2, 4]), 1)
    assert drafted(drafter, ask(9, 1)).confidence[0] > 0.9
    before = drafter._rates.chances()
    drafter.observe(1, np.array([9, 7, 7]), 0)  # a token that nobody has read
    drafter.stop(1)
    drafter.observe(1, np.array([9, 7, 7]), 0)
    assert drafter._rates.chances() == before


def test_rates_fall_where_none_is_right() -> None:
    rates = Rates(3)
    assert rates.chances() == pytest.approx([0.4, 0.16, 0.064])
    rates.learn(None)
    assert rates.chances() < [0.4, 0.16, 0.064]
    rates.learn(2)
    assert rates.chances()[2] > 0.064


@pytest.mark.parametrize("vocab", [97, 256 * 8, 256 * 8 + 1, 256 * 12 + 7, 256 * 40])
def test_the_likeliest_tokens_of_any_vocabulary(vocab: int) -> None:
    logits = torch.randn((5, vocab + 3), generator=torch.Generator().manual_seed(vocab))[:, :vocab].contiguous()
    logits[0, -1] = 50.0
    logits[1, 0] = 50.0
    assert torch.equal(likeliest(logits, 8), torch.topk(logits, 8, dim=1).indices)
    assert torch.equal(likeliest(logits[1:3], 8), torch.topk(logits[1:3], 8, dim=1).indices)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("recycling:max_draft=0", InvalidRequest, "recycling: max_draft 0 must be 1 to 64, successors 8 1 to 32"),
        ("recycling:max_draft=65", InvalidRequest, "max_draft 65 must be 1 to 64"),
        ("recycling:successors=0", InvalidRequest, "successors 0 1 to 32"),
        ("recycling:successors=33", InvalidRequest, "successors 33 1 to 32"),
        ("recycling:successors=x", InvalidRequest, "recycling:successors must be a whole number, not 'x'"),
        ("recycling:nodes=3", UnknownOption, "unknown option of the recycling drafter 'nodes'"),
    ],
)
def test_bad_options(words: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        registry.recipe(words, None)  # type: ignore[arg-type]


def test_options() -> None:
    context: Any = type("Context", (), {"vocab_size": 30})
    made = registry.recipe("recycling:max_draft=5,successors=3", None).build(context)  # type: ignore[arg-type]
    assert isinstance(made, recycling.RecyclingDrafter)
    assert (made.max_draft, made._shape) == (5, (30, 3))


def test_nodes_that_pay() -> None:
    assert paying([0.9, 0.5, 0.6], [0.55], limit=9, floor=0.0) == ([0, 2], pytest.approx(0.4))
    assert paying([0.9, 0.5, 0.6], [0.0], limit=2, floor=0.0)[0] == [0, 2]
    assert paying([0.9, 0.5], [0.0], limit=2, floor=0.95) == ([], 0.0)
    assert paying([], [0.0], limit=2, floor=0.0) == ([], 0.0)
