"""The job of `operations.py` on plain DistributedDataParallel with gloo, under torchelastic's agent.

    torchrun ... operations_ddp.py   each life is a new process that imports torch
    python operations_ddp.py         the same agent by torch's own API, with start_method="forkserver": a life is a fork of a
                                     process that has imported torch, as keepstep's are. ("fork" hangs: the agent has threads.)

Rank 0 saves every KILL_EVERY steps as cheaply as can be: it copies the state, a thread writes it while training goes on, and
renames it; nobody syncs the disk, since only processes are killed here. While one is being written no other begins.
"""

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP and the optimizer would import it, for seconds: here forks have it already
import torch.distributed as dist
from kill_model import BUCKET_MB, Journal, build
from operations_model import Counting, Traced, Units, write_counts
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel


class Checkpoints:
    """One file, always whole."""

    def __init__(self, model: Traced, optimizer: Counting) -> None:
        self._path, self._every = Path(os.environ["KILL_CHECKPOINT"]), int(os.environ["KILL_EVERY"])
        self._model, self._optimizer = model, optimizer
        self._thread: threading.Thread | None = None
        self._last = 0

    def load(self) -> int:
        """The step to go on with."""
        if not self._path.exists():
            return 0
        saved = torch.load(self._path)
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._last = int(saved["step"])
        return self._last

    def save(self, step: int) -> None:
        """After a step: state `step`, if it is due and the last one is out of the way."""
        if not self._every or step < self._last + self._every or (self._thread and self._thread.is_alive()):
            return
        self._last = step
        copy = copied({"step": step, "model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()})
        self._thread = threading.Thread(target=self._write, args=(copy,))
        self._thread.start()

    def _write(self, state: Any) -> None:
        new = self._path.with_suffix(".new")
        torch.save(state, new)
        new.rename(self._path)


def copied(state: Any) -> Any:
    """A state_dict that training does not change any more."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copied(value) for value in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


def fresh_store(size: int) -> Store:
    """The agent's, without what the lives before have left there. By itself torch 2.13 may read it: a rank that is quicker than
    the others then dials an address of the dead for 17 s, fails, and all workers are started once more."""
    agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    return PrefixStore("life-" + os.environ["TORCHELASTIC_RESTART_COUNT"], agent)


def train() -> None:
    torch.set_num_threads(1)
    rank, size, steps = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["KILL_STEPS"])
    dist.init_process_group("gloo", store=fresh_store(size), rank=rank, world_size=size)
    os.environ["KILL_REPLICA"] = str(rank)
    os.environ["KILL_JOURNAL"] += f".{rank}.{os.getpid()}"
    units = Units(steps * size)
    model, journal = Traced(build(), len(units)), Journal()
    optimizer = Counting(model)
    checkpoints = Checkpoints(model, optimizer)
    first = checkpoints.load()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    for step in range(first, steps):
        optimizer.zero_grad()
        unit = step * size + rank
        wrapped(units[unit]).backward()
        optimizer.step()
        journal.write(model, step, size, unit=unit)
        if rank == 0:
            checkpoints.save(step + 1)
    write_counts(model)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        train()
        return
    multiprocessing.set_forkserver_preload(["operations_ddp"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(os.environ["KILL_SIZE"]),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="operations",
        max_restarts=1_000_000,
        monitor_interval=float(os.environ["KILL_MONITOR_S"]),
        start_method="forkserver",
    )
    elastic_launch(config, train)()


if __name__ == "__main__":
    main()
