"""Jobs whose replicas all die, with their store or without: they go on from files, and have the bits of one process."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Result, finish, kill_all, read_events, run, start, wait_until
from test_reference import replay

from keepstep.protocol.errors import EX_CONFIG

sys.path.insert(0, str(Path(__file__).parent / "scripts"))

import train_tiny

ARGS = ("--step-seconds", "0.05")


def saved(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that a run has published, so far."""
    return [e["step"] for e in read_events(run_dir) if e["event"] == "checkpoint"]


def history(*runs: Result) -> list[dict[str, Any]]:
    """The committed decisions that led to the final state, from the first run's beginning, through every restored checkpoint."""
    by_seq = [{d["seq"]: d for d in each.decisions} for each in runs]
    at, chain = len(runs) - 1, []
    last = max(c["seq"] for c in runs[-1].of("commit"))
    while True:
        while last not in by_seq[at]:
            at -= 1  # what an earlier run with another store has saved
        decision = by_seq[at][last]
        if decision["restore"] is not None:
            last = int(decision["restore"].split("-")[1])
            if at and last not in {c["seq"] for c in runs[at].of("commit")}:
                at -= 1
            continue
        if decision["kind"] == "train":
            chain.append(decision)
        if decision["step"] == 0 or decision["base"] == last:
            return chain[::-1]
        last = decision["base"]


def check(
    chain: list[dict[str, Any]], last: Result, steps: int, *, replicas: int, ranks: int, options: tuple[str, ...]
) -> None:
    """Each step and each unit once, and every replica has the bits of one process that trains them."""
    assert last.code == 0, last.output
    assert [d["step"] for d in chain] == list(range(steps))
    units = [u for d in chain for m in d["members"] for u in m["units"]]
    assert len(set(units)) == len(units)
    whole = Result(0, "", last.run_dir)
    whole.committed = lambda: chain  # type: ignore[method-assign]
    torch.set_num_threads(1)
    reference = replay(whole, train_tiny.arguments().parse_args(options), replicas=replicas, ranks=ranks)
    for rank in range(ranks):
        expected = train_tiny.fingerprint(list(reference.shards[rank]))
        for replica in range(replicas):
            assert (last.run_dir / f"parameters-{replica}-{rank}").read_text() == expected, (replica, rank)


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[str]:
    return ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "10"]


def test_everything_dies_with_the_store_and_the_job_goes_on_from_files_with_another_number_of_replicas(
    tmp_path: Path, checkpoints: list[str]
) -> None:
    """The launcher is killed, and with it all ranks and etcd; a second run has a store of its own, and so does a third."""
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    process = start(first, "--replicas", "2", "--ranks-per-replica", "2", *checkpoints, args=(*ARGS, "--steps", "500"))
    try:
        wait_until(lambda: 20 in saved(first), 90)
    finally:
        process.kill()
        process.communicate(timeout=30)
        kill_all(first)
    killed = Result(-9, "", first, read_events(first))
    more = run(second, "--replicas", "2", "--ranks-per-replica", "2", *checkpoints, args=(*ARGS, "--steps", "45"))
    restored = more.decisions[0]
    assert restored["restore"] is not None
    assert restored["step"] >= 20
    assert "restored from checkpoint" in restored["reason"]
    check(history(killed, more), more, 45, replicas=2, ranks=2, options=(*ARGS, "--steps", "45"))
    last = run(third, "--replicas", "3", "--ranks-per-replica", "2", *checkpoints, args=(*ARGS, "--steps", "60"))
    assert last.decisions[0]["step"] == 40
    check(history(killed, more, last), last, 60, replicas=3, ranks=2, options=(*ARGS, "--steps", "60"))


def test_a_job_does_not_begin_anew_while_the_storage_cannot_say_what_there_is(
    tmp_path: Path, checkpoints: list[str]
) -> None:
    """An error is another answer than "none": taken for that, the job would train from step 0 beside its own checkpoints."""
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, "--replicas", "2", *checkpoints, args=(*ARGS, "--steps", "25"))
    broken = tmp_path / "checkpoints" / "000000099-99-broken"
    broken.symlink_to(broken)  # whoever looks gets ELOOP
    process = start(second, "--replicas", "2", *checkpoints, args=(*ARGS, "--steps", "40"))
    try:
        logs = second / "logs"
        wait_until(lambda: all("cannot be looked for" in log.read_text() for log in logs.glob("replica?-rank0.log"))
                   and len(list(logs.glob("replica?-rank0.log"))) == 2)  # fmt: skip
        assert not [e for e in read_events(second) if e["event"] == "decision"]
        broken.unlink()
    finally:
        result = finish(process, second, 120)
    assert result.code == 0, result.output
    assert result.decisions[0]["restore"] is not None
    assert [d["step"] for d in result.committed()] == list(range(20, 40))


def test_every_replica_dies_and_the_job_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, checkpoints: list[str]
) -> None:
    """Twice: at step 17, and while the new lives read the checkpoint."""
    kills = [f"kill replica={r} rank=0 step=17 phase=forward incarnation=first" for r in range(2)]
    again = "kill replica=1 rank=0 phase=restoring"
    faults = [word for text in (*kills, again) for word in ("--fault", text)]
    args = (*ARGS, "--steps", "40", "--max-grad-norm", "0.5")
    result = run(tmp_path / "run", "--replicas", "2", *checkpoints, *faults, args=args)
    assert len(result.shots()) == 3
    restores = [d for d in result.decisions if d["restore"] is not None]
    assert [d["step"] for d in restores] == [10]
    check(history(result), result, 40, replicas=2, ranks=1, options=args)


