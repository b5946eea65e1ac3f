"""What `keepstep drain`, `add` and `stop` say while they wait, and what they refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from quorum_views import OUTCOME, L, completed, decided, report, view
from test_roster import THREE, host, outcome, pool, seated

from keepstep.launch.operate import Target, coming, emptying, find, leaving, refused, refused_of_host, stopping
from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.messages import Decision, Kind, Report, Request
from keepstep.protocol.roster import Became, Roster
from keepstep.runtime.etcd_view import StoreView

ONE = ReplicaId(1)
LEAVE = Request(request_id="a", leave=True, by="me")
END = replace(L, kind=Kind.END)


def shown(
    last: Decision | None,
    *reports: Report,
    announced: tuple[int, ...] = (),
    requests: dict[ReplicaId | None, Request] | None = None,
    connected: bool = True,
    launched: bool = True,
) -> StoreView:
    return StoreView(
        last=last, revision=1, last_seen_at=0, reports={r.replica_id: (r, 0) for r in reports}, dead=frozenset(),
        announced=frozenset(ReplicaId(i) for i in announced), connected=connected, requests=requests or {},
        launched=launched,
    )  # fmt: skip


def test_a_replica_leaves() -> None:
    progress, all_of_them = leaving(ONE), [completed(i) for i in range(3)]
    assert progress(shown(L, *all_of_them)).words == "waiting for replica 1 to reach a step boundary"
    without = decided(view(completed(0), completed(1, leaving=True), completed(2), last=L))
    assert progress(shown(without, *all_of_them)).words.endswith("waiting for its processes to end")
    gone = progress(shown(without, completed(0), completed(2)))
    assert (gone.words, gone.done) == ("replica 1 has left: replicas 0 and 2 go on", True)


def test_a_replica_that_is_needed_is_named_as_such() -> None:
    progress = leaving(ONE)
    progress(shown(L, completed(1)))
    still = progress(shown(replace(L, step=L.step + 3), completed(1)))
    assert "replica 1 is needed" in still.words
    assert not still.done


def test_a_replica_that_does_not_run_has_left() -> None:
    assert leaving(ONE)(shown(None)).done
    assert not leaving(ONE)(shown(None, announced=(1,))).done, "it is still being started"


def test_a_replica_comes_back() -> None:
    progress = coming(ONE)
    two = replace(L, members=tuple(m for m in L.members if m.replica_id != 1))
    assert progress(shown(two)).words == "waiting for `keepstep run` to start replica 1"
    assert progress(shown(two, launched=False)).words.endswith("start it yourself")
    assert progress(shown(two, announced=(1,))).words == "replica 1 is being started"
    assert not progress(shown(L, announced=(1,))).done, "its report is gone: that was its last life"
    catching = decided(view(completed(0), report(1, 7, life="b"), completed(2), last=L))
    assert progress(shown(catching, report(1, 7, life="b"))).words == "replica 1 catches up"
    back = progress(shown(L, completed(1)))
    assert (back.words, back.done) == (f"replica 1 trains again, from step {L.step}", True)


def test_a_job_stops() -> None:
    assert stopping(shown(L, completed(0))).words == "waiting for every replica to reach the same step boundary"
    end = decided(view(completed(0), completed(1), completed(2), last=L, stopping=True))
    assert stopping(shown(end, completed(0))).words == f"replica 0 leaves before step {OUTCOME.step}"
    for last_look in (shown(end), shown(end, completed(0), connected=False)):
        assert stopping(last_look).words == f"the job has stopped before step {OUTCOME.step}"
        assert stopping(last_look).done
    assert stopping(shown(END)).words.startswith("the job has ended")


@pytest.mark.parametrize(
    ("now", "replica", "leave", "sentence"),
    [
        (shown(END), 1, True, "the job has ended"),
        (shown(L, completed(1)), 1, False, "replica 1 takes part already"),
        (shown(L, completed(1), requests={ONE: LEAVE}), 1, False, ""),
        (shown(L, requests={None: LEAVE}), 1, False, "the job was asked to stop: nobody comes back"),
        (shown(L, completed(1)), 1, True, ""),
        (shown(None), None, True, ""),
    ],
)
def test_what_cannot_be_asked(now: StoreView, replica: int | None, leave: bool, sentence: str) -> None:
    assert refused(now, replica, leave) == sentence


def test_a_run_is_found_by_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPSTEP_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="holds no run"):
        find(tmp_path, None, None, None)
    (tmp_path / "run.json").write_text(json.dumps({"job": "j", "store": None}))
    (tmp_path / "token").write_text("secret\n")
    with pytest.raises(ConfigError, match="has not begun, or is over"):
        find(tmp_path, None, None, None)
    (tmp_path / "run.json").write_text(json.dumps({"job": "j", "store": "etcd://127.0.0.1:1"}))
    target = find(tmp_path, None, None, None)
    assert target == Target(url="etcd://127.0.0.1:1", job="j", token=b"secret", run_dir=tmp_path)
    assert not target.ended
    (tmp_path / "token").unlink()
    assert target.ended
    with pytest.raises(ConfigError, match="has not begun, or is over"):
        find(tmp_path, None, None, None)


@pytest.mark.parametrize(
    ("run_dir", "store", "job", "sentence"),
    [
        (None, None, None, "name either the run directory, or --store and --job"),
        (Path("run"), "etcd://127.0.0.1:1", "j", "name either the run directory, or --store and --job"),
        (None, "etcd://127.0.0.1:1", None, "name either the run directory, or --store and --job"),
        (None, "etcd://127.0.0.1:1", "j", "set KEEPSTEP_TOKEN or --token-file to the job's secret"),
    ],
)
def test_a_job_that_is_named_badly(
    run_dir: Path | None, store: str | None, job: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KEEPSTEP_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=sentence):
        find(run_dir, store, job, None)


# --- hosts ---

ROSTER = seated(THREE)


def of_hosts(roster: Roster, *reports: Report) -> StoreView:
    return replace(shown(L, *reports), roster=roster)


def test_a_drained_host_is_empty_when_its_replicas_are_elsewhere() -> None:
    progress, drained = emptying("a"), replace(ROSTER, drained={"a": LEAVE})
    both = completed(0), completed(1)
    assert progress(of_hosts(drained, *both)).words == "waiting for replica 0 to leave a at a step boundary"
    assert "the last one stays" in progress(of_hosts(drained, completed(0))).words
    left = replace(drained, outcomes={ReplicaId(0): outcome(Became.MOVES, ROSTER.places[ReplicaId(0)])})
    assert progress(of_hosts(left, *both)).words == "waiting for another host to take replica 0"
    done = progress(of_hosts(seated(left), *both))
    assert (done.words, done.done) == ("host a keeps nothing any more: replica 0 on c", True)


def test_a_drained_host_is_empty_though_there_is_no_room_elsewhere() -> None:
    two = seated(replace(THREE, hosts=pool(host("a"), host("b"))))
    left = replace(two, drained={"a": LEAVE}, outcomes={ReplicaId(0): outcome(Became.MOVES, two.places[ReplicaId(0)])})
    done = emptying("a")(of_hosts(left, completed(1)))
    assert (done.words, done.done) == ("host a keeps nothing any more; no other host has room for replica 0", True)


def test_a_job_that_is_stopped_before_it_began() -> None:
    waiting = replace(shown(None), roster=Roster(plan=THREE.plan, hosts=THREE.hosts))
    assert not stopping(waiting).done
    gone = replace(waiting, roster=Roster(plan=THREE.plan), launched=False)
    assert (stopping(gone).words, stopping(gone).done) == ("the job has ended before its first step", True)


def test_a_host_that_the_job_does_not_have() -> None:
    assert refused_of_host(of_hosts(ROSTER), "a") == ""
    assert refused_of_host(of_hosts(ROSTER), "z") == "the job has no host z: name one of a, b, c, or a replica's number"
    assert refused_of_host(shown(L), "a").startswith("no agents run this job")
    assert refused_of_host(replace(of_hosts(ROSTER), last=END), "a") == "the job has ended"
