"""How a job does, from hand-made records and from what a store holds."""

import json
from dataclasses import replace

import pytest
from machines import C, W, decision, member
from recorder import Recorder, killed_run
from test_roster import PLAN, host, pool, seated

from keepstep.observe.records import Run
from keepstep.observe.status import Status, for_prometheus, in_words, of_run, of_view
from keepstep.protocol.ids import Incarnation, ReplicaId, Seq
from keepstep.protocol.messages import Decision, Kind, Report, Request
from keepstep.protocol.roster import Roster
from keepstep.runtime.etcd import JobRecord
from keepstep.runtime.etcd_view import StoreView


def until(recorder: Recorder, mono: float) -> Run:
    """The records as they were then."""
    run = recorder.run()
    return Run(
        events=tuple(e for e in run.events if e["mono"] <= mono),
        faults=tuple(f for f in run.faults if f["mono"] <= mono),
    )


def doing(status: Status) -> list[str]:
    return [r.doing for r in status.replicas]


@pytest.mark.parametrize(
    ("mono", "state", "now"),
    [
        (3.5, "running", ["worker", "worker", "worker"]),
        (4.9, "running", ["worker", "dead", "worker"]),
        (6.0, "running", ["worker", "catching_up", "worker"]),
        (7.0, "running", ["worker", "worker", "worker"]),
        (8.0, "running", ["done", "done", "done"]),
    ],
)
def test_from_the_records(mono: float, state: str, now: list[str]) -> None:
    r = killed_run()
    for e in r.events:
        if e["event"] == "exit":
            e["incarnation"] = "b0"
    status = of_run(until(r, mono), "my-job", now=mono)
    assert (status.state, doing(status)) == (state, now)
    assert json.loads(json.dumps(status.as_json()))["state"] == state


def test_spares_that_are_ready_are_counted() -> None:
    r = killed_run()
    for number, state in ((1, "started"), (2, "started"), (1, "ready"), (2, "ready"), (1, "taken"), (3, "started")):
        r.events.append({"event": "spare", "mono": 7.0, "t": 7.0, "number": number, "state": state})
    status = of_run(r.run(), "my-job", now=7.5)
    assert status.spares == status.as_json()["spares"] == 1
    assert "  spares: 1\n" in in_words(status)
    assert "keepstep_spares 1\n" in for_prometheus(status)
    assert of_run(r.run(), "my-job", now=None).spares == 0, "its launcher is gone, and they with it"


def test_before_the_first_step_and_after_the_last() -> None:
    r = killed_run()
    assert of_run(until(r, -1.0), "my-job", now=0.0).state == "starting"
    assert of_run(r.run(), "my-job", now=None).state == "lost"
    r.add("end", 9.0, 0, code=0)
    status = of_run(r.run(), "my-job", now=None)
    assert status.state == "complete"
    assert "failures: 1" in in_words(status)
    r.events[-1]["code"] = 143
    assert "it ended with exit code 143" in in_words(of_run(r.run(), "my-job", now=None))


def test_for_prometheus() -> None:
    lines = for_prometheus(of_run(killed_run().run(), "my-job", now=None)).splitlines()
    assert "keepstep_productive_seconds_total 20.8" in lines
    assert "keepstep_incidents_total 1" in lines
    assert not [line for line in lines if "{" in line]


RECORD = JobRecord(
    version="1", num_replicas=3, ranks_per_replica=2, data_fingerprint="", layout_digest="", token_check="t"
)


def view(last: Decision | None, *lives: str, dead: tuple[str, ...] = (), announced: tuple[int, ...] = ()) -> StoreView:
    reports = {}
    for life in lives:
        replica = ReplicaId("abcdefgh".index(life[0]))
        reports[replica] = (
            Report(
                replica_id=replica, incarnation=Incarnation(life), answers=Seq(0), state=None, materialized=False, ledger=None
            ),
            0,
        )  # fmt: skip
    return StoreView(
        last=last, revision=1, last_seen_at=0, reports=reports, dead=frozenset(map(Incarnation, dead)),
        announced=frozenset(map(ReplicaId, announced)), connected=True,
    )  # fmt: skip


def test_from_the_store() -> None:
    last = decision(9, 8, 8, member(0, W, 1), member(1, C), quorum=7)
    status = of_view(RECORD, view(last, "a0", "b0", announced=(0, 1, 2)), "my-job")
    assert (status.state, status.step, status.quorum_id, status.seq) == ("running", 8, 7, 9)
    assert doing(status) == ["worker", "catching_up", "starting"]
    assert "1 of 3 replicas train" in in_words(status)


@pytest.mark.parametrize(
    ("found", "state", "now"),
    [
        (view(None, announced=(0, 1)), "starting", ["starting", "starting", "absent"]),
        (view(decision(9, 8, 8, member(0, W, 1), member(1, W, 2)), "a0", "b0", dead=("b0",)), "running",
         ["worker", "dead", "absent"]),
        (view(decision(9, 8, 8, member(0, W, 1), member(1, W, 2)), "a0", "b1"), "running", ["worker", "starting", "absent"]),
        (view(decision(9, 8, 8, member(0, W, 1))), "lost", ["dead", "absent", "absent"]),
        (view(decision(9, 8, 8, member(0, W), kind=Kind.END)), "complete", ["done", "absent", "absent"]),
    ],
)  # fmt: skip
def test_what_the_store_cannot_hide(found: StoreView, state: str, now: list[str]) -> None:
    status = of_view(RECORD, found, "my-job")
    assert (status.state, doing(status)) == (state, now)


def test_hosts_and_what_they_keep() -> None:
    roster = seated(Roster(plan=PLAN, hosts=pool(host("a", label="b1/z1/r1"), host("b"), host("c"))))
    away = replace(
        roster, hosts=pool(host("b"), host("c")), drained={"c": Request(request_id="1", leave=True, by="me")}
    )
    status = of_view(RECORD, replace(view(None), roster=away), "my-job")
    assert [(h.host, h.doing, h.replicas) for h in status.hosts] == [
        ("a", "away", (1,)),
        ("b", "in the pool", (0,)),
        ("c", "drained", ()),
    ]
    assert in_words(status).splitlines()[-3:] == [
        "  host a: away, keeps replica 1",
        "  host b: in the pool, keeps replica 0 (2 slots)",
        "  host c: drained, keeps nothing (2 slots)",
    ]
    assert status.as_json()["hosts"][1] == {
        "host": "b",
        "doing": "in the pool",
        "slots": 2,
        "label": "",
        "replicas": (0,),
    }
