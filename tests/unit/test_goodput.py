"""Where the time went, from hand-made records."""

import json

import pytest
from recorder import Recorder, killed_run

from keepstep.observe.findings import Findings
from keepstep.observe.goodput import NS, Goodput, Segment, State, flatten
from keepstep.observe.records import Run


def of(recorder: Recorder, until: float | None = None) -> Goodput:
    return Findings.of(recorder.run(), until=until).goodput


def told(goodput: Goodput, slot: int) -> list[tuple[str, float]]:
    """A slot's states and how long each lasted, in seconds."""
    return [(s.state.value, round((s.end - s.start) / NS, 6)) for s in goodput.slots[slot]]


def test_the_last_paint_wins_and_what_is_bare_is_unattributed() -> None:
    paints = [
        (0, 8, State.PRODUCTIVE),
        (2, 4, State.STALL),
        (3, 6, State.IDLE),
        (-5, 1, State.INIT),
        (7, 7, State.INIT),
    ]
    assert flatten(0, 10, paints) == (
        Segment(0, 1, State.INIT),
        Segment(1, 2, State.PRODUCTIVE),
        Segment(2, 3, State.STALL),
        Segment(3, 6, State.IDLE),
        Segment(6, 8, State.PRODUCTIVE),
        Segment(8, 10, State.UNATTRIBUTED),
    )


def test_a_kill_and_the_return_of_the_killed() -> None:
    goodput = of(killed_run())
    assert told(goodput, 1) == [
        ("productive", 4.0),  # steps 0 to 3
        ("discarded", 0.5),  # step 4, in which it died
        ("detect", 0.01),
        ("restart", 1.19),  # to its next life's first decision
        ("catch_up", 1.2),  # to the one in which it is a WORKER; nothing was recorded of its fetch
        ("productive", 1.0),
        ("quorum_wait", 0.1),  # the job is over, it waits to be told
    ]
    assert told(goodput, 0) == [("productive", 7.9), ("quorum_wait", 0.1)]
    assert goodput.ettr_replica == pytest.approx((5.0 + 2 * 7.9) / 24)
    assert goodput.ettr_wall == pytest.approx(7.9 / 8)


def test_what_survivors_wait_for_is_a_stall_until_the_decision_that_counts() -> None:
    r = killed_run()
    for e in r.events:
        if e["event"] == "commit" and e["seq"] == 6:
            e["phases"] = [["wait", 4.4, 5.7], ["data_wait", 4.0, 4.25]]
    assert told(of(r), 0) == [
        ("productive", 4.0),
        ("data_wait", 0.25),
        ("productive", 0.15),
        ("stall", 0.4),  # from when it had computed, through the exchange that failed, to the new decision at 4.8
        ("productive", 3.1),  # the exchange that counts is none
        ("quorum_wait", 0.1),
    ]


def test_a_lost_member_makes_others_stall_even_if_no_step_was_voted_down() -> None:
    r = killed_run()
    r.events = [e for e in r.events if e["event"] != "retry"]
    for e in r.events:
        if e["event"] == "commit" and e["seq"] == 6:
            e["phases"] = [["wait", 4.4, 5.7]]
    waits = [(s, n) for s, n in told(of(r), 2) if s in ("stall", "quorum_wait")]
    assert waits == [("quorum_wait", 0.1), ("stall", 0.3), ("quorum_wait", 0.1)]  # it died at 4.5; the last is the end


def test_building_a_new_ring_is_a_stall() -> None:
    r = killed_run()
    r.add("ring", 7.1, 0, quorum_id=8)
    for e in r.events:
        if e["event"] == "commit" and e["seq"] == 8:
            e["phases"] = [["wait", 6.95, 7.9]]
    assert ("stall", 0.15) in told(of(r), 0)


