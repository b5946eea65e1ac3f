"""The main path on real processes: train, lose a replica, go on, catch up, and prove that nothing was lost."""

import sys
from pathlib import Path

import psutil
import pytest
from jobs import Result, finish, kill_all, read_events, run, start, wait_until

sys.path.insert(0, str(Path(__file__).parent / "scripts"))


def check(result: Result, replicas: int, *, units: int | None = None) -> None:
    """Equal bits everywhere, every unit once."""
    assert result.code == 0, result.output[-6000:]
    assert len(result.digests) == replicas, result.output[-6000:]
    assert len(set(result.digests.values())) == 1, result.digests
    trained = result.units()
    assert trained, "no step was committed"
    assert len(trained) == len(set(trained)), "a unit was trained twice"
    if units is not None:
        assert sorted(trained) == list(range(units))
    (final,) = {(e["units_committed"], e["step"]) for e in result.of("final")}
    assert final == (len(trained), len(result.committed()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_undisturbed_job_trains_every_unit_once(tmp_path: Path, ranks: int) -> None:
    result = run(
        tmp_path, "--replicas", "2", "--ranks-per-replica", str(ranks),
        args=("--length", "162", "--unit-size", "4", "--max-grad-norm", "1.0"),
    )  # fmt: skip
    check(result, 2, units=41)


def test_a_job_that_needs_two_replicas_starts(tmp_path: Path) -> None:
    """One of them fetches the other's initial state before anybody has trained a step."""
    result = run(
        tmp_path, "--replicas", "2", "--ranks-per-replica", "1", "--min-replicas", "2",
        args=("--length", "162", "--unit-size", "4"),
    )  # fmt: skip
    check(result, 2, units=41)


def test_a_killed_rank_costs_nothing(tmp_path: Path) -> None:
    """kill -9 in the middle of an exchange: the others go on, the replica comes back, and the bits are the same."""
    result = run(
        tmp_path, "--replicas", "3", "--ranks-per-replica", "1",
        "--fault", "kill replica=1 rank=0 step=10 phase=in_exchange",
        args=("--steps", "150", "--step-seconds", "0.05"),
    )  # fmt: skip
    check(result, 3)
    assert len(result.shots()) == 1
    members = [len(d["members"]) for d in result.committed()]
    assert 2 in members, "the others went on without it"
    assert [m["role"] for m in result.committed()[-1]["members"]] == ["worker"] * 3, "it came back"


def test_mixed_precision_accumulation_and_clipping_survive_a_kill(tmp_path: Path) -> None:
    result = run(
        tmp_path, "--replicas", "2", "--ranks-per-replica", "2",
        "--fault", "kill replica=1 rank=1 step=6 phase=backward",
        args=("--mixed", "--accumulate", "2", "--max-grad-norm", "0.5", "--unit-size", "8", "--steps", "60",
              "--step-seconds", "0.05"),
    )  # fmt: skip
    check(result, 2)
    assert len(result.shots()) == 1


def test_the_store_may_die_too(tmp_path: Path) -> None:
    """kill -9 of etcd: training waits for it, the launcher starts it again, and the job goes on with the same processes."""
    process = start(tmp_path, "--replicas", "2", args=("--steps", "60", "--step-seconds", "0.05"))
    try:
        wait_until(lambda: any(e["event"] == "commit" and e["step"] == 10 for e in read_events(tmp_path)))
        (etcd,) = [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == "etcd"]
        etcd.kill()
        result = finish(process, tmp_path, 90)
    finally:
        kill_all(tmp_path)
    check(result, 2)
    assert len(result.committed()) == 60
    assert len(result.of("spawn")) == 2, "no replica was restarted"
    assert result.of("etcd")
    assert "training waits for the store" in result.output
    assert "the store is back" in result.output
