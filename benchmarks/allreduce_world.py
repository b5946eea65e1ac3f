"""The rank processes of a measurement, and the pipes by which the driver tells them what to do.

Each rank runs `allreduce_rank.py`: it reads a request, does it, and answers, one JSON line each. Ranks die with the driver
(PDEATHSIG), and keep no files: what they print goes to a file without a name, shown if they fail.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from allreduce_net import Namespace

RANK = Path(__file__).resolve().parent / "allreduce_rank.py"
START_DELAY_S = 0.003  # from the request to the common start of a round
Reply = dict[str, Any]


class RankFailed(RuntimeError):
    """A rank answered with an error, not at all, or is gone."""


class RankProcess:
    """One rank and our end of its pipe."""

    def __init__(self, spec: Reply, namespace: Namespace | None) -> None:
        ours, theirs = socket.socketpair()
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
            "GLOO_SOCKET_IFNAME": spec["device"], "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        command = [sys.executable, str(RANK), str(theirs.fileno()), str(os.getpid()), json.dumps(spec)]
        with namespace.entered() if namespace else contextlib.nullcontext():
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output, env=env,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        theirs.close()
        self.rank: int = spec["rank"]
        self._socket, self._rest = ours, b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, request: Reply) -> None:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            raise self._failure("is gone") from None

    def receive(self, timeout_s: float) -> Reply:
        end = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready = select.select([self._socket], [], [], max(0.0, end - time.monotonic()))[0]
            if not ready:
                raise self._failure(f"has not answered in {timeout_s:.0f} s")
            got = self._socket.recv(1 << 16)
            if not got:
                raise self._failure("has ended")
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise self._failure(f"failed:\n{reply['error']}")
        return reply

    def _failure(self, what: str) -> RankFailed:
        self.output.seek(0)
        text = self.output.read().decode(errors="replace").strip()
        return RankFailed(f"rank {self.rank} {what}\n{text[-3000:]}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()
        self.output.close()


class World:
    """`size` ranks, all in one namespace or each in its own (or in none, without root)."""

    def __init__(
        self, size: int, namespaces: Sequence[Namespace | None], hosts: Sequence[str] = (), device: str = "lo", **spec: Any
    ) -> None:  # fmt: skip
        self.size = size
        self.namespaces = [namespaces[r % len(namespaces)] for r in range(size)]
        self._spec = {"device": device, **spec}
        self._hosts = list(hosts) or ["127.0.0.1"] * size
        self.ranks: list[RankProcess] = []
        self._lives = 0
        try:
            for rank in range(size):
                self.ranks.append(self._start(rank))
            self.call("hello", timeout_s=120)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int) -> RankProcess:
        self._lives += 1
        spec = {"rank": rank, "life": self._lives, "host": self._hosts[rank], **self._spec}
        return RankProcess(spec, self.namespaces[rank])

    def call(
        self, do: str, ranks: Sequence[int] | None = None, timeout_s: float = 60.0, **arguments: Any
    ) -> list[Reply]:
        """All of `ranks` do it at the same time; their answers, in order."""
        chosen = range(self.size) if ranks is None else ranks
        return self.call_each(do, {r: {} for r in chosen}, timeout_s, **arguments)

    def call_each(self, do: str, each: dict[int, Reply], timeout_s: float = 60.0, **common: Any) -> list[Reply]:
        """Like `call`, with arguments of its own for each rank."""
        self.post(do, each, **common)
        return self.gather(list(each), timeout_s)

    def post(self, do: str, each: dict[int, Reply], **common: Any) -> None:
        """Tells ranks what to do, and does not wait."""
        for rank, own in each.items():
            self.ranks[rank].send({"do": do, **common, **own})

    def gather(self, ranks: Sequence[int], timeout_s: float = 60.0) -> list[Reply]:
        end = time.monotonic() + timeout_s
        return [self.ranks[r].receive(max(0.1, end - time.monotonic())) for r in ranks]

    def join(self, impl: str, ranks: Sequence[int] | None = None, generation: int = 1, **settings: Any) -> None:
        """Opens `impl` on `ranks` and connects them to one another."""
        chosen = list(range(self.size) if ranks is None else ranks)
        members = self.call("open", chosen, impl=impl, **settings)
        self.configure(impl, members, generation)

    def members(self, impl: str, ranks: Sequence[int]) -> list[Reply]:
        """Who `ranks` are on the wire: what `configure` wants."""
        return self.call("member", ranks, impl=impl)

    def configure(self, impl: str, members: list[Reply], generation: int, at: float = 0.0) -> list[Reply]:
        """Those become the members, in this order; the answers tell how long each one took."""
        each = {m["rank"]: {"position": i} for i, m in enumerate(members)}
        return self.call_each("configure", each, impl=impl, members=members, generation=generation, at=at)

    def restart(self, rank: int) -> None:
        """A killed rank's next life."""
        self.ranks[rank].kill()
        self.ranks[rank] = self._start(rank)
        self.call("hello", [rank], timeout_s=120)

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Returns the time just before it."""
        now = time.monotonic()
        os.kill(self.ranks[rank].pid, number)
        return now

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.ranks = []

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def soon() -> float:
    """A common start for a round."""
    return time.monotonic() + START_DELAY_S
