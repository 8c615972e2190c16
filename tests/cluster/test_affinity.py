"""Where requests go: beginnings, sessions, names, and when affinity yields."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from paceline.cluster import affinity
from paceline.cluster.affinity import Affinity, Beginnings, Wish, rendezvous
from paceline.cluster.prefixes import FIRST_LENGTH, beginnings, hashes, prompt_text

IDLE = {"a": 0, "b": 0, "c": 0}


def of(**fields: Any) -> tuple[str, ...]:
    return beginnings(json.dumps(fields).encode())


# Beginnings.


def test_lengths_of_beginnings_double() -> None:
    assert [len(hashes("x" * n)) for n in (63, 64, 127, 128, 255, 256, 1 << 20)] == [0, 1, 1, 2, 2, 3, 15]


def test_texts_share_the_beginnings_that_they_share() -> None:
    one, other = "x" * 200 + "y" * 100, "x" * 200 + "z" * 100
    assert hashes(one)[:2] == hashes(other)[:2]
    assert hashes(one)[2] != hashes(other)[2]
    assert len(set(hashes("x" * 5000))) == len(hashes("x" * 5000))


def test_a_conversation_that_goes_on_keeps_its_beginnings() -> None:
    turn = [{"role": "user", "content": "w" * 150}]
    short, long = of(messages=turn), of(messages=[*turn, {"role": "assistant", "content": "v" * 500}], seed=4)
    assert short
    assert long[: len(short)] == short


@pytest.mark.parametrize("field", ["tools", "system", "cache_salt", "instructions"])
def test_what_stands_before_the_messages_counts_first(field: str) -> None:
    turn = [{"role": "user", "content": "w" * 150}]
    assert of(messages=turn)[0] != of(messages=turn, **{field: "t" * FIRST_LENGTH})[0]


def test_sampling_and_the_order_of_fields_do_not_count() -> None:
    assert of(prompt="p" * 99, seed=1) == of(temperature=2, prompt="p" * 99, model="m")
    message = {"content": "c" * 99, "role": "user"}
    assert of(messages=[message]) == of(messages=[dict(reversed(message.items()))])


def test_every_way_to_give_a_prompt_counts() -> None:
    assert all(of(**{name: "p" * 99}) for name in ("prompt", "input", "input_prefix", "messages"))
    assert of(prompt=list(range(100))) == of(prompt=list(range(100)))
    assert prompt_text({"prompt": None}) == "null"


@pytest.mark.parametrize("body", [b"", b"[1]", b"nonsense", b"\xff", b"[" * 100_000, b'{"a": 1}', b'"text"'])
def test_a_body_without_a_prompt_has_none(body: bytes) -> None:
    assert beginnings(body) == ()


def test_half_a_surrogate_pair_is_no_failure() -> None:
    assert beginnings(b'{"prompt": "' + b"\\ud800" * 99 + b'"}')


# Memory.


def test_old_beginnings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_BEGINNINGS", 3)
    known = Beginnings()
    known.add("abc")
    known.add("a")  # used again
    known.add("d")
    assert known.latest(9) == ["c", "a", "d"]
    assert known.latest(2) == ["a", "d"]
    assert (known.shared("adx"), known.shared("ba"), known.shared("")) == (2, 0, 0)


# Choices.


def test_a_named_replica_is_the_only_one() -> None:
    assert Affinity().ranks(Wish(replica="b", session="s", beginnings=("h",)), IDLE) == [["b"]]


def test_a_name_that_is_gone_goes_anywhere_where_it_is_refused() -> None:
    [anyone] = Affinity().ranks(Wish(replica="gone"), IDLE)
    assert sorted(anyone) == sorted(IDLE)


def test_a_session_stays_until_its_replica_goes() -> None:
    router, other = Affinity(), Affinity()
    for session in map(str, range(50)):
        ranks = router.ranks(Wish(session=session), IDLE)
        assert ranks == other.ranks(Wish(session=session), {"c": 9, "a": 1, "b": 4})
        assert len(ranks) == 3
        left = {name: 0 for name in IDLE if name != ranks[0][0]}
        assert router.ranks(Wish(session=session), left) == ranks[1:]


def test_a_new_replica_takes_its_share_of_sessions_and_no_other_moves() -> None:
    before = {session: rendezvous(session, "abc")[0] for session in map(str, range(600))}
    after = {session: rendezvous(session, "abcd")[0] for session in before}
    moved = [session for session in before if before[session] != after[session]]
    assert all(after[session] == "d" for session in moved)
    assert 100 < len(moved) < 200
    assert min(Counter(before.values()).values()) > 150


def test_requests_without_a_wish_are_spread() -> None:
    router = Affinity()
    firsts = Counter(router.ranks(Wish(), IDLE)[0][0] for _ in range(300))
    assert min(firsts.values()) > 60


def test_the_longest_known_beginning_wins() -> None:
    router = Affinity()
    router.routed(Wish(beginnings=("1", "2")), "a")
    router.routed(Wish(beginnings=("1", "2", "3")), "b")
    first, others = router.ranks(Wish(beginnings=("1", "2", "3", "4")), IDLE)
    assert first == ["b"]
    assert sorted(others) == ["a", "c"]
    both, _ = router.ranks(Wish(beginnings=("1", "2")), IDLE)
    assert sorted(both) == ["a", "b"]  # the less busy of them is the router's choice


def test_repeated_beginnings_hit() -> None:
    router, draw = Affinity(), random.Random(0)
    prompts = [hashes(f"{i} " * 300) for i in range(20)]
    for _ in range(400):
        wish = Wish(beginnings=draw.choice(prompts))
        router.routed(wish, router.ranks(wish, IDLE)[0][0])
    assert (router.hits, router.misses) == (380, 20)


def test_affinity_yields_to_a_busy_replica() -> None:
    router, wish = Affinity(max_imbalance=4), Wish(beginnings=("1",))
    router.routed(wish, "a")
    assert router.ranks(wish, {"a": 4, "b": 0, "c": 9})[0] == ["a"]
    [anyone] = router.ranks(wish, {"a": 5, "b": 0, "c": 9})
    assert sorted(anyone) == ["a", "b", "c"]


def test_what_replicas_report_counts_and_what_is_gone_does_not() -> None:
    router, wish = Affinity(), Wish(beginnings=("1", "2"))
    router.learn("c", ["1", "2"])
    assert router.ranks(wish, IDLE)[0] == ["c"]
    router.keep(["a", "b"])
    assert len(router.ranks(wish, IDLE)) == 1


def test_prefixes_can_be_off() -> None:
    router = Affinity(prefixes=False)
    router.routed(Wish(beginnings=("1",)), "a")
    assert len(router.ranks(Wish(beginnings=("1",)), IDLE)) == 1
