"""Jobs in which some replicas keep their optimizer's state in host memory: nobody can tell from the bits which."""

import sys
from pathlib import Path

import pytest
import torch
from jobs import run
from test_checkpoints import check as check_restored
from test_checkpoints import history
from test_reference import replay
from test_training import check

sys.path.insert(0, str(Path(__file__).parent / "scripts"))

import train_tiny


def test_replicas_with_and_without_it_die_and_fetch_from_each_other(tmp_path: Path) -> None:
    """Replica 1 is killed when half of its state is updated; later replica 0, which does not offload, in its forward pass."""
    args = ("--steps", "120", "--step-seconds", "0.05", "--offload", "1", "2")
    result = run(
        tmp_path, "--replicas", "3", "--ranks-per-replica", "2",
        "--fault", "kill replica=1 rank=1 step=8 phase=offloading count=2",
        "--fault", "kill replica=0 rank=0 step=60 phase=forward",
        args=args,
    )  # fmt: skip
    check(result, 3)
    assert len(result.shots()) == 2
    said = result.of("offload")
    assert {(e["replica"], e["rank"]) for e in said} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert all(e["pieces"] > 2 and 0 < e["device_bytes_max"] < 3 * e["host_bytes"] for e in said)
    torch.set_num_threads(1)
    reference = replay(result, train_tiny.arguments().parse_args(args), replicas=3, ranks=2)
    for rank in range(2):
        expected = train_tiny.fingerprint(list(reference.shards[rank]))
        for replica in range(3):
            assert (tmp_path / f"parameters-{replica}-{rank}").read_text() == expected, (replica, rank)


def test_every_replica_dies_in_its_optimizer_and_the_checkpoint_is_restored(tmp_path: Path) -> None:
    kills = [f"kill replica={r} rank=1 step=17 phase=offloading count=2 incarnation=first" for r in range(2)]
    faults = [word for text in kills for word in ("--fault", text)]
    options = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "10"]
    args = ("--step-seconds", "0.05", "--steps", "35", "--offload", "0", "1")
    result = run(tmp_path / "run", "--replicas", "2", "--ranks-per-replica", "2", *options, *faults, args=args)
    assert len(result.shots()) == 2
    assert [d["step"] for d in result.decisions if d["restore"] is not None] == [10]
    check_restored(history(result), result, 35, replicas=2, ranks=2, options=args)


@pytest.mark.faults
def test_a_checkpoint_with_it_is_restored_without_it_and_back(tmp_path: Path) -> None:
    options = ["--replicas", "2", "--ranks-per-replica", "2"]
    options += ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "10"]
    runs = []
    for steps, offloaded in ((15, ["--offload", "0", "1"]), (25, []), (35, ["--offload", "0", "1"])):
        args = ("--step-seconds", "0.05", "--steps", str(steps), *offloaded)
        runs.append(run(tmp_path / str(steps), *options, args=args))
    check_restored(history(*runs), runs[-1], 35, replicas=2, ranks=2, options=args)
