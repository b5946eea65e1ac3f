"""train_tiny, in which one thing goes wrong: --what, at step --at, in replica --where, in its first life or in --every-life."""

import argparse
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import train_tiny
from torch.utils.data import Dataset

import keepstep

MEMORY_LEFT = 200 << 20
FILES_LEFT = 4


def arguments() -> argparse.ArgumentParser:
    parser = train_tiny.arguments()
    parser.add_argument("--what", required=True)
    parser.add_argument("--at", type=int, default=10)
    parser.add_argument("--where", type=int, default=1, help="-1: in every replica")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--every-life", action="store_true")
    parser.add_argument("--group", default="", help="a memory cgroup to be killed in")
    return parser


args = arguments().parse_args()
here = (
    args.where in (-1, int(os.environ["REPLICA_ID"]))
    and args.rank == int(os.environ["RANK"])
    and (args.every_life or os.environ["KEEPSTEP_LIFE"] == "1")
)
now = False  # the step has come
held: list[Any] = []


def in_step(step: keepstep.Step) -> None:
    """Between backward and commit."""
    global now
    if not here or step.number < args.at or now:
        return
    now = True
    match args.what:
        case "raise":
            raise RuntimeError("the script is wrong here")
        case "exit":
            sys.exit(0)
        case "exit at once":
            os._exit(0)
        case "segv":
            ctypes.string_at(0)
        case "hold the interpreter lock":
            threading.Thread(target=ctypes.PyDLL(None).sleep, args=(20,), daemon=True).start()
        case "hang":  # the main thread only, until somebody says so
            while not Path(os.environ["KEEPSTEP_RUN_DIR"], "go-on").exists():
                threading.Event().wait(0.05)
        case "no memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LEFT, used + MEMORY_LEFT))
            while True:
                held.append(bytearray(16 << 20))
        case "too much memory":
            Path(args.group, "cgroup.procs").write_text(str(os.getpid()))
            while True:
                held.append(bytearray(b"x" * (1 << 20)))
        case "no files":
            limit = len(os.listdir("/proc/self/fd")) + FILES_LEFT
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            try:
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                print(f"{len(held)} files, and no more", flush=True)


class Optimizer(torch.optim.AdamW):
    """Raises in the step after --at."""

    def step(self, closure: Any = None) -> Any:
        if now and args.what == "optimizer":
            raise ArithmeticError("the optimizer is wrong here")
        return super().step(closure)


class Data(Dataset[Any]):
    """train_tiny's data set, until the step has come."""

    def __init__(self) -> None:
        self.data = train_tiny.dataset(args.length)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        if args.what == "nan" and index == args.at:  # a bad sample, whoever trains it
            return x * float("nan"), y
        if now:
            match args.what:
                case "data raises":
                    raise OSError("the data cannot be read here")
                case "data ends":
                    raise StopIteration
                case "worker dies":
                    return fetched_by_a_dying_worker(self.data, index)
        return x, y


def fetched_by_a_dying_worker(data: Any, index: int) -> Any:
    def die(_worker: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    loader = torch.utils.data.DataLoader(
        torch.utils.data.Subset(data, [index]), num_workers=1, worker_init_fn=die,
        multiprocessing_context=multiprocessing.get_context("fork"),
    )  # fmt: skip
    return next(iter(loader))


if __name__ == "__main__":
    train_tiny.main(args, data=Data(), make_optimizer=Optimizer, in_step=in_step)