def test_a_life_that_was_left_out_and_came_back() -> None:
    r = Recorder()
    r.steps(0, 3, mono=0.0, unit=0)
    r.decide(4, 3, 3, 3.0, r0=[9], r1=[10], r2=[11])
    r.decide(5, 3, 3, 9.0, r0=[9], r1=[10])  # replica 2 is frozen
    r.commit(5, 3, 10.0, 0, 1)
    r.decide(6, 4, 5, 12.0, r0=[11], r1=[12], r2=[])
    r.add("fetch", 12.5, 2)
    r.add("materialized", 12.6, 2)
    r.commit(6, 4, 13.0, 0, 1)
    r.decide(7, 5, 6, 13.0, r0=[13], r1=[14], r2=[15])
    r.commit(7, 5, 14.0, 0, 1, 2)
    assert told(of(r), 2) == [
        ("productive", 3.0),
        ("discarded", 6.0),
        ("stall", 3.0),
        ("transfer", 0.5),
        ("catch_up", 0.5),
        ("productive", 1.0),
    ]


def test_a_replica_that_freezes_before_it_can_write_its_commit() -> None:
    """It writes it when it wakes up, and has not trained for so long."""
    r = Recorder()
    r.steps(0, 2, mono=0.0, unit=0)
    r.decide(3, 2, 2, 2.0, r0=[6], r1=[7], r2=[8])
    r.commit(3, 2, 3.0, 0, 1)
    r.decide(4, 3, 3, 5.0, r0=[9], r1=[10])
    r.commit(4, 3, 6.0, 0, 1)
    r.commit(3, 2, 11.0, 2)
    r.decide(5, 4, 4, 12.0, r0=[11], r1=[12], r2=[])
    r.commit(5, 4, 13.0, 0, 1)
    assert told(of(r), 2)[:2] == [("productive", 5.0), ("stall", 7.0)]


def test_a_revoked_step_is_discarded() -> None:
    r = Recorder()
    r.steps(0, 3, mono=0.0, unit=0)
    r.decide(4, 3, 3, 3.0, r0=[9], r1=[10], r2=[11])
    r.commit(4, 3, 4.0, 2)
    r.decide(5, 3, 3, 9.0, r0=[9], r1=[10])
    r.commit(5, 3, 10.0, 0, 1)
    assert ("discarded", 1.0) in told(of(r), 2)


def test_a_replica_that_is_given_up_is_idle() -> None:
    r = killed_run()
    r.events = [e for e in r.events if e.get("incarnation") != "b1"]
    r.add("gave_up", 5.0, 1, reason="it crashed too often")
    r.events[-1]["incarnation"] = None  # the launcher speaks of the replica
    assert told(of(r), 1)[-2:] == [("restart", 0.49), ("idle", 3.0)]


def test_what_goes_on_is_unattributed_until_it_is_committed() -> None:
    r = Recorder()
    r.steps(0, 2, mono=0.0, unit=0)
    r.decide(3, 2, 2, 2.0, r0=[6], r1=[7], r2=[8])
    assert told(of(r, until=2.75), 0) == [("productive", 2.0), ("unattributed", 0.75)]


def test_a_slot_that_nothing_is_known_of() -> None:
    r = Recorder()
    r.steps(0, 2, mono=0.0, unit=0)
    for e in r.events:
        e["num_replicas"] = 4
    assert told(of(r), 3) == [("unattributed", 2.0)]


def test_nothing_recorded() -> None:
    goodput = Findings.of(Run(events=())).goodput
    assert goodput.slots == {}
    assert goodput.ettr_replica is goodput.ettr_wall is None
    assert goodput.ettr_over_time(points=10, window=5) == []
    assert json.dumps(goodput.as_json())


def test_ettr_over_time_ends_at_the_ettr() -> None:
    goodput = of(killed_run())
    rows = goodput.ettr_over_time(points=16, window=NS)
    assert rows[-1][:2] == (goodput.end, goodput.ettr_replica)
    assert rows[7][1:] == (1.0, 1.0)
    assert rows[9] == (5 * NS, pytest.approx(14 / 15), pytest.approx(2 / 3))
