"""What goes wrong in the user's own script, optimizer or data: what is said, who goes on, and that no bit differs.

In one replica only, it is as good as a crash: that replica gets another life, the others go on. In every replica, it is a
mistake that no restart repairs: the job ends, and names it.
"""

import math
from pathlib import Path

import pytest
from jobs import Result
from matrix import FAULTY, Job
from test_training import check

SHORT = ("--steps", "120", "--step-seconds", "0.05")


def run(run_dir: Path, what: str, *more: str, replicas: int = 3, steps: tuple[str, ...] = SHORT) -> tuple[Job, Result]:
    with Job(run_dir, replicas=replicas, script=FAULTY, args=("--what", what, *more, *steps)) as job:
        return job, job.finish()


def exits_of(result: Result, replica: int) -> list[tuple[int, int]]:
    return [(e["life"], e["code"]) for e in result.of("exit") if e["replica"] == replica]


# --- in one replica ----------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise", "RuntimeError: the script is wrong here"),
        ("optimizer", "ArithmeticError: the optimizer is wrong here"),
        ("data raises", "OSError: the data cannot be read here"),
        ("data ends", "RuntimeError: generator raised StopIteration"),
        ("worker dies", "is killed by signal: Killed"),
    ],
)
def test_an_exception_in_one_replica(tmp_path: Path, what: str, said: str) -> None:
    """The optimizer's comes after the vote: the others have committed that step, and it must not be trained twice."""
    job, result = run(tmp_path, what)
    job.same_bits(result)
    assert said in result.output
    assert "replica 1 rank 0 exited with code 1; the other replicas go on" in result.output
    assert exits_of(result, 1) == [(1, 1), (2, 0)]
    assert [job.lives(0), job.lives(2)] == [1, 1]
    assert [m["role"] for m in result.committed()[-1]["members"]] == ["worker"] * 3, "it came back"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("exit", 78, "the script left the training loop before the job ended"),
        ("exit at once", 0, "ended with exit code 0 before the job did"),
    ],
)
def test_a_script_that_exits_0_in_one_replica(tmp_path: Path, what: str, code: int, said: str) -> None:
    """It has said that it is done, so it gets no other life; but it is not, so its sentence is in the log. The others go on."""
    job, result = run(tmp_path, what)
    job.same_bits(result, replicas=2)
    assert exits_of(result, 1) == [(1, code)]
    assert [said in e["reason"] for e in result.of("gave_up")] == [True], result.of("gave_up")
    assert f"replica 1 is given up: {result.of('gave_up')[0]['reason']}" in result.output


# --- in every replica --------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("raise", 1, "RuntimeError: the script is wrong here"),
        ("optimizer", 1, "ArithmeticError: the optimizer is wrong here"),
        ("data raises", 1, "OSError: the data cannot be read here"),
        ("exit", 78, "the script left the training loop before the job ended"),
        ("exit at once", 78, "ended with exit code 0 before the job did"),
    ],
)
def test_a_mistake_in_every_replica_ends_the_job_and_is_named(tmp_path: Path, what: str, code: int, said: str) -> None:
    job, result = run(tmp_path, what, "--where", "-1", "--every-life", replicas=2)
    assert result.code == code
    reasons = {e["replica"]: e["reason"] for e in result.of("gave_up")}
    assert reasons.keys() == {0, 1}
    assert any(said in reason for reason in reasons.values()), reasons
    assert max(job.lives(0), job.lives(1)) <= 6


# --- not a number ------------------------------------------------------------------------------------------------


def test_a_bad_sample_spoils_every_replica_alike(tmp_path: Path) -> None:
    """As with plain PyTorch, the job goes on: NaN is a number to us. All replicas hold the same bits, and `step.loss` says NaN
    on all of them, so that a script can decide, and all decide alike.
    """
    _, result = run(tmp_path, "nan", steps=("--length", "200"))
    check(result, 3)
    losses = {(e["step"], e["replica"]): e["loss"] for e in result.of("commit")}
    spoilt = {step: {r for s, r in losses if s == step and math.isnan(losses[s, r])} for step, _ in losses}
    first = min((step for step, replicas in spoilt.items() if replicas), default=None)
    assert first is not None, "the bad sample was not trained"
    assert all(spoilt[step] == ({0, 1, 2} if step >= first else set()) for step in spoilt)
