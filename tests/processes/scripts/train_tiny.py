"""A job small enough for the fault matrix: a two-layer perceptron on made-up data, sharded when K > 1."""

import argparse
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import keepstep


def build(seed: int, width: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(width, 8)
    )


def dataset(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(length, 16, generator=generator), torch.randn(length, 8, generator=generator))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--length", type=int, default=1 << 16)
    parser.add_argument("--unit-size", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--max-grad-norm", type=float, default=None)
    parser.add_argument("--data-policy", default="pool")
    parser.add_argument("--bucket-bytes", type=int, default=2048)
    parser.add_argument("--step-seconds", type=float, default=0.02, help="how long the forward pass pretends to take")
    parser.add_argument("--plain", action="store_true", help="do not shard")
    parser.add_argument("--mixed", action="store_true", help="bfloat16 parameters in forward, float32 in reductions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gamma", type=float, default=0.9, help="of the learning rate, every ten steps")
    parser.add_argument("--offload", type=int, nargs="*", default=[], help="the replicas that offload their optimizer")
    parser.add_argument("--offload-bytes", type=int, default=1500)
    parser.add_argument("--final-loss", action="store_true", help="write down the loss over all data at the end")
    parser.add_argument("--raise-at", type=int, default=None)
    parser.add_argument("--leave-at", type=int, default=None)
    return parser


def main(
    args: argparse.Namespace,
    *,
    data: Any = None,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    in_step: Callable[[keepstep.Step], None] = lambda step: None,
) -> None:
    """`in_step` is called between backward and commit."""
    with keepstep.join() as job:
        torch.set_num_threads(1)
        model = build(args.seed, args.width)
        if not args.plain:
            mixed = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
            )
            fully_shard(model, mesh=job.mesh, mp_policy=mixed if args.mixed else MixedPrecisionPolicy())
        optimizer = make_optimizer(model.parameters(), lr=0.01)
        training = keepstep.Training(
            job,
            model,
            optimizer,
            data=dataset(args.length) if data is None else data,
            unit_size=args.unit_size,
            epochs=args.epochs,
            max_steps=args.steps,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=args.gamma),
            max_grad_norm=args.max_grad_norm,
            accumulate=args.accumulate,
            bucket_bytes=args.bucket_bytes,
            data_policy=args.data_policy,
            offload_optimizer=job.replica_id in args.offload,
            offload_bytes=args.offload_bytes,
        )
        pretend = threading.Event()  # nobody sets it: waiting for it takes time, as computing would
        for step in training:
            if step.number == args.raise_at:
                raise RuntimeError("the script is wrong here")
            if step.number == args.leave_at:
                break
            for x, y in step.micro_batches:
                pretend.wait(args.step_seconds / args.accumulate)
                step.backward(torch.nn.functional.mse_loss(model(x).float(), y))
            in_step(step)
            step.commit()
        note_parameters(job, model)
        if args.final_loss:
            note_loss(job, model, dataset(args.length))


def fingerprint(parts: list[torch.Tensor]) -> str:
    """Names the bits of some tensors."""
    return hashlib.sha256(b"".join(part.detach().contiguous().numpy().tobytes() for part in parts)).hexdigest()


def note_parameters(job: keepstep.Job, model: torch.nn.Module) -> None:
    """Writes down what this rank's part of the model is at the end, to be compared with the reference."""
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    path = Path(os.environ["KEEPSTEP_RUN_DIR"]) / f"parameters-{job.replica_id}-{job.rank}"
    path.write_text(fingerprint(parts))


def note_loss(job: keepstep.Job, model: torch.nn.Module, data: TensorDataset) -> None:
    """Writes down what the model has learned."""
    model.eval()
    with torch.no_grad():
        x, y = data.tensors
        loss = torch.nn.functional.mse_loss(model(x), y).item()
    (Path(os.environ["KEEPSTEP_RUN_DIR"]) / f"loss-{job.replica_id}-{job.rank}").write_text(repr(loss))


if __name__ == "__main__":
    main(arguments().parse_args())