def test_a_job_that_is_stopped_goes_on_from_the_step_it_stopped_at(tmp_path: Path, checkpoints: list[str]) -> None:
    args = (*ARGS, "--steps", "100")
    process = start(tmp_path / "first", "--replicas", "2", *checkpoints, args=args)
    try:
        wait_until(lambda: len([e for e in read_events(tmp_path / "first") if e["event"] == "commit"]) >= 26)
        said = subprocess.run(
            [sys.executable, "-m", "keepstep", "stop", str(tmp_path / "first")],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        first = finish(process, tmp_path / "first", 60)
    finally:
        kill_all(tmp_path / "first")
    assert first.code == 0, first.output
    step = first.decisions[-1]["step"]
    assert f"the job has stopped before step {step}" in said.stdout
    assert saved(tmp_path / "first")[-1] == step
    assert step < 100
    second = run(tmp_path / "second", "--replicas", "2", *checkpoints, args=args)
    assert second.decisions[0]["step"] == step
    check(history(first, second), second, 100, replicas=2, ranks=1, options=args)


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["saving", "publishing"])
def test_a_saver_that_is_killed_costs_its_checkpoint_and_nothing_else(
    tmp_path: Path, checkpoints: list[str], phase: str
) -> None:
    faults = ("--fault", f"kill replica=1 rank=0 phase={phase} incarnation=first")
    args = (*ARGS, "--steps", "70")
    result = run(tmp_path / "run", "--replicas", "2", "--ranks-per-replica", "2", *checkpoints, *faults, args=args)
    assert len(result.shots()) == 1
    check(history(result), result, 70, replicas=2, ranks=2, options=args)
    assert set(saved(tmp_path / "run")) & {30, 40, 50, 60}
    again = run(
        tmp_path / "again", "--replicas", "2", "--ranks-per-replica", "2", *checkpoints, args=(*ARGS, "--steps", "75")
    )
    assert again.decisions[0]["step"] == max(saved(tmp_path / "run"))
    check(history(result, again), again, 75, replicas=2, ranks=2, options=(*ARGS, "--steps", "75"))


@pytest.mark.faults
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(tmp_path: Path, checkpoints: list[str]) -> None:
    first = run(tmp_path / "first", "--replicas", "2", *checkpoints, args=(*ARGS, "--steps", "35"))
    newest = max((tmp_path / "checkpoints").iterdir())
    with open(newest / "__0_0.distcp", "r+b") as file:
        file.seek(2000)
        file.write(b"XXXX")
    second = run(tmp_path / "second", "--replicas", "2", *checkpoints, args=(*ARGS, "--steps", "45"))
    assert [d["step"] for d in second.decisions if d["restore"] is not None] == [30, 20]
    assert "checksum" in second.of("fetch_failed")[0]["reason"]
    check(history(first, second), second, 45, replicas=2, ranks=1, options=(*ARGS, "--steps", "45"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"needs root: {mounted.stderr.decode()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.faults
def test_a_disk_that_is_full_and_then_read_only_costs_checkpoints_not_steps(tmp_path: Path, small_disk: Path) -> None:
    """It is full from the beginning, has room for a while, and is read-only at last: nothing but an event says so."""
    hog, run_dir = small_disk / "hog", tmp_path / "run"
    hog.write_bytes(bytes(380 << 10))
    options = ["--checkpoint-dir", str(small_disk / "c"), "--checkpoint-every", "10", "--keep-checkpoints", "2"]
    args = (*ARGS, "--steps", "150")
    process = start(run_dir, "--replicas", "2", "--ranks-per-replica", "2", *options, args=args)

    def failed() -> list[str]:
        return [e["reason"] for e in read_events(run_dir) if e["event"] == "checkpoint_failed"]

    try:
        wait_until(failed, 60)
        hog.unlink()
        wait_until(lambda: saved(run_dir), 60)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        before = len(failed())
        wait_until(lambda: len(failed()) > before, 60)
    finally:
        result = finish(process, run_dir, 120)
    assert "No space left on device" in failed()[0]
    assert "Read-only file system" in failed()[-1]
    assert not result.of("retry")
    check(history(result), result, 150, replicas=2, ranks=2, options=args)


def test_checkpoints_that_do_not_fit_are_refused_and_another_number_of_ranks_is_not(
    tmp_path: Path, checkpoints: list[str]
) -> None:
    first = run(
        tmp_path / "first", "--replicas", "1", "--ranks-per-replica", "2", *checkpoints, args=(*ARGS, "--steps", "12")
    )
    assert first.code == 0
    refused = run(
        tmp_path / "second", "--replicas", "1", *checkpoints, args=(*ARGS, "--steps", "20", "--unit-size", "8")
    )
    assert (refused.code, "another data set, unit size" in refused.output) == (EX_CONFIG, True)
    refused = run(tmp_path / "third", "--replicas", "1", *checkpoints, args=(*ARGS, "--steps", "20", "--width", "48"))
    assert (refused.code, "of another model" in refused.output) == (EX_CONFIG, True)
    one = run(tmp_path / "fourth", "--replicas", "1", *checkpoints, args=(*ARGS, "--steps", "20"))
    assert one.code == 0, one.output
    assert one.decisions[0]["step"] == 10
    assert sorted({u for c in one.committed() for m in c["members"] for u in m["units"]}) == list(range(10, 20))
