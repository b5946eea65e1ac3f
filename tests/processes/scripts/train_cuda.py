"""A script for machines with devices: it says cuda and nccl, and reads its data with a DataLoader.

train_cuda.py [--steps N] [--bug repeat|die]       bug: of its data loading
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import keepstep
from keepstep.protocol import ledger as ledgers
from keepstep.training.buckets import Buckets


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Made-up features and labels; a bug on request."""

    def __init__(self, bug: str) -> None:
        self.bug, self.features = bug, torch.randn(4096, 32, generator=torch.Generator().manual_seed(3))
        if bug == "unsteady":
            self.features += os.getpid()  # as a loader whose seed is its own process

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.bug == "die" and index == 1000:
            os._exit(7)
        if self.bug == "repeat" and index >= 2048:
            index -= 2048  # a wrong offset: half of the data is never read
        return self.features[index], torch.tensor(index % 10)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 10)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


def plant(bug: str, replica: int) -> None:
    if bug == "ledger":
        right = ledgers.commit
        ledgers.commit = lambda ledger, units: right(ledger, sorted(units)[:-1])
    if bug == "weight" and replica == 1:
        to_gradients = Buckets.to_gradients
        Buckets.to_gradients = lambda self, reduced: to_gradients(
            self, [r * 1.25 for r in reduced[:-1]] + [reduced[-1]]
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--bug", default="")
    args = parser.parse_args()
    assert torch.cuda.is_available()
    with keepstep.join() as job:
        plant(args.bug, job.replica_id)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
        mesh = init_device_mesh("cuda", (job.size,), mesh_dim_names=("shard",))
        small = dist.new_group(backend="nccl")
        torch.manual_seed(0)
        model = torch.compile(Net().to("cuda"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
        data = Rows(args.bug)
        training = keepstep.Training(
            job, model, optimizer, data=data, unit_size=64, shuffle=False, max_steps=args.steps, max_grad_norm=1.0,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5),
        )  # fmt: skip
        stream = torch.cuda.Stream()
        for step in training:
            x, y = step.batch
            with torch.cuda.stream(stream):
                x, y = x.cuda(non_blocking=True), y.to(device)
            torch.cuda.current_stream().wait_stream(stream)
            logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            if torch.isnan(loss):
                raise RuntimeError("the loss is no number")
            step.backward(loss)
            step.commit()
            accuracy = (logits.argmax(1) == y).float().mean()
            dist.all_reduce(accuracy, group=small)
            training.log(accuracy=accuracy.item(), memory=torch.cuda.max_memory_allocated())
        model.eval()
        with torch.no_grad():
            for x, y in DataLoader(data, batch_size=256, pin_memory=True):
                wrong = (model(x.to(device)).argmax(1) != y.to(device)).sum()
                torch.cuda.synchronize()
                print(f"{int(wrong)} wrong", flush=True)
                break


if __name__ == "__main__":
    main()
