"""Leaving and coming back on real processes: `keepstep drain`, `add` and `stop`, and what dies in between."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import Result, finish, read_events, wait_until
from matrix import Job

ENDLESS = ("--steps", "100000", "--step-seconds", "0.03")


def keepstep(*args: object, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", *map(str, args)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **env},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def commits(run_dir: Path, replica: int) -> list[dict[str, Any]]:
    return [e for e in read_events(run_dir) if e["event"] == "commit" and e["replica"] == replica]


def train_on(run_dir: Path, replica: int, steps: int = 3) -> None:
    """Until `replica` has committed some more."""
    before = len(commits(run_dir, replica))
    wait_until(lambda: len(commits(run_dir, replica)) >= before + steps)


def stopped_well(result: Result, replicas: set[int]) -> None:
    """The job was stopped: those who were in it have the same bits, and each unit up to there is trained once."""
    assert result.code == 0, result.output[-6000:]
    assert "the job was stopped, as it was asked to, and is not complete" in result.output
    step = max(c["step"] for c in result.of("commit")) + 1
    last = [e for e in result.of("left") if e["rank"] == 0 and e["step"] == step]
    assert {e["replica"] for e in last} == replicas, "nobody trained on"
    assert len({e["digest"] for e in last}) == 1
    assert len(result.committed()) == step
    assert sorted(result.units()) == list(range(len(result.units())))


def test_a_replica_is_drained_comes_back_and_the_job_stops(tmp_path: Path) -> None:
    with Job(tmp_path, "--ranks-per-replica", "2", replicas=3, args=ENDLESS) as job:
        for replica in range(3):
            train_on(tmp_path, replica)
        code, said = keepstep("drain", 1, tmp_path)
        assert (code, said.splitlines()[-1]) == (0, "keepstep: replica 1 has left: replicas 0 and 2 go on")
        train_on(tmp_path, 0)
        now = json.loads(keepstep("status", tmp_path, "--json")[1])
        assert [r["doing"] for r in now["replicas"]] == ["worker", "left", "worker"]
        assert keepstep("drain", 1, tmp_path)[0] == 0, "nothing is left to do"
        code, said = keepstep("add", 1, tmp_path)
        assert code == 0, said
        assert "keepstep: replica 1 trains again, from step" in said
        assert keepstep("add", 1, tmp_path) == (78, "keepstep: replica 1 takes part already\n")
        code, said = keepstep("stop", tmp_path)
        assert code == 0, said
        result = finish(job.process, tmp_path, 60)
    stopped_well(result, {0, 1, 2})
    assert [(e["replica"], e["life"]) for e in result.of("spawn")] == [(0, 1), (1, 1), (2, 1), (1, 2)]
    assert {e["code"] for e in result.of("exit")} == {0}, "of every process"
    assert not result.of("restart")
    assert not result.of("retry"), "nobody's step was disturbed"
    drained = next(e for e in result.of("left") if e["replica"] == 1)
    mine = [c["step"] for c in result.of("commit") if c["replica"] == 1 and c["mono"] < drained["mono"]]
    assert drained["step"] == mine[-1] + 1, "it left at the boundary of its last step"
    assert [c["step"] for c in result.of("commit") if c["replica"] == 0] == list(range(len(result.committed())))
    code, said = keepstep("stop", tmp_path)
    assert (code, said) == (78, f"keepstep: the run in {tmp_path} has not begun, or is over\n")


def test_who_is_needed_stays_and_may_be_asked_back(tmp_path: Path) -> None:
    with Job(tmp_path, "--min-replicas", "2", replicas=2, args=ENDLESS) as job:
        train_on(tmp_path, 1)
        code, said = keepstep("drain", 1, tmp_path, "--wait", "2")
        assert code == 1
        assert "replica 1 is needed" in said
        assert "the request stands" in said
        code, said = keepstep("add", 1, tmp_path)
        assert code == 0, said
        wait_until(lambda: any(e["event"] == "asked" and not e["leave"] for e in read_events(tmp_path)))
        train_on(tmp_path, 1)
        assert keepstep("stop", tmp_path)[0] == 0
        result = finish(job.process, tmp_path, 60)
    stopped_well(result, {0, 1})
    assert [(e["replica"], e["life"]) for e in result.of("spawn")] == [(0, 1), (1, 1)]


def test_a_frozen_replica_that_was_to_leave_is_killed_and_not_restarted(tmp_path: Path) -> None:
    """The request stands, though nobody waits for it any more; whoever dies instead of leaving is gone all the same."""
    with Job(tmp_path, replicas=2, args=ENDLESS) as job:
        train_on(tmp_path, 1)
        pid = next(e["pids"][0] for e in read_events(tmp_path) if e["event"] == "spawn" and e["replica"] == 1)
        os.kill(pid, signal.SIGSTOP)
        code, said = keepstep("drain", 1, tmp_path, "--wait", "0.5")
        assert code == 1, said
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: any(e["event"] == "replica_left" for e in read_events(tmp_path)))
        train_on(tmp_path, 0)
        code, said = keepstep("add", 1, tmp_path)
        assert code == 0, said
        assert keepstep("stop", tmp_path)[0] == 0
        result = finish(job.process, tmp_path, 60)
    stopped_well(result, {0, 1})
    assert "replica 1 was to leave, and has failed before: rank 0 was killed by SIGKILL" in result.output
    assert [(e["replica"], e["life"]) for e in result.of("spawn")] == [(0, 1), (1, 1), (1, 2)]
    assert not result.of("restart")


@pytest.mark.faults
def test_a_leader_that_dies_while_the_job_stops_holds_up_nobody(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=3, args=ENDLESS) as job:
        for replica in range(3):
            train_on(tmp_path, replica)
        pid = next(e["pids"][0] for e in read_events(tmp_path) if e["event"] == "spawn" and e["replica"] == 2)
        os.kill(pid, signal.SIGSTOP)  # the others wait for it in an exchange
        asked = subprocess.Popen([sys.executable, "-m", "keepstep", "stop", str(tmp_path)], stdout=subprocess.DEVNULL)
        wait_until(lambda: any(e["event"] == "stop_asked" for e in read_events(tmp_path)))
        os.kill(pid, signal.SIGKILL)
        assert asked.wait(60) == 0  # before `finish`, which leaves nothing alive that names the run directory
        result = finish(job.process, tmp_path, 60)
    stopped_well(result, {0, 1})
    assert not result.of("restart")


@pytest.mark.faults
def test_a_saver_that_dies_while_the_job_stops_is_replaced(tmp_path: Path) -> None:
    """However long the other one takes: an exit that was no end of the job does not start the grace of those who follow."""
    slow = [word for r in range(2) for word in ("--fault", f"slow=4 replica={r} rank=0 phase=saving")]
    options = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "100000", "--finish-grace", "1")
    with Job(tmp_path / "run", *options, *slow, replicas=2, args=ENDLESS) as job:
        for replica in range(2):
            train_on(tmp_path / "run", replica)
        command = [sys.executable, "-m", "keepstep", "stop", str(tmp_path / "run")]
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        first = wait_until(lambda: [e["saver"] for e in job.of("decision") if e["saver"] is not None])[0]
        os.kill(next(e["pids"][0] for e in job.of("spawn") if e["replica"] == first), signal.SIGKILL)
        said, _ = asked.communicate(timeout=60)
        result = finish(job.process, tmp_path / "run", 60)
    stopped_well(result, {1 - first})
    assert asked.returncode == 0
    (checkpoint,) = result.of("checkpoint")
    assert (checkpoint["replica"], checkpoint["step"]) == (1 - first, max(c["step"] for c in result.of("commit")) + 1)
    assert f"keepstep: replica {1 - first} saves state {checkpoint['step']}; then all leave" in said


def test_a_job_on_another_store_wants_its_own_token(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=1, args=ENDLESS) as job:
        train_on(tmp_path, 0)
        about = json.loads((tmp_path / "run.json").read_text())
        named = ("--store", about["store"], "--job", about["job"])
        code, said = keepstep("stop", *named, KEEPSTEP_TOKEN="another")
        assert (code, said) == (
            78,
            f"keepstep: this is not the token of job {about['job']}: give its own with --token-file\n",
        )
        code, said = keepstep("drain", 1, *named, "--token-file", tmp_path / "token")
        assert code == 78
        assert "has replicas 0 to 0, their number is fixed when it starts (--replicas)" in said
        assert keepstep("stop", *named, "--token-file", tmp_path / "token")[0] == 0
        stopped_well(finish(job.process, tmp_path, 60), {0})
