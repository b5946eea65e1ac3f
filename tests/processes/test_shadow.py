"""Shadow runs: scripts for devices run without, tell the truth about faults, and find the bugs that were planted."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from jobs import SCRIPTS, Result, run
from test_training import check

CUDA = SCRIPTS / "train_cuda.py"
MAIN_THREAD = ("commit", "materialized", "final", "entered", "connected", "joined", "attached")
OF_TIME = ("batch", "reported", "slow", "stuck", "keeps_up")  # ours alone, or told only if something takes long


def shadow(
    run_dir: Path, *options: str, script: Path = CUDA, args: tuple[str, ...] = (), timeout: float = 200.0
) -> Result:
    return run(run_dir, *options, script=script, args=args, timeout=timeout, verb="shadow")


def test_a_script_that_says_cuda_and_nccl_runs_unchanged(tmp_path: Path) -> None:
    """3 x 2, killed and restarted, with checkpoints; it restores the newest when everything is gone."""
    checkpoints = tmp_path / "checkpoints"
    options = ("--replicas", "3", "--ranks-per-replica", "2")
    options += ("--checkpoint-dir", str(checkpoints), "--checkpoint-every", "5")
    killed = ("--fault", "kill replica=1 rank=1 step=7 phase=in_exchange")
    first = shadow(tmp_path / "first", *options, *killed, args=("--steps", "14"))
    check(first, 3)
    assert len(first.shots()) == 1
    assert first.of("fetch"), "the restarted replica got its state from its peers"
    assert "3 replicas ended with equal states, every unit was trained once" in first.output
    second = shadow(tmp_path / "second", *options, args=("--steps", "18"))
    assert second.code == 0, second.output[-6000:]
    assert min(e["step"] for e in second.of("commit")) > 0, "it went on from a checkpoint"
    assert len(set(second.digests.values())) == 1


def test_thirty_two_ranks_lose_one_and_go_on(tmp_path: Path) -> None:
    """4 x 8 on whatever this machine has; the survivors train on while eight processes are started again."""
    fault = "kill replica=2 rank=5 step=4 phase=in_exchange"
    result = shadow(tmp_path, "--replicas", "4", "--ranks-per-replica", "8", "--fault", fault, args=("--steps", "12"))
    check(result, 4)
    assert [s["replica"] for s in result.shots()] == [2]
    assert [len(d["members"]) for d in result.committed() if d["step"] == 4] == [3], "it went on without the dead one"


@pytest.mark.parametrize(
    ("bug", "told"),
    [
        ("repeat", "hold the same data"),
        ("ledger", "units were trained twice"),
        pytest.param("weight", "replicas ended with different states", marks=pytest.mark.faults),
        pytest.param("die", "exited with code 7", marks=pytest.mark.faults),
    ],
)
def test_a_planted_bug_is_found(tmp_path: Path, bug: str, told: str) -> None:
    result = shadow(tmp_path, "--replicas", "2", args=("--bug", bug, "--steps", "40"))
    assert result.code != 0
    assert told in result.output, result.output[-6000:]


@pytest.mark.faults
def test_a_loader_that_gives_other_data_for_the_same_unit_is_found(tmp_path: Path) -> None:
    """The unit of the dead replica is read again by somebody else."""
    fault = "kill replica=1 rank=0 step=4 phase=backward"
    result = shadow(
        tmp_path, "--replicas", "2", "--step-s", "0.3", "--fault", fault, args=("--bug", "unsteady", "--steps", "10")
    )
    assert result.code == 1
    assert "read again, they held other data: units" in result.output, result.output[-6000:]


@pytest.mark.faults
def test_ranks_that_call_different_collectives_are_told_so(tmp_path: Path) -> None:
    """On devices, this hangs until a watchdog ends it."""
    script = tmp_path / "diverges.py"
    script.write_text(
        CUDA.read_text().replace("dist.all_reduce(accuracy", "if job.rank or step.number < 3: dist.all_reduce(accuracy")
    )
    result = shadow(
        tmp_path / "run", "--replicas", "1", "--ranks-per-replica", "2", script=script, args=("--steps", "9")
    )
    assert result.code == 1
    assert "have called different collectives" in result.output, result.output[-6000:]


@pytest.mark.timeout(500)
def test_a_shadow_run_makes_the_decisions_of_the_real_one(tmp_path: Path) -> None:
    """3 x 2 and the same faults: the same decisions, units, ledgers and events, thread by thread."""
    faults = ("kill replica=1 rank=1 step=6 phase=in_exchange", "kill replica=0 rank=0 step=14 phase=optimizer_step")
    options = ["--replicas", "3", "--ranks-per-replica", "2", "--min-replicas", "3"]
    options += [word for fault in faults for word in ("--fault", fault)]
    args = ("--steps", "25", "--step-seconds", "0.1", "--max-grad-norm", "1.0")
    patient = {"KEEPSTEP_LEASE_S": "10"}  # a busy machine must not lose anybody else
    real = run(tmp_path / "real", *options, args=args, **patient)
    rehearsed = run(tmp_path / "shadow", *options, "--state-fraction", "0.5", args=args, verb="shadow", **patient)
    for result in (real, rehearsed):
        check(result, 3, units=75)
        assert len(result.shots()) == 2
    assert [what_was_decided(d) for d in begun(rehearsed)] == [what_was_decided(d) for d in begun(real)]
    ledgers = [{(e["units_committed"], e["units_total"], e["step"]) for e in r.of("final")} for r in (real, rehearsed)]
    assert ledgers[0] == ledgers[1]
    theirs, ours = sequences(real), sequences(rehearsed)
    assert ours.keys() == theirs.keys()
    assert sum(map(len, theirs.values())) > 150
    for who, told in theirs.items():
        assert told == ours[who], who


def begun(result: Result) -> list[dict[str, Any]]:
    """The decisions from the first that trains on: before it, who is there first is chance."""
    first = next(i for i, d in enumerate(result.decisions) if d["kind"] == "train")
    return result.decisions[first:]


def what_was_decided(decision: dict[str, Any]) -> tuple[Any, ...]:
    members = [(m["replica"], m["role"], m["units"]) for m in decision["members"]]
    return decision["kind"], decision["step"], decision["quorum_id"] == decision["seq"], members, decision["reason"]


def sequences(result: Result) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    """What each thread of each life has told, in order. What a killed life had not written down yet is nobody's word: of those,
    what comes before its last step."""
    number = {e["incarnation"]: e["life"] for e in result.of("spawn")}
    killed = {e["incarnation"]: e["replica"] for e in result.of("exit") if e["code"]}
    last = {i: max((e["step"] for e in result.of("commit") if e["incarnation"] == i), default=0) for i in killed}
    found: dict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
    begins = begun(result)[0]["seq"]
    for e in result.events:
        if e["event"] in OF_TIME or e.get("seq", begins) < begins:
            continue
        if e["event"] in ("start", "end", "spawn", "exit", "restart", "replica_done"):
            found["launcher", e.get("replica")].append((e["event"], e.get("life"), e.get("code")))
        elif e["incarnation"] not in killed or (e.get("step") or 0) < last[e["incarnation"]]:
            thread = "main" if e["event"] in MAIN_THREAD else "control"
            told = (e["event"], e.get("step"), e.get("role"), e.get("workers"), e.get("bytes") and "bytes")
            found[e["replica"], number[e["incarnation"]], e["rank"], thread].append(told)
    return found
