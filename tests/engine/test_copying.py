"""The bars of copies beside a network: what landings teach, for a text and for all."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.copying import FOLLOWED_TOKENS, LENGTHS, SIZES, Copying, Experience, agreeing
from paceline.runner.rounds.protocol import Landed, Match

TEXT = [1, 2, 3, 1, 2, 3]  # position 3 follows a match of three tokens


def beside(everyone: Experience) -> Copying:
    state = Copying(passes=4, max_copy=4)
    state.set_bars(everyone)
    return state


def drafts(state: Copying, everyone: Experience, *, right: int, size: int = 3, said: Sequence[int] = ()) -> None:
    """The network drafts four tokens, of which so many are right, behind a match that is not copied."""
    tokens = tuple(said) or (9,) * (right + 1)
    landed = Landed(tuple(range(right)), (8,) * 4, tokens, match=Match(size, 3, drafted=True, copied=False))
    state.learn(TEXT, landed, everyone, network=True)


def copies(
    state: Copying, everyone: Experience, *, right: int, of: int = 4, size: int = 3, network: bool = True
) -> None:
    landed = Landed(tuple(range(right)), (8,) * of, (8,) * (right + 1), match=Match(size, 3, network, copied=True))
    state.learn(TEXT, landed, everyone, network=network)


def test_copies_of_long_matches_go_first_before_anything_is_known() -> None:
    state = beside(Experience())
    assert SIZES[0] < state.bar <= SIZES[-1]
    assert state.lone_bar <= state.bar


def test_a_network_that_is_right_raises_the_bar() -> None:
    everyone = Experience()
    state = beside(everyone)
    before = state.bar
    for _ in range(30):
        drafts(state, everyone, right=4, size=0)
    assert state.bar == 0 or state.bar > before, "four tokens of four are more than a copy of four is expected to have"
    assert state.lone_bar, "without the network copies are still better than nothing"


def test_wrong_copies_raise_the_bar_and_right_ones_lower_it() -> None:
    everyone = Experience()
    state = beside(everyone)
    bar = state.bar
    for _ in range(30):
        copies(state, everyone, right=0, size=bar)
    assert state.bar > bar
    assert beside(everyone).bar > bar, "a new text has the experience of the others"
    for _ in range(60):
        copies(state, everyone, right=4, size=bar)
    assert state.bar <= bar


def test_matches_that_were_not_copied_teach_as_well() -> None:
    """The text goes on as copies of short matches would, and the network has two tokens right as ever."""
    everyone = Experience()
    state = beside(everyone)
    for _ in range(20):
        drafts(state, everyone, right=2, size=0)
    assert state.bar > SIZES[1]
    for size in SIZES[:2] * 20:
        drafts(state, everyone, right=2, size=size, said=TEXT[:3])
    assert state.bar == SIZES[0]


def test_no_match_is_sure_if_longer_ones_are_not() -> None:
    everyone = Experience()
    state = beside(everyone)
    for _ in range(30):
        copies(state, everyone, right=4, size=3)
        copies(state, everyone, right=0, size=4)
        copies(state, everyone, right=4, size=6)
    assert state.bar == 5


def test_a_text_that_leaves_its_match_ends_the_copy() -> None:
    assert agreeing(TEXT, 3, (1, 2, 3, 1)) == 4, "a copy that reaches the end starts again"
    assert agreeing(TEXT, 3, (1, 2, 9)) == 2
    assert agreeing(TEXT, 1, (2, 3, 1, 2, 3, 2)) == 6


def test_the_network_rests_where_copies_were_right_for_long() -> None:
    everyone = Experience()
    state = beside(everyone)
    rounds = 0
    while state.followed < FOLLOWED_TOKENS:
        copies(state, everyone, right=state.length, of=state.length, network=False)
        rounds += 1
    assert rounds < FOLLOWED_TOKENS / 4
    assert state.length == LENGTHS[-1]
    copies(state, everyone, right=3, of=16)
    assert not state.followed
    assert state.length < LENGTHS[-1]
    assert not everyone.network_drafts, "copies say nothing of the network"


def test_a_plain_round_ends_what_was_followed() -> None:
    everyone = Experience()
    state = beside(everyone)
    state.followed = FOLLOWED_TOKENS
    state.learn(TEXT, Landed((), (), (9,), match=Match(0, 0, drafted=False, copied=False)), everyone, network=False)
    assert not state.followed
    assert not state.hopes
