"""What goes wrong with etcd: training waits for it and goes on with the same processes, or ends with a sentence.

A replica is never restarted because of the store, and what is committed stays so.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcds import Etcds
from jobs import Result
from matrix import Job, fill, small_disk

STEPS = ("--steps", "150", "--step-seconds", "0.04")


def nobody_died(job: Job, result: Result) -> None:
    job.same_bits(result)
    assert len(result.committed()) == 150
    assert [job.lives(r) for r in range(job.replicas)] == [1] * job.replicas


def stands_still(job: Job, seconds: float = 3.0) -> None:
    """Nothing is committed and nobody ends while the store is away (what was decided before is)."""
    job.stays(1.0)
    before = job.last_step()
    job.stays(seconds)
    assert job.last_step() == before, "a step was committed without the store"


# --- one etcd ----------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_the_embedded_etcd_freezes(tmp_path: Path) -> None:
    """For longer than every lease: when it thaws, all reports are gone at once, and are written again."""
    with Job(tmp_path, args=STEPS) as job:
        job.until_step(10)
        etcd = job.etcd()
        etcd.suspend()
        stands_still(job, 8.0)
        etcd.resume()
        result = job.finish()
    nobody_died(job, result)
    assert "training waits for the store" in result.output


@pytest.mark.faults
def test_the_embedded_etcd_is_killed_again_and_again(tmp_path: Path) -> None:
    with Job(tmp_path, args=STEPS) as job:
        for step in (10, 30, 50, 70):
            job.until_step(step)
            job.etcd().kill()
            job.wait(lambda step=step: len(job.of("etcd")) == (10, 30, 50, 70).index(step) + 1)
        result = job.finish()
    nobody_died(job, result)


@pytest.mark.faults
def test_a_foreign_etcd_goes_away_for_a_while(tmp_path: Path) -> None:
    """Nobody of ours starts that one again."""
    with Etcds(tmp_path, 1) as etcds, Job(tmp_path / "run", "--store", etcds.url, args=STEPS) as job:
        job.until_step(10)
        etcds.kill(0)
        stands_still(job, 6.0)
        etcds.start(0)
        result = job.finish()
    nobody_died(job, result)
    assert "training waits for the store" in result.output


@pytest.mark.faults
def test_a_rank_dies_while_etcd_is_away_for_long(tmp_path: Path) -> None:
    """Its next life waits for etcd, too: waiting is no reason to be given up."""
    with Etcds(tmp_path, 1) as etcds, Job(tmp_path / "run", "--store", etcds.url, args=STEPS) as job:
        job.until_step(10)
        etcds.kill(0)
        job.rank(1).kill()
        job.wait(lambda: job.lives(1) == 2)
        job.stays(45.0)
        etcds.start(0)
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(3)] == [1, 2, 1]
    assert [m["role"] for m in result.committed()[-1]["members"]] == ["worker"] * 3, "it came back"


@pytest.mark.faults
def test_a_new_life_does_not_begin_a_job_anew_whose_data_is_lost(tmp_path: Path) -> None:
    with Etcds(tmp_path, 1) as etcds, Job(tmp_path / "run", "--store", etcds.url, args=STEPS) as job:
        job.until_step(10)
        etcds.kill(0)
        shutil.rmtree(etcds.data(0))
        job.rank(1).kill()
        job.wait(lambda: job.lives(1) == 2)
        etcds.start(0)
        result = job.finish(60)
    assert result.code == 1
    assert [job.lives(r) for r in range(3)] == [1, 2, 1]
    assert all("the store has lost the job's history" in e["reason"] for e in result.of("gave_up"))
    assert len(result.of("gave_up")) == 3


def test_a_store_that_has_lost_its_data_ends_the_job(tmp_path: Path) -> None:
    """Whoever goes on would make a second history. No replica gets another life, and the sentence says why."""
    with Etcds(tmp_path, 1) as etcds, Job(tmp_path / "run", "--store", etcds.url, args=STEPS) as job:
        job.until_step(10)
        etcds.kill(0)
        shutil.rmtree(etcds.data(0))
        etcds.start(0)
        result = job.finish(60)
    assert result.code == 1
    assert [job.lives(r) for r in range(3)] == [1, 1, 1]
    assert {e["code"] for e in result.of("exit")} == {93}
    assert len(result.of("gave_up")) == 3
    assert all("the store has lost the job's history" in e["reason"] for e in result.of("gave_up"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path) as path:
        yield path


@pytest.mark.faults
def test_the_disk_of_etcd_is_full(tmp_path: Path, disk: Path) -> None:
    """It ends when it cannot write. Started again with room, it has everything it had promised."""
    steps = ("--steps", "1500", "--step-seconds", "0.0")
    with Etcds(disk, 1) as etcds, Job(tmp_path / "run", "--store", etcds.url, args=steps) as job:
        job.until_step(10)
        filler = fill(disk)
        job.wait(lambda: etcds.processes[0].poll() is not None, 120)
        stands_still(job)
        filler.unlink()
        etcds.kill(0)
        etcds.start(0)
        job.goes_on()
        job.process.terminate()
        result = job.finish(30)
    assert result.code == 128 + 15
    assert [job.lives(r) for r in range(3)] == [1, 1, 1]
    units = result.units()
    assert len(units) == len(set(units)) > 30


# --- three etcds -------------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_one_of_three_etcds_is_lost(tmp_path: Path, how: str) -> None:
    """Whichever it is: the job knows them all, and hardly notices."""
    steps = ("--steps", "400", "--step-seconds", "0.02")
    with Etcds(tmp_path, 3) as etcds, Job(tmp_path / "run", "--store", etcds.url, replicas=2, args=steps) as job:
        for member in range(3):
            job.goes_on(20)
            etcds.kill(member) if how == "killed" else etcds.freeze(member)
            job.goes_on(20, 60)
            etcds.start(member) if how == "killed" else etcds.thaw(member)
            etcds.wait(member)
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(2)] == [1, 1]


@pytest.mark.faults
def test_the_majority_of_three_etcds_is_lost_and_comes_back(tmp_path: Path) -> None:
    with Etcds(tmp_path, 3) as etcds, Job(tmp_path / "run", "--store", etcds.url, args=STEPS) as job:
        job.until_step(10)
        etcds.kill(0)
        etcds.kill(1)
        stands_still(job, 6.0)
        etcds.start(0)
        result = job.finish()
    nobody_died(job, result)
