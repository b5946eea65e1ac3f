"""Stock DistributedDataParallel on keepstep's fault-tolerant all-reduce, without the rest of keepstep.

    python examples/ddp_process_group.py

Three processes train; one of them leaves in the middle, as if it had died. The others get an error, form the group anew and
repeat the step: no restart, no checkpoint. Who takes part is for you to decide here (`keepstep run` decides it for you,
restarts what died and lets it catch up).
"""

import multiprocessing
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import keepstep

STEPS, DIES_AT = 20, 8


def train(member: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = keepstep.FTARProcessGroup(timedelta(seconds=20))
    alive = [0, 1, 2]
    group.configure(f"{store}/first", f"member-{member}", alive.index(member), len(alive))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    while step < STEPS:
        if member == 2 and step == DIES_AT:
            os._exit(1)
        generator = torch.Generator().manual_seed(step * 3 + member)
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        try:
            loss = (ddp(x) - x.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            group.barrier().wait()  # everybody has the gradients: nobody takes a step that another one must repeat
        except (keepstep.ExchangeError, RuntimeError) as error:
            print(f"member {member}, step {step}: {group.errored() or error}", flush=True)
            alive = [0, 1]
            group.configure(f"{store}/second", f"member-{member}", alive.index(member), len(alive))
            ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
            continue
        optimizer.step()
        if member == 0:
            print(f"step {step:2}  members {group.size()}  loss {loss.item():.4f}", flush=True)
        step += 1
    group.shutdown()


def main() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=train, args=(member, f"127.0.0.1:{store.port}")) for member in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int([process.exitcode for process in processes] != [0, 0, 1])


if __name__ == "__main__":
    sys.exit(main())
