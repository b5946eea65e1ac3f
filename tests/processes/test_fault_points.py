"""kill -9 of {leader, another rank} of {a worker, a replica that catches up} in every phase: the bits and the ledger hold.

Long: `make test-faults`. Each case is a job of its own, of three replicas with two sharded ranks each, and ends with all three
holding the same bits, every unit trained once. A few of them run in `make test` too.
"""

from pathlib import Path

import pytest
from jobs import run
from test_training import check

WORKER_PHASES = [
    ("before_report", 0),
    ("waiting_decision", 0),
    *((phase, rank) for phase in ("forward", "backward", "in_exchange", "after_last_bucket") for rank in (0, 1)),
    *((phase, rank) for phase in ("before_vote", "between_vote_and_commit", "optimizer_step") for rank in (0, 1)),
]
CATCHING_UP_PHASES = [
    ("before_report", 0),
    ("waiting_decision", 0),
    *((phase, rank) for phase in ("before_hello", "fetching_state", "loading_state", "replaying") for rank in (0, 1)),
    *((phase, rank) for phase in ("in_exchange", "before_vote", "between_vote_and_commit") for rank in (0, 1)),
]
ARGS = ("--steps", "100", "--step-seconds", "0.06")
LONG = ("--steps", "200", "--step-seconds", "0.06")
SHAPE = ("--replicas", "3", "--ranks-per-replica", "2")
FIRST = "kill replica=1 rank=0 step=8 phase=forward"
SLOW_FETCH = {"KEEPSTEP_FETCH_BYTES_PER_S": "60000"}  # several steps' length, so that there is something to replay


def survive(tmp_path: Path, *faults: str, shots: int | None = None, args: tuple[str, ...] = ARGS, **env: str) -> None:
    options = [option for fault in faults for option in ("--fault", fault)]
    result = run(tmp_path, *SHAPE, *options, args=args, timeout=200, **env)
    assert len(result.shots()) == (len(faults) if shots is None else shots), "a fault was not injected"
    check(result, 3)


@pytest.mark.faults
@pytest.mark.parametrize(("phase", "rank"), WORKER_PHASES)
def test_a_worker_dies(tmp_path: Path, phase: str, rank: int) -> None:
    survive(tmp_path, f"kill replica=1 rank={rank} step=8 phase={phase} role=any")


@pytest.mark.faults
@pytest.mark.parametrize(("phase", "rank"), CATCHING_UP_PHASES)
def test_a_replica_dies_again_while_it_catches_up(tmp_path: Path, phase: str, rank: int) -> None:
    survive(
        tmp_path,
        FIRST,
        f"kill replica=1 rank={rank} phase={phase} incarnation=second role=any",
        args=LONG,
        **SLOW_FETCH,
    )


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_dies_while_it_serves_state(tmp_path: Path, rank: int) -> None:
    survive(tmp_path, FIRST, f"kill replica=0 rank={rank} step=9+ phase=serving_state incarnation=first", **SLOW_FETCH)


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["before_vote", "between_vote_and_commit", "optimizer_step"])
def test_a_rank_dies_that_others_vote_through(tmp_path: Path, phase: str) -> None:
    """The control tree is a chain: rank 1 passes on what ranks 2 and 3 say, with its own vote."""
    shape = ("--replicas", "2", "--ranks-per-replica", "4", "--fault", f"kill replica=1 rank=1 step=8 phase={phase}")
    result = run(tmp_path, *shape, args=ARGS, KEEPSTEP_RANKS_PER_HOST="1", KEEPSTEP_FAN_OUT="1", timeout=200)
    assert len(result.shots()) == 1, "the fault was not injected"
    check(result, 2)


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "other"])
def test_a_rank_freezes(tmp_path: Path, rank: int) -> None:
    """Its silence is noticed, by the other replicas first; then its own replica gives it up, and is rebuilt."""
    survive(
        tmp_path, f"stop replica=1 rank={rank} step=8 phase=forward", args=("--steps", "400", "--step-seconds", "0.06")
    )


@pytest.mark.faults
def test_two_replicas_die_at_once(tmp_path: Path) -> None:
    survive(tmp_path, FIRST, "kill replica=2 rank=1 step=8 phase=in_exchange")


@pytest.mark.faults
def test_all_but_one_die_in_the_same_exchange(tmp_path: Path) -> None:
    survive(
        tmp_path, "kill replica=0 rank=0 step=8 phase=in_exchange", "kill replica=1 rank=1 step=8 phase=in_exchange"
    )
