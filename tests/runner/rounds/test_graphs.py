"""The choice of rounds, by counts: what is recorded when, and what a step runs in meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.runner.rounds.buckets import Bucket
from paceline.runner.rounds.graphs import Graphs, Prepared

ONE = Bucket(seats=1, rows=1, draft=0, drafter=None, context=512)
TWO, FOUR = replace(ONE, seats=2, rows=2), replace(ONE, seats=4, rows=4)
EDITING = replace(FOUR, edits=True)


@dataclass
class Fake:
    """A round that counts: `ran` on the dummy lane, and `recorded`."""

    bucket: Bucket
    ran: int = 0
    recorded: int = 0

    def run_once(self) -> None:
        self.ran += 1

    def record(self) -> None:
        self.recorded += 1


@dataclass
class Machine:
    room: int = 1000  # graphs that fit
    made: list[Fake] = field(default_factory=list)
    clock: float = 0.0

    def make(self, bucket: Bucket) -> Fake:
        self.clock += 1.0  # a recording takes a second
        self.made.append(Fake(bucket))
        return self.made[-1]

    def graphs(self) -> Graphs[Fake]:
        return Graphs(self.make, has_room=lambda: self.recordings < self.room)

    @property
    def recordings(self) -> int:
        return sum(made.recorded for made in self.made)


def test_the_start_records_until_the_time_is_up() -> None:
    machine, said = Machine(), []
    graphs = machine.graphs()
    wanted = [FOUR, TWO, ONE, EDITING]
    graphs.start(wanted, seconds=1.5, report=lambda *said_: said.append(said_), clock=lambda: machine.clock)
    assert said == [(1, 4), (2, 4)]
    assert [(made.bucket, made.ran, made.recorded) for made in machine.made] == [(FOUR, 1, 1), (TWO, 1, 1)]
    assert [graphs.improve() for _ in range(3)] == [True, True, False], "the rest follows in idle moments"
    assert len(graphs) == machine.recordings == 4


def test_rounds_that_only_make_steps_cheaper_get_less_of_the_time() -> None:
    machine = Machine()
    graphs = machine.graphs()
    graphs.start([FOUR, TWO, ONE, EDITING], seconds=9, needed=1, clock=lambda: machine.clock)
    assert [made.bucket for made in machine.made] == [FOUR, TWO, ONE], "a second each, and 0.3 of 9 seconds"
    slow = Machine()
    slow.graphs().start([FOUR, TWO, ONE, EDITING], seconds=3, needed=3, clock=lambda: slow.clock)
    assert [made.bucket for made in slow.made] == [FOUR, TWO, ONE]


def test_a_step_takes_the_cheapest_round_that_serves_it() -> None:
    machine = Machine()
    graphs = machine.graphs()
    graphs.start([EDITING, FOUR, TWO], seconds=9)
    assert [graphs.find(wanted)[0] for wanted in (ONE, TWO, FOUR, EDITING)] == [TWO, TWO, FOUR, EDITING]
    assert graphs.find(replace(ONE, edits=True))[0] == EDITING
    assert machine.recordings == 3, "no step recorded anything"


def test_a_step_that_no_round_serves_runs_eagerly_at_first() -> None:
    """The second one records the launches of the first, which has compiled all; nothing runs on the dummy lane."""
    machine = Machine()
    graphs = machine.graphs()
    first, second, third = (graphs.find(EDITING) for _ in range(3))
    assert first == second == third
    (made,) = machine.made
    assert (made.ran, made.recorded) == (0, 1)
    assert graphs.find(FOUR)[0] == EDITING


def test_a_step_is_never_recorded_before_its_first_run() -> None:
    machine = Machine()
    _, made = machine.graphs().find(ONE)
    assert not made.recorded


def test_a_step_that_a_larger_round_serves_never_waits_for_its_own() -> None:
    """However often it comes: an idle moment records it."""
    machine = Machine()
    graphs = machine.graphs()
    graphs.start([FOUR], seconds=9)
    assert {graphs.find(ONE)[0] for _ in range(5000)} == {FOUR}
    assert machine.recordings == len(machine.made) == 1
    assert graphs.improve()
    assert [graphs.find(ONE)[0], graphs.find(FOUR)[0]] == [ONE, FOUR]
    assert machine.recordings == 2


def test_an_ability_that_is_not_used_costs_nothing() -> None:
    """No graph of its own for a shape that is recorded with edits."""
    machine = Machine()
    graphs = machine.graphs()
    graphs.start([EDITING], seconds=9)
    assert {graphs.find(FOUR)[0] for _ in range(99)} == {EDITING}
    assert not graphs.improve()
    assert machine.recordings == 1


def test_idle_moments_go_to_what_steps_have_missed() -> None:
    machine = Machine()
    graphs = machine.graphs()
    graphs.start([FOUR, EDITING], seconds=0.5, clock=lambda: machine.clock)
    graphs.find(ONE)
    for _ in range(2):
        graphs.find(TWO)
    assert [graphs.improve() for _ in range(4)] == [True, True, True, False]
    assert [made.bucket for made in machine.made] == [FOUR, TWO, ONE, EDITING]
    assert graphs.find(TWO)[0] == TWO


def test_without_memory_nothing_more_is_recorded() -> None:
    """Steps go on in larger rounds, or launch by launch."""
    machine = Machine(room=1)
    graphs = machine.graphs()
    graphs.start([TWO, FOUR], seconds=9)
    assert machine.recordings == 1
    assert {graphs.find(ONE)[0] for _ in range(99)} == {TWO}
    assert {graphs.find(FOUR)[0] for _ in range(9)} == {FOUR}
    assert not graphs.improve()
    assert machine.recordings == 1
    assert len(machine.made) == 2


def test_the_start_in_words() -> None:
    said = str(Prepared(graphs=90, record_seconds=3.21, compile_seconds=0.5, bytes=12 << 20))
    assert said == "90 recorded in 3.2 s, 12 MiB of the device; kernels compiled in 0.5 s"
