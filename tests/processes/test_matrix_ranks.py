"""Ranks that freeze, crash, hang or eat all memory: the other replicas go on, this one comes back, the bits are the same.

Docs: docs/faults.md. The bounds on time only guard against hanging.
"""

import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from jobs import Result, wait_until
from matrix import FAULTY, Job

from keepstep.observe.findings import Findings
from keepstep.observe.goodput import NS, State
from keepstep.observe.records import read_run

STEPS = ("--steps", "120", "--step-seconds", "0.05")
LONG = ("--steps", "260", "--step-seconds", "0.05")


def one_died(job: Job, result: Result, code: int, *, rank: int = 0) -> None:
    """Replica 1 lost `rank` once, with this code, and came back; the others did not notice more than that."""
    job.same_bits(result)
    exits = [e for e in result.of("exit") if e["replica"] == 1 and e["life"] == 1]
    assert (rank, code) in [(e["rank"], e["code"]) for e in exits], exits
    assert [job.lives(r) for r in range(3)] == [1, 2, 1]
    assert 2 in [len(d["members"]) for d in result.committed()], "the others went on without it"
    assert [m["role"] for m in result.committed()[-1]["members"]] == ["worker"] * 3, "it came back"


# --- frozen ------------------------------------------------------------------------------------------------------


def test_a_rank_that_freezes_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """For less than silence is allowed (1.5 s), and so for less than its lease (2 s)."""
    with Job(tmp_path, args=STEPS) as job:
        job.until_step(10)
        frozen = job.rank(1)
        frozen.suspend()
        job.stays(0.8)
        frozen.resume()
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(3)] == [1, 1, 1]
    assert {len(d["members"]) for d in result.committed()} == {3}, "nobody was left out"
    assert not result.of("retry")


@pytest.mark.faults
def test_a_replica_that_freezes_for_longer_than_its_lease_is_left_out_and_comes_back(tmp_path: Path) -> None:
    """In the same life: nobody but the quorum has given it up. What it was about to commit is not merged (I4)."""
    with Job(tmp_path, args=LONG) as job:
        job.until_step(10)
        frozen, at = job.rank(1), time.monotonic()
        frozen.suspend()
        job.wait(lambda: [d for d in job.of("decision") if d["mono"] > at and len(d["members"]) == 2], 20)
        job.goes_on(20)
        frozen.resume()
        job.until_step(job.last_step(), replica=1, seconds=30)
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(3)] == [1, 1, 1]
    assert [m["role"] for m in result.committed()[-1]["members"]] == ["worker"] * 3
    findings = Findings.of(read_run(result.run_dir))
    (incident,) = findings.incidents
    assert (incident.replica, incident.cause) == (1, "left out alive: frozen or cut off")
    assert incident.decided is not None
    assert incident.decided <= incident.committed < incident.admitted < incident.loaded < incident.worker  # type: ignore[operator]
    spent = findings.goodput.totals(1)
    assert spent[State.STALL] > 0.5 * NS, "it stood aside while the others took 20 steps"
    assert sum(spent.values()) == findings.goodput.elapsed


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "other"])
def test_a_frozen_rank_of_two_is_given_up_by_the_other_and_replaced(tmp_path: Path, rank: int) -> None:
    """The other rank of its replica misses it after 10 s, hangs in a collective for 10 s more, and ends (75); 5 s later the
    launcher kills the frozen one. Meanwhile the other replica goes on."""
    args = ("--steps", "600", "--step-seconds", "0.05")
    with Job(tmp_path, "--ranks-per-replica", "2", replicas=2, args=args) as job:
        job.until_step(10)
        job.rank(1, rank).suspend()
        job.goes_on(100)
        job.wait(lambda: job.lives(1) == 2, 40)
        result = job.finish()
    job.same_bits(result)
    exits = {e["rank"]: e["code"] for e in result.of("exit") if e["replica"] == 1 and e["life"] == 1}
    assert exits == {rank: -9, 1 - rank: 75}
    assert [job.lives(r) for r in range(2)] == [1, 2]
    assert [m["role"] for m in result.committed()[-1]["members"]] == ["worker"] * 2, "it came back"


@pytest.mark.faults
def test_the_launcher_freezes_while_a_rank_dies(tmp_path: Path) -> None:
    """For longer than its lease (5 s). The others need it only for the replica's next life, which begins when it thaws."""
    with Job(tmp_path, args=LONG) as job:
        job.until_step(10)
        launcher = psutil.Process(job.process.pid)
        launcher.suspend()
        job.rank(1).kill()
        job.goes_on(100)
        assert job.lives(1) == 1
        launcher.resume()
        result = job.finish()
    one_died(job, result, -signal.SIGKILL)


# --- killed ------------------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGABRT], ids=["SIGTERM", "SIGABRT"])
def test_a_rank_that_a_signal_ends(tmp_path: Path, how: signal.Signals) -> None:
    """SIGTERM is no wish to end the job: that goes to the launcher."""
    with Job(tmp_path, args=STEPS) as job:
        job.until_step(10)
        job.rank(1).send_signal(how)
        result = job.finish()
    one_died(job, result, -how)
    assert f"replica 1 rank 0 was killed by {how.name}; the other replicas go on" in result.output


@pytest.mark.faults
def test_a_rank_that_crashes_in_native_code(tmp_path: Path) -> None:
    job, result = with_fault(tmp_path, "segv")
    one_died(job, result, -signal.SIGSEGV)
    assert "replica 1 rank 0 was killed by SIGSEGV" in result.output


def with_fault(tmp_path: Path, what: str, *more: str, steps: tuple[str, ...] = STEPS) -> tuple[Job, Result]:
    with Job(tmp_path, script=FAULTY, args=("--what", what, *more, *steps)) as job:
        return job, job.finish()


