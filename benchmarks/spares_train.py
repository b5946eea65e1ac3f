"""The job of spares.py and detection.py: 8M parameters, and steps that take --step-seconds without using a core.

--imports heavy    the script imports what takes seconds (torch's compiler, matplotlib), as many real scripts do
--warm-up          one forward and backward of a made-up batch before keepstep.Training: what can be done before the report
--hang ...         see detection.py
"""

import argparse
import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import keepstep

WIDTH, BATCH = 1024, 4

parser = argparse.ArgumentParser()
parser.add_argument("--imports", choices=["light", "heavy"], default="light")
parser.add_argument("--warm-up", action="store_true")
parser.add_argument("--compile", action="store_true", help="the model, with torch.compile")
parser.add_argument("--step-seconds", type=float, default=0.25)
parser.add_argument(
    "--noise", type=float, default=0.0, help="seconds of real computing a step, instead of some waiting"
)
parser.add_argument("--steps", type=int, default=None)
parser.add_argument("--hang", type=Path, default=None, help="as long as this file names this replica, it hangs")
parser.add_argument("--where", choices=["forward", "loader", "gil"], default="forward")
args = parser.parse_args()

if args.imports == "heavy":
    import matplotlib.pyplot  # noqa: F401
    import torch._inductor.compile_fx


def hang(replica: int, where: str) -> None:
    """The main thread makes no progress; every other thread of the rank does, unless it holds the interpreter lock."""
    began = 0.0
    while (
        args.hang is not None and where == args.where and args.hang.exists() and args.hang.read_text() == str(replica)
    ):
        if not began:
            began = time.monotonic()
            args.hang.with_suffix(".at").write_text(repr(began))
        if where == "gil":
            ctypes.PyDLL(None).sleep(6)
            args.hang.unlink()
        else:
            threading.Event().wait(0.02)


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Made-up rows: a pure function of the index."""

    def __init__(self, replica: int) -> None:
        self.replica = replica

    def __len__(self) -> int:
        return 1 << 22

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        hang(self.replica, "loader")
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, torch.tensor(index % 64)


def compute(seconds: float) -> None:
    """Keeps a core busy."""
    a, end = torch.randn(256, 256), time.monotonic() + seconds
    while time.monotonic() < end:
        a = torch.tanh(a @ a)


def main() -> None:
    torch.set_num_threads(1)
    with keepstep.join() as job:
        torch.manual_seed(0)
        model: Any = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 64)
        )
        if args.compile:
            model.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if args.warm_up:
            nn.functional.cross_entropy(
                model(torch.zeros(BATCH, WIDTH)), torch.zeros(BATCH, dtype=torch.long)
            ).backward()
            optimizer.zero_grad()
        training = keepstep.Training(
            job, model, optimizer, data=Rows(job.replica_id), unit_size=BATCH, lr_policy="none", max_steps=args.steps
        )
        for step in training:
            x, y = step.batch
            time.sleep(max(0.0, args.step_seconds - args.noise))
            compute(args.noise)
            for where in ("forward", "gil"):
                hang(job.replica_id, where)
            step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit()


if __name__ == "__main__":
    main()
