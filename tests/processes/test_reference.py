"""The bits of a whole disturbed run against a single process that consumes the same units with the same memberships."""

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Result, run
from test_training import check

from keepstep.runtime.engine_events import EngineSettings
from keepstep.training.data import Units
from keepstep.training.reference import Reference

sys.path.insert(0, str(Path(__file__).parent / "scripts"))

import train_tiny


def replay(result: Result, args: argparse.Namespace, *, replicas: int, ranks: int) -> Reference:
    """The recorded decisions, trained again."""

    def make_optimizer(params: list[torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(params, lr=0.01)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=args.gamma)

    def make_units(rank: int) -> Units:
        return Units(
            train_tiny.dataset(args.length), unit_size=args.unit_size, rank=rank, size=ranks, seed=0, epochs=args.epochs,
            policy=args.data_policy, num_replicas=replicas,
        )  # fmt: skip

    reference = Reference(
        make_model=lambda: train_tiny.build(args.seed, args.width),
        make_optimizer=make_optimizer,
        make_units=make_units,
        compute=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        ranks=ranks,
        bucket_bytes=args.bucket_bytes,
        engine=EngineSettings(),
        max_grad_norm=args.max_grad_norm,
        accumulate=args.accumulate,
    )
    reference.run(result.committed())
    return reference


@pytest.mark.parametrize(
    ("replicas", "ranks", "options"),
    [
        (3, 1, ["--max-grad-norm", "0.5"]),
        (3, 1, ["--plain", "--data-policy", "stream", "--unit-size", "6", "--accumulate", "2"]),
        (2, 2, ["--bucket-bytes", "700"]),
    ],
)
def test_a_disturbed_run_has_the_bits_of_an_undisturbed_process(
    tmp_path: Path, replicas: int, ranks: int, options: list[str]
) -> None:
    torch.set_num_threads(1)
    text = ("--steps", "120", "--step-seconds", "0.05", *options)
    result = run(
        tmp_path, "--replicas", str(replicas), "--ranks-per-replica", str(ranks),
        "--fault", "kill replica=1 rank=0 step=6 phase=in_exchange",
        "--fault", "kill replica=1 rank=0 phase=backward incarnation=second",
        args=text,
    )  # fmt: skip
    check(result, replicas)
    assert len(result.shots()) == 2
    memberships = {len(d["members"]) for d in result.committed()}
    assert len(memberships) > 1, "the membership never changed: nothing was tested"
    reference = replay(result, train_tiny.arguments().parse_args(text), replicas=replicas, ranks=ranks)
    for rank in range(ranks):
        expected = train_tiny.fingerprint(list(reference.shards[rank]))
        for replica in range(replicas):
            assert (tmp_path / f"parameters-{replica}-{rank}").read_text() == expected, (replica, rank)