# --- hanging -----------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_thread_that_holds_the_interpreter_lock(tmp_path: Path) -> None:
    """20 s in which no Python of the rank runs: as if it were frozen. K = 1, so nobody gives it up."""
    job, result = with_fault(tmp_path, "hold the interpreter lock", steps=("--steps", "600", "--step-seconds", "0.05"))
    job.same_bits(result)
    assert [job.lives(r) for r in range(3)] == [1, 1, 1]
    sizes = [len(d["members"]) for d in result.committed()]
    assert 2 in sizes, "the others went on without it"
    assert [m["role"] for m in result.committed()[-1]["members"]] == ["worker"] * 3, "it came back"
    stop = max(gap for gap in gaps(result, replica=0))
    assert stop < 8.0, f"the others stood still for {stop:.1f} s"


def test_a_main_thread_that_hangs_for_a_while_is_left_out_and_comes_back(tmp_path: Path) -> None:
    """Everything else of the rank lives: its links beat, its leader answers. Only the rank knows, and says so."""
    args = ("--what", "hang", "--rank", "1", *LONG)
    with Job(tmp_path, "--ranks-per-replica", "2", script=FAULTY, args=args) as job:
        slow = job.wait(lambda: job.of("slow", replica=1))[0]
        job.goes_on(60)
        assert not [e for e in job.of("commit", replica=1) if e["mono"] > slow["mono"]]
        (tmp_path / "go-on").touch()
        job.until_step(job.last_step() + 5, replica=1)
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(3)] == [1, 1, 1]
    assert {len(d["members"]) for d in result.committed()} == {2, 3}
    assert "without replica 1 for now: alive, and no progress" in " ".join(d["reason"] for d in result.decisions)
    assert any("train_faulty.py" in e["at"] for e in result.of("slow") if e["rank"] == 1), "it says where"
    (incident,) = Findings.of(read_run(tmp_path)).incidents
    assert (incident.replica, incident.cause) == (1, "left out alive: no progress")


@pytest.mark.faults
def test_a_hang_in_the_second_step_of_a_later_life_is_found_by_what_the_life_before_has_learned(tmp_path: Path) -> None:
    """In seconds: without it, the ceiling of 300 s would have to do."""
    hang = "slow=250 replica=1 rank=1 phase=forward count=2 incarnation=second role=worker"
    args = ("--steps", "500", "--step-seconds", "0.05")
    with Job(tmp_path, "--ranks-per-replica", "2", "--fault", hang, args=args) as job:
        job.wait(lambda: len(list((tmp_path / "pace").glob("*.json"))) == 6)
        job.rank(1).kill()
        second = job.wait(lambda: job.of("spawn", replica=1, life=2))[0]["incarnation"]
        found = job.wait(lambda: job.of("slow", incarnation=second, rank=1), 200)[0]
        job.goes_on(20)
        job.rank(1, 1).kill()
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(3)] == [1, 3, 1]
    assert found["before_s"] > 0.01
    assert 1.0 < found["took_s"] < 100.0
    assert "such a step of its life before took" in result.output


@pytest.mark.faults
def test_a_main_thread_that_hangs_for_good_ends_its_life(tmp_path: Path) -> None:
    with Job(tmp_path, script=FAULTY, args=("--what", "hang", *LONG), KEEPSTEP_STRAGGLER_S="5") as job:
        result = job.finish()
    one_died(job, result, 1)
    assert "train_faulty.py" in result.of("stuck")[0]["at"]
    assert "keepstep: rank 0: its main thread has made no progress for 5 s, and is at" in result.output


@pytest.mark.faults
def test_a_main_thread_that_hangs_for_good_where_nobody_can_go_on_without_it(tmp_path: Path) -> None:
    args = ("--what", "hang", *STEPS)
    with Job(tmp_path, "--min-replicas", "3", script=FAULTY, args=args, KEEPSTEP_STRAGGLER_S="5") as job:
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(3)] == [1, 2, 1]
    assert "keepstep: rank 0: its main thread has made no progress for" in result.output
    assert "with replicas 0 and 2 waiting for it" in result.output


@pytest.mark.faults
def test_replicas_that_are_all_slow_are_all_waited_for(tmp_path: Path) -> None:
    """As when a shared file system stands still, or all evaluate: nobody is left out, and none is ended, since nobody is late."""
    args = ("--what", "hang", "--where", "-1", *STEPS)
    with Job(tmp_path, script=FAULTY, args=args, KEEPSTEP_STRAGGLER_S="5") as job:
        job.wait(lambda: {e["replica"] for e in job.of("stuck")} == {0, 1, 2})
        job.stays(3.0)
        (tmp_path / "go-on").touch()
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(3)] == [1, 1, 1]
    assert {len(d["members"]) for d in result.committed()} == {3}, "nobody was left out"


def gaps(result: Result, *, replica: int) -> list[float]:
    """The times between a replica's commits."""
    times = [e["mono"] for e in result.of("commit") if e["replica"] == replica]
    return [b - a for a, b in pairwise(times)]


# --- out of memory -----------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_rank_that_gets_no_more_memory(tmp_path: Path) -> None:
    """RLIMIT_AS: an exception in the script, which ends the rank as any other does."""
    job, result = with_fault(tmp_path, "no memory")
    one_died(job, result, 1)
    assert "MemoryError" in result.output


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory cgroup (v1 or v2) with a small limit."""
    root, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not root.exists():
        root, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = root / f"keepstep-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 << 20))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.mark.faults
def test_a_rank_that_the_kernel_kills_for_its_memory(tmp_path: Path, memory_group: Path) -> None:
    job, result = with_fault(tmp_path, "too much memory", "--group", str(memory_group))
    one_died(job, result, -signal.SIGKILL)
