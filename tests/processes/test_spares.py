"""Warm spares: a lost replica goes on in processes that have run its script up to `keepstep.join()` already.

Docs: docs/operations.md. In every test the job ends with the bits that one process gets, whatever became of the spare.
"""

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import TINY, processes_of, wait_until
from matrix import FAULTY, Job
from test_leaving import keepstep

STEPS = ("--steps", "500", "--step-seconds", "0.05")


def until(job: Job, state: str, *, beside: int = 0) -> dict[str, Any]:
    """The first `spare` event of a state, but for so many."""
    found: list[dict[str, Any]] = job.wait(lambda: f if len(f := job.of("spare", state=state)) > beside else None)
    return found[beside]


def spare_of(job: Job, number: int) -> list[psutil.Process]:
    (started,) = job.of("spare", state="started", number=number)
    return [psutil.Process(pid) for pid in started["pids"]]


def next_life(job: Job, replica: int = 1, *, number: int = 2) -> dict[str, Any]:
    """How the leader of this life of a replica came into join()."""
    spawn = job.wait(lambda: job.of("spawn", replica=replica, life=number))[0]
    entered: list[dict[str, Any]] = job.wait(lambda: job.of("entered", incarnation=spawn["incarnation"], rank=0))
    return entered[0]


def test_a_killed_replica_goes_on_in_a_spare(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Job(run_dir, "--spares", "1", "--ranks-per-replica", "2", replicas=2, args=STEPS) as job:
        ready = until(job, "ready")
        spare = spare_of(job, ready["number"])
        assert not [c for p in spare for c in p.net_connections("tcp")], "it holds no port and no connection"
        assert json.loads(keepstep("status", "--json", run_dir)[1])["spares"] == 1
        job.until_step(10)
        job.rank(1).kill()
        assert next_life(job)["spare"]
        assert job.of("spawn", replica=1)[-1]["pids"] == [p.pid for p in spare]
        until(job, "ready", beside=1)  # the next one
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(2)] == [1, 2]
    assert "--- replica 1 rank 1, life 2" in (run_dir / "logs" / "replica1-rank1.log").read_text()
    assert not list(processes_of(run_dir))


@pytest.mark.faults
def test_spares_that_die_or_freeze_are_no_loss(tmp_path: Path) -> None:
    """One is killed while it waits: another one comes. That one is frozen when it is needed: killed, and done without."""
    with Job(tmp_path, "--spares", "1", "--ranks-per-replica", "2", replicas=2, args=STEPS) as job:
        first = until(job, "ready")
        spare_of(job, first["number"])[1].kill()
        ended = until(job, "ended")
        assert "was killed by SIGKILL" in ended["reason"]
        second = until(job, "ready", beside=1)
        frozen = spare_of(job, second["number"])
        frozen[1].suspend()
        job.rank(1).kill()
        assert next_life(job)["spare"], "rank 0 of it could be used"
        job.until_step(job.last_step() + 20, replica=1)
        assert not frozen[1].is_running() or frozen[1].status() == psutil.STATUS_ZOMBIE
        result = job.finish()
    job.same_bits(result)
    assert f"spare {second['number']} cannot be used" in result.output
    assert [job.lives(r) for r in range(2)] == [1, 2]


@pytest.mark.faults
def test_a_spare_that_dies_while_it_is_told_its_place_or_right_after(tmp_path: Path) -> None:
    with Job(tmp_path, "--spares", "1", "--ranks-per-replica", "2", replicas=2, args=STEPS) as job:
        spare = spare_of(job, until(job, "ready")["number"])
        spare[1].suspend()  # so that it is being told for a second
        job.rank(1).kill()
        until(job, "taken")
        spare[1].kill()
        assert next_life(job)["spare"], "rank 0 of it could be used"
        job.until_step(job.last_step() + 5, replica=1)
        until(job, "ready", beside=1)
        job.rank(1).kill()
        job.wait(lambda: job.of("spawn", replica=1, life=3))
        job.rank(1, 1).kill()  # it is a rank like any other by now
        next_life(job, number=4)
        job.until_step(job.last_step() + 5, replica=1)
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(2)] == [1, 4]
    assert not list(processes_of(tmp_path))


@pytest.mark.faults
def test_a_spare_of_an_older_script_or_module_is_not_used(tmp_path: Path) -> None:
    script, module = tmp_path / "train.py", tmp_path / "beside.py"
    module.write_text("")
    script.write_text("import beside\n" + TINY.read_text())
    with Job(tmp_path / "run", "--spares", "1", replicas=2, script=script, args=STEPS) as job:
        for life, changed in enumerate((script, module), 2):
            until(job, "ready", beside=life - 2)
            changed.write_text(changed.read_text() + "# changed\n")
            job.rank(1).kill()
            assert not next_life(job, number=life)["spare"]
            assert until(job, "stale", beside=life - 2)
        until(job, "ready", beside=2)
        job.rank(1).kill()
        assert next_life(job, number=4)["spare"]
        result = job.finish()
    job.same_bits(result)


@pytest.mark.faults
def test_a_drained_replica_comes_back_in_a_spare_and_the_job_stops(tmp_path: Path) -> None:
    args = ("--steps", "100000", "--step-seconds", "0.05")
    with Job(tmp_path, "--spares", "1", replicas=2, args=args) as job:
        until(job, "ready")
        assert keepstep("drain", "1", tmp_path)[0] == 0
        assert not job.of("spare", state="taken"), "nobody takes the place of one that was asked to leave"
        assert "\n  spares: 1\n" in keepstep("status", tmp_path)[1]
        assert keepstep("add", "1", tmp_path)[0] == 0
        assert next_life(job)["spare"]
        until(job, "started", beside=1)
        assert keepstep("stop", tmp_path)[0] == 0
        result = job.finish()
    assert result.code == 0, result.output
    assert not list(processes_of(tmp_path))


@pytest.mark.faults
def test_a_script_that_must_know_its_replica_before_join_has_no_spares(tmp_path: Path) -> None:
    """train_faulty reads REPLICA_ID first of all."""
    args = ("--what", "nothing", *STEPS)
    with Job(tmp_path, "--spares", "1", replicas=2, script=FAULTY, args=args) as job:
        until(job, "ended", beside=1)
        job.rank(1).kill()
        assert not next_life(job)["spare"]
        result = job.finish()
    job.same_bits(result)
    assert "KeyError: 'REPLICA_ID'" in result.output
    assert "a spare has ended, the next one is tried in 1 s" in result.output
    assert result.output.count("a spare has ended") == 1, "said once"


@pytest.mark.faults
def test_spares_and_what_they_have_started_end_with_the_launcher(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text("import subprocess\nsubprocess.Popen(['sleep', '1000'])\n" + TINY.read_text())
    with Job(run_dir, "--spares", "2", replicas=2, script=script, args=STEPS) as job:
        until(job, "ready", beside=1)
        assert sum(p.name() == "sleep" for p in processes_of(run_dir)) == 4
        os.kill(job.process.pid, 9)
        job.process.wait(30)
        wait_until(lambda: not list(processes_of(run_dir)), 30)
