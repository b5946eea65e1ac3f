"""One rank process of `allreduce.py`: reads requests from its pipe, does them, answers. Never started by hand."""

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from allreduce_impls import IMPLS, Buffers, ExchangeFailed, Impl, Member

Reply = dict[str, Any]
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def memory_mb(field: str) -> float:
    """`VmRSS` or `VmHWM` of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(field + ":")[1].split()[0]) / 1024


def forget_peak() -> None:
    """Memory that earlier work has freed goes back, and VmHWM restarts at what is left."""
    gc.collect()
    _libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


class Rank:
    """Each `do_*` method is a request; its arguments and its answer are JSON."""

    def __init__(self, spec: Reply) -> None:
        self.rank, self.life, self.host = spec["rank"], spec["life"], spec["host"]
        self.impls: dict[str, Impl] = {}
        self.held_mb: dict[str, float] = {}  # what each one has kept from its earlier warm-ups
        self.buffers: Buffers | None = None

    def do_hello(self) -> None: ...

    # --- connecting -------------------------------------------------------------------------------------------

    def do_open(self, impl: str, **settings: Any) -> Member:
        """`impl` is NAME or NAME@CONGESTION."""
        name, _, congestion = impl.partition("@")
        self.impls[impl] = IMPLS[name](self.rank, self.life, self.host, congestion, settings)
        self.held_mb[impl] = 0.0
        return self.do_member(impl)

    def do_member(self, impl: str) -> Member:
        return {"rank": self.rank, "life": self.life, "host": self.host, "port": self.impls[impl].port()}

    def do_configure(
        self, impl: str, members: list[Member], position: int, generation: int, at: float = 0.0
    ) -> Reply:  # fmt: skip
        sleep_until(at)
        start = time.monotonic()
        self.impls[impl].configure(members, position, generation)
        return {"seconds": time.monotonic() - start}

    # --- exchanging -------------------------------------------------------------------------------------------

    def do_buffers(self, nbytes_max: int) -> None:
        self.buffers = Buffers(self.rank, nbytes_max)

    def do_resize(self, nbytes: int) -> None:
        self.buffers.resize(nbytes)

    def do_warm_up(self, impl: str, check: list[int]) -> Reply:
        """The first exchange of a case: is it right, and how much memory does it need beyond the buffers?"""
        self.buffers.refill()
        forget_peak()
        before, start = memory_mb("VmRSS"), time.monotonic()
        self.impls[impl].exchange(self.buffers)
        seconds, extra = time.monotonic() - start, memory_mb("VmHWM") - before + self.held_mb[impl]
        self.held_mb[impl] += memory_mb("VmRSS") - before
        return {"seconds": seconds, "extra_mb": extra, "right": self.buffers.is_sum_of(self.impls[impl].result(check))}

    def do_refill(self) -> None:
        self.buffers.refill()

    def do_round(self, impl: str, repeats: int, at: float) -> Reply:
        exchange, buffers = self.impls[impl].exchange, self.buffers
        sleep_until(at)
        cpu, start = time.process_time(), time.monotonic()
        for _ in range(repeats):
            exchange(buffers)
        return {"seconds": time.monotonic() - start, "cpu_s": time.process_time() - cpu}

    def do_exchange_until_done(
        self, impl: str, at: float, retry: Reply | None = None, repeats: int = 1, check: list[int] | None = None
    ) -> Reply:  # fmt: skip
        """Exchanges; if one fails, then once more among the members in `retry`. Times are of the common clock."""
        reply: Reply = {"failed_at": None}
        sleep_until(at)
        try:
            for _ in range(repeats):
                self.impls[impl].exchange(self.buffers)
        except ExchangeFailed as failed:
            reply |= {
                "failed_at": failed.at, "suspect": failed.suspect, "phase": failed.phase, "reason": str(failed)
            }  # fmt: skip
            if retry:
                self.impls[impl].configure(**retry)
                reply["ready_at"] = time.monotonic()
                if self.impls[impl].in_place:
                    self.buffers.refill()
                self.impls[impl].exchange(self.buffers)
        reply["done_at"] = time.monotonic()
        if check is not None:
            reply["right"] = self.buffers.is_sum_of(check)
        return reply

    # --- beside a training thread ---------------------------------------------------------------------------------

    def do_beside(self, impl: str, loop: str, seconds: float, at: float) -> Reply:
        """A loop in the main thread and exchanges, one after the other, in another; either may be left out ("")."""
        source, target, finished = self.buffers.source, self.buffers.target, []
        source.zero_(), target.zero_()
        end = at + seconds

        def exchanges() -> None:
            while (
                target[0] == 0.0
            ):  # the first element says whether somebody's time is over: all stop after the same one
                source[0] = target[0] = float(time.monotonic() > end)
                self.impls[impl].exchange(self.buffers)
                finished.append(time.monotonic())

        thread = threading.Thread(target=exchanges)
        turn, turns = LOOPS[loop], 0
        sleep_until(at)
        if impl:
            thread.start()
        while time.monotonic() < end:
            turn()
            turns += bool(loop)
        took = time.monotonic() - at
        if impl:
            thread.join()
        finished = [t for t in finished if t < end]
        return {"turns_per_s": turns / took, "sum_s": (finished[-1] - at) / len(finished) if finished else None}


_A = torch.full((256, 256), 0.5)


def matmul() -> None:
    """About a millisecond, outside of the interpreter."""
    torch.mm(_A, _A)


def pure_python() -> None:
    """About a millisecond in the interpreter."""
    total = 0
    for i in range(20_000):
        total += i & 3


LOOPS = {"": lambda: time.sleep(0.01), "matmul": matmul, "python": pure_python}


def main() -> None:
    channel, parent, spec = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), json.loads(sys.argv[3])
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    torch.set_num_threads(1)
    rank = Rank(spec)
    with channel.makefile("rb") as requests:
        for line in requests:
            request = json.loads(line)
            try:
                reply = getattr(rank, "do_" + request.pop("do"))(**request) or {}
            except Exception:  # noqa: BLE001 - the top of this process: the driver reports it and ends the run
                reply = {"error": traceback.format_exc()}
            channel.sendall(json.dumps(reply).encode() + b"\n")
    os._exit(0)  # some of those under test wait for their peers at exit


if __name__ == "__main__":
    main()
