"""The job of `kill.py` on plain DistributedDataParallel with gloo: no fault tolerance, the speed to be measured against."""

import os

import torch
import torch.distributed as dist
from kill_model import BUCKET_MB, Journal, Rows, batch_of, build, loss_of, optimizer_of
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    replica, steps, size = (int(os.environ[f"KILL_{name}"]) for name in ("REPLICA", "STEPS", "SIZE"))
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['KILL_RENDEZVOUS']}", rank=replica, world_size=size
    )
    model, rows, journal = build(), Rows(), Journal()
    optimizer, wrapped = optimizer_of(model), DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(wrapped, batch_of(rows, step * size + replica)).backward()
        optimizer.step()
        journal.write(model, step, size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
