"""Failures and their timelines, from hand-made records."""

import json

import pytest
from recorder import Recorder, killed_run

from keepstep.observe.history import History
from keepstep.observe.incidents import POINTS, Incident, incidents


def only(recorder: Recorder) -> Incident:
    (incident,) = incidents(History(recorder.run()))
    return incident


def test_the_timeline_of_a_kill() -> None:
    r = killed_run()
    r.add("reported", 5.65, 1)
    r.add("fetch", 6.1, 1)
    r.events[-1]["rank"] = 1
    r.add("fetch", 6.0, 1)
    r.add("materialized", 6.2, 1)
    incident = only(r)
    assert (incident.replica, incident.rank, incident.incarnation) == (1, 1, "b0")
    assert (incident.cause, incident.injected) == ("kill (injected)", True)
    assert (incident.step, incident.phase, incident.worker_step) == (4, "in_exchange", 6)
    after = {point: incident.after(point) for point in POINTS}
    assert after == {
        "seen": pytest.approx(0.01),
        "told": pytest.approx(0.1),
        "decided": pytest.approx(0.3),
        "committed": pytest.approx(1.2),
        "restarted": pytest.approx(1.15),  # its first event: there is no record of a spawn
        "reported": pytest.approx(1.15),
        "admitted": pytest.approx(1.2),
        "fetched": pytest.approx(1.6),  # by its last rank
        "loaded": pytest.approx(1.7),
        "worker": pytest.approx(3.4),
    }
    assert (incident.stall_s, incident.rejoin_stall_s) == (0.7, 0.2)
    assert json.loads(json.dumps(incident.as_json()))["fetched"] == 1.6


def test_a_crash_that_nobody_asked_for() -> None:
    r = killed_run()
    r.faults.clear()
    r.events = [e for e in r.events if e["event"] != "exit"]
    r.add("exit", 4.51, 1, code=-11)
    r.events[-1]["incarnation"] = "b0"
    incident = only(r)
    assert (incident.cause, incident.injected, incident.step) == ("SIGSEGV", False, 4)
    assert incident.after("seen") == 0
    assert incident.detected_s == 0


def test_a_life_that_went_away_unseen_is_an_incident_once_the_next_one_is_there() -> None:
    r = killed_run()
    r.faults.clear()
    r.events = [e for e in r.events if e["event"] != "exit"]
    incident = only(r)
    assert incident.cause == "it went away"
    assert incident.seen is None


def test_a_life_that_was_left_out_and_came_back() -> None:
    r = Recorder()
    r.steps(0, 3, mono=0.0, unit=0)
    r.decide(4, 3, 3, 3.0, r0=[9], r1=[10], r2=[11])
    stop = {"action": "stop", "replica": 2, "rank": 0, "step": 3, "phase": "forward", "incarnation": "c0", "mono": 3.2}
    r.faults.append(stop)
    r.decide(5, 3, 3, 9.0, r0=[9], r1=[10])
    r.commit(5, 3, 10.0, 0, 1)
    r.decide(6, 4, 5, 12.0, r0=[11], r1=[12], r2=[])
    r.commit(6, 4, 13.0, 0, 1)
    r.decide(7, 5, 6, 13.0, r0=[13], r1=[14], r2=[15])
    r.commit(7, 5, 14.0, 0, 1, 2)
    incident = only(r)
    assert (incident.cause, incident.fault) == ("stop (injected)", 3.2)
    assert (incident.decided, incident.admitted, incident.worker) == (9.0, 12.0, 14.0)
    assert incident.restarted is None
    assert incident.stall_s == 6.0
    r.faults.clear()
    assert only(r).cause == "left out alive: frozen or cut off"


def test_the_end_of_a_job_is_no_incident() -> None:
    r = Recorder()
    r.steps(0, 3, mono=0.0, unit=0)
    for replica in range(2):
        r.add("final", 3.0, replica, digest="d", units_committed=9, units_total=9)
        r.add("exit", 3.5, replica, code=0)
    r.add("exit", 3.5, 2, code=-15, stopping=True)
    assert incidents(History(r.run())) == []


def test_a_replica_that_is_given_up() -> None:
    r = killed_run()
    r.events = [e for e in r.events if e.get("incarnation") != "b1"]
    r.add("gave_up", 5.0, 1, reason="it crashed too often")
    r.events[-1]["incarnation"] = None  # the launcher speaks of the replica
    incident = only(r)
    assert incident.gave_up == "it crashed too often"
    assert incident.restarted is None
