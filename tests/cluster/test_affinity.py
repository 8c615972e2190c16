"""Where requests go: beginnings, sessions, names, and when affinity yields."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from paceline.cluster import affinity, ring
from paceline.cluster.affinity import DRAWN, MAX_HOMES, NO_WISH, Affinity, Beginnings, Homes, Wish
from paceline.cluster.prefixes import FIRST_LENGTH, beginnings, hashes, prompt_text
from paceline.cluster.ring import PLACES, Ring
from tests.cluster import router_cost

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


def test_a_router_remembers_the_latest_homes_of_the_latest_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_REMEMBERED", 3)
    homes = Homes()
    for each in "abcad":
        homes.add("r1", each)
    assert (len(homes), homes.of("b"), homes.of("a")) == (3, [], ["r1"])
    names = [f"r{number}" for number in range(MAX_HOMES + 9)]
    for name in [*names, names[-1]]:
        homes.add(name, "a")
    assert homes.of("a") == names[9:]


# Choices.


def among(names: Iterable[str], **options: Any) -> Affinity:
    """A router of these replicas."""
    router = Affinity(random=random.Random(0), **options)
    router.keep(names)
    return router


def ranks(router: Affinity, wish: Wish, busy: Mapping[str, int] = IDLE) -> list[list[str]]:
    return router.ranks(wish, busy.__getitem__)


def chosen(router: Affinity, wish: Wish, busy: Mapping[str, int]) -> str:
    """The replica that gets a request where all take one: the least busy one of the first group, as in Ray."""
    return min(ranks(router, wish, busy)[0], key=busy.__getitem__)


def test_a_named_replica_is_the_only_one() -> None:
    assert ranks(among(IDLE), Wish(replica="b", session="s", beginnings=("h",))) == [["b"]]


def test_a_name_that_is_gone_goes_anywhere_where_it_is_refused() -> None:
    [anyone] = ranks(among(IDLE), Wish(replica="gone"))
    assert sorted(anyone) == sorted(IDLE)


def test_a_session_stays_until_its_replica_goes() -> None:
    router, other = among(IDLE), among(reversed(IDLE))
    for session in map(str, range(50)):
        wish = Wish(session=session)
        [first], [second], anyone = ranks(router, wish)
        assert ranks(other, wish, {"c": 9, "a": 1, "b": 4})[:2] == [[first], [second]]
        assert sorted(anyone) == sorted(IDLE), "where both are full"
        assert ranks(among(IDLE.keys() - {first}), wish)[0] == [second]


def test_requests_without_a_wish_are_spread() -> None:
    for names, least in ((IDLE, 60), ([f"r{number}" for number in range(30)], 1)):
        router = among(names)
        firsts = Counter(router.ranks(NO_WISH, lambda name: 0)[0][0] for _ in range(300))
        assert set(firsts) == set(names)
        assert min(firsts.values()) > least


def test_the_longest_known_beginning_wins() -> None:
    router = among(IDLE)
    router.routed(Wish(beginnings=("1", "2")), "a")
    router.routed(Wish(beginnings=("1", "2", "3")), "b")
    first, others = ranks(router, Wish(beginnings=("1", "2", "3", "4")))
    assert first == ["b"]
    assert sorted(others) == ["a", "b", "c"]
    both, _ = ranks(router, Wish(beginnings=("1", "2")))
    assert sorted(both) == ["a", "b"]  # the less busy of them is the router's choice


def test_repeated_beginnings_hit() -> None:
    router, draw = among(IDLE), random.Random(0)
    prompts = [hashes(f"{i} " * 300) for i in range(20)]
    for _ in range(400):
        wish = Wish(beginnings=draw.choice(prompts))
        router.routed(wish, chosen(router, wish, IDLE))
    assert (router.hits, router.misses) == (380, 20)


@pytest.mark.parametrize("replicas", [10, 1000])
def test_repeats_go_where_their_prompt_is_known_under_load(replicas: int) -> None:
    """With as many open requests as a cluster of busy replicas has, some replicas being slow."""
    draw, busy = random.Random(1), {f"r{number}": 0 for number in range(replicas)}
    router, wishes = among(busy), [Wish(beginnings=hashes(f"{i:05} " * 50)) for i in range(2 * replicas)]
    running: list[str] = []
    seen: set[Wish] = set()
    repeats = hits = 0
    for wish in draw.choices(wishes, k=16 * replicas):
        name, before = chosen(router, wish, busy), router.hits
        router.routed(wish, name)
        repeats += wish in seen
        hits += router.hits - before
        seen.add(wish)
        busy[name] += 1
        running.append(name)
        if len(running) > 6 * replicas:  # six for each in the mean
            busy[running.pop(draw.randrange(len(running)))] -= 1
    assert hits > 0.9 * repeats > 10 * replicas
    assert max(busy.values()) <= 3 * 6, "no replica is left with most of them"


def test_prompts_stay_when_replicas_come_and_go() -> None:
    names = [f"r{number}" for number in range(20)]
    router, idle = among(names[:10]), dict.fromkeys(names, 0)
    homes: dict[Wish, str] = {}
    for wish in router_cost.PROMPTS[:200]:
        homes[wish] = chosen(router, wish, idle)
        router.routed(wish, homes[wish])
    assert set(homes.values()) == set(names[:10])
    router.keep(names)
    assert all(chosen(router, wish, idle) == home for wish, home in homes.items())
    router.keep(names[2:])
    moved = {wish for wish, home in homes.items() if chosen(router, wish, idle) != home}
    assert moved == {wish for wish, home in homes.items() if home in names[:2]}


def test_affinity_yields_to_a_busy_replica() -> None:
    router, wish = among(IDLE, max_imbalance=4), Wish(beginnings=("1",))
    router.routed(wish, "a")
    assert ranks(router, wish, {"a": 4, "b": 0, "c": 9})[0] == ["a"]
    [anyone] = ranks(router, wish, {"a": 5, "b": 0, "c": 9})
    assert sorted(anyone) == ["a", "b", "c"]


def test_routers_agree_on_a_prompt_that_nobody_knows() -> None:
    names = [f"r{number}" for number in range(50)]
    for wish in router_cost.PROMPTS[:20]:
        firsts = [router.ranks(wish, lambda name: 0)[0] for router in (among(names), among(reversed(names)))]
        assert firsts[0] == firsts[1]
        assert len(firsts[0]) == 2, "of which the less busy one gets it"


def test_a_beginning_that_many_know_is_offered_to_a_few() -> None:
    busy = {f"r{number}": number for number in range(20)}
    router, wish = among(busy, max_imbalance=99), Wish(beginnings=("1",))
    for name in list(busy)[5:]:
        router.routed(wish, name)
    found = [ranks(router, wish, busy)[0] for _ in range(50)]
    assert {len(each) for each in found} == {DRAWN}
    assert {name for each in found for name in each} == set(list(busy)[5:])


def test_what_replicas_report_counts_and_what_is_gone_does_not() -> None:
    router, wish = among(IDLE), Wish(beginnings=("1", "2"))
    router.learn("c", ["1", "2"])
    assert ranks(router, wish)[0] == ["c"]
    router.keep(["a", "b"])
    assert "c" not in {name for group in ranks(router, wish) for name in group}


def test_prefixes_can_be_off() -> None:
    router = among(IDLE, prefixes=False)
    router.routed(Wish(beginnings=("1",)), "a")
    assert len(ranks(router, Wish(beginnings=("1",)))) == 1


# The ring.

NAMES = [f"{number:08x}" for number in range(100)]
SESSIONS = [f"session {number}" for number in range(3000)]


def homes_of(names: Iterable[str]) -> dict[str, str]:
    found = Ring(names)
    return {session: found.nearest(session, 1)[0] for session in SESSIONS}


def test_replicas_have_like_shares_of_sessions() -> None:
    counts = Counter(homes_of(NAMES[:20]).values())
    assert len(counts) == 20
    assert 100 < min(counts.values()) <= max(counts.values()) < 200, "150 in the mean"


def test_a_new_replica_takes_its_share_of_sessions_and_no_other_moves() -> None:
    before, after = homes_of(NAMES[:19]), homes_of(NAMES[:20])
    moved = [session for session in SESSIONS if before[session] != after[session]]
    assert {after[session] for session in moved} == {NAMES[19]}
    assert 100 < len(moved) < 200


def test_sessions_of_a_replica_that_goes_are_shared_by_the_others() -> None:
    before, after = homes_of(NAMES[:20]), homes_of(NAMES[1:20])
    moved = [session for session in SESSIONS if before[session] != after[session]]
    assert {before[session] for session in moved} == {NAMES[0]}
    assert len({after[session] for session in moved}) > 12


def test_the_order_of_a_key_is_that_of_all_distances() -> None:
    """Against the definition: the least distance of any place of a replica behind any probe of the key."""
    found = Ring(NAMES[:9])
    for key in SESSIONS[:200]:
        distances = {
            name: min((place - probe) % ring.ROUND for place in ring._places(name) for probe in ring._numbers(key))
            for name in NAMES[:9]
        }
        assert found.nearest(key, 9) == sorted(distances, key=distances.__getitem__)
        assert found.nearest(key, 2) == found.nearest(key, 9)[:2]
    assert Ring([]).nearest("k", 2) == []
    assert Ring(["a"]).nearest("k", 2) == ["a"]
    assert len(set(ring._places("a"))) == PLACES


# Work.


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.calls, self._function = 0, function

    def __call__(self, *given: Any, **options: Any) -> Any:
        self.calls += 1
        return self._function(*given, **options)


@pytest.mark.parametrize(
    ("kind", "looks", "hashed"), [("without a wish", 0, 0), ("by session", 0, 1), ("by prefix", 1 + DRAWN, 0)]
)
def test_the_work_for_a_request_does_not_grow_with_the_replicas(
    kind: str, looks: int, hashed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: replicas whose load is looked at, and hashes."""
    for count in (100, 1000):
        busy = router_cost.loads(count)
        router = among(busy)
        for wish in router_cost.PROMPTS:
            router.routed(wish, chosen(router, wish, busy))
        router.ranks(Wish(session="s"), busy.__getitem__)  # the ring is made once for these replicas
        with monkeypatch.context() as patch:
            hashing = Counted(hashlib.blake2b)
            patch.setattr(ring, "blake2b", hashing)
            for wish in router_cost.KINDS[kind]:
                looking, before = Counted(busy.__getitem__), hashing.calls
                router.ranks(wish, looking)
                assert looking.calls <= looks
                assert hashing.calls - before == hashed
