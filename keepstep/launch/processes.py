"""One life of one replica: K processes, their output, their end.

Every rank is a session of its own, so that it and whatever it starts can be killed as one group. Exits are seen at once
(pidfd). Output goes to the terminal with a prefix, and without it to a log file a rank. Runs on the launcher's loop.

Fails: OSError if a process cannot be started. Output that cannot be shown or kept is lost, and nothing else: a full disk, a
closed terminal or odd bytes must not keep an exit from being seen.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import FileIO
from pathlib import Path

from keepstep.protocol.ids import Incarnation

MAX_LINE = 1 << 16
LAST_LINES = 30


Start = Callable[[Sequence[str], Mapping[str, str], int, int | None], int]
"""(script and arguments, environment, where its output goes, the leader's listening socket or None) -> pid of our new child."""


def start_cold(args: Sequence[str], env: Mapping[str, str], output: int, listener: int | None) -> int:
    """A new interpreter. See `launch.zygote` for the quick way."""
    inherited = {} if listener is None else {"KEEPSTEP_LEADER_FD": str(listener)}
    process = subprocess.Popen(
        [sys.executable, "-m", "keepstep.launch.child", *args],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=() if listener is None else (listener,),
        env={**env, **inherited},
    )
    process.returncode = 0  # not Popen's to wait for: RankProcess does
    return process.pid


class Output:
    """Reads what a process says, line by line, without ever blocking."""

    def __init__(self, fd: int, prefix: str, log_path: Path, banner: str, show: Callable[[str], None]) -> None:
        """`show`: takes whole lines, must not block."""
        self._fd, self._prefix, self._rest, self._show_text = fd, prefix, b"", show
        self._log: FileIO | None = None
        with contextlib.suppress(OSError):  # a full disk must not stop training
            self._log = FileIO(log_path, "a")
        self._keep(banner.encode())
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self.read)

    def read(self) -> None:
        """Takes what is there now."""
        while True:
            try:
                data = os.read(self._fd, MAX_LINE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        self._keep(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= MAX_LINE:
            lines, self._rest = [*lines, self._rest], b""
        self._show(lines)

    def _keep(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop training
            if self._log is not None:
                self._log.write(data)

    def _show(self, lines: list[bytes]) -> None:
        words = [line.decode(errors="replace").rstrip("\r") for line in lines]
        self.last.extend(word for word in words if word.strip())
        self._show_text("".join(f"{self._prefix} {word}\n" for word in words))

    def close(self) -> None:
        """The process has closed its end, or we stop listening."""
        if self._fd < 0:
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
        if self._rest:
            self._show([self._rest])
        if self._log is not None:
            self._log.close()


class RankProcess:
    """One rank."""

    def __init__(self, rank: int, pid: int, output: Output, on_exit: Callable[[int], None]) -> None:
        self.rank, self.pid, self.output, self._on_exit = rank, pid, output, on_exit
        self.code: int | None = None
        self.released = False
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)  # it has ended: this only fetches the code
        self.code = os.waitstatus_to_exitcode(status)
        self.output.read()
        self._on_exit(self.rank)

    def release(self) -> None:
        """Somebody else waits for its end from now on."""
        self.released = True
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """The rank's whole process group, even if the rank itself has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(self.pid, how)


class Life:
    """K processes with one incarnation, all on this host: their control tree is on its loopback."""

    def __init__(
        self,
        *,
        replica_id: int,
        incarnation: Incarnation,
        number: int,
        ranks: int,
        args: Sequence[str],
        start: Start,
        env: Mapping[str, str],
        logs: Path,
        show: Callable[[str], None],
        on_exit: Callable[["Life", int], None],
    ) -> None:
        self.replica_id, self.incarnation, self.number = replica_id, incarnation, number
        self.processes: list[RankProcess] = []
        self.failed: int | None = None  # the rank that failed first
        self.bereft: int | None = None  # the first rank that ended because it missed another one
        self.killed = False  # by a signal
        self.cause = ""  # why, in words: what it said last
        self._buried = False
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        host, port = listener.getsockname()
        try:
            for rank in range(ranks):
                own = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "REPLICA_ID": str(replica_id),
                    "KEEPSTEP_INCARNATION": self.incarnation,
                    "KEEPSTEP_LIFE": str(number),
                    "KEEPSTEP_LEADER": f"{host}:{port}",
                    "KEEPSTEP_PARENT": str(os.getpid()),
                }
                reader, writer = os.pipe()
                try:
                    pid = start([*args], {**env, **own}, writer, listener.fileno() if rank == 0 else None)
                except BaseException:
                    os.close(reader)
                    raise
                finally:
                    os.close(writer)
                banner = f"--- replica {replica_id} rank {rank}, life {number}, incarnation {self.incarnation} ---\n"
                log = logs / f"replica{replica_id}-rank{rank}.log"
                output = Output(reader, f"[r{replica_id}.k{rank}]", log, banner, show)
                self.processes.append(RankProcess(rank, pid, output, partial(on_exit, self)))
        except BaseException:
            self.kill()
            raise
        finally:
            listener.close()

    @property
    def running(self) -> list[RankProcess]:
        return [p for p in self.processes if p.code is None]

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self.processes]

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Every rank and what it has started. Does nothing once the life is buried."""
        if not self._buried:
            for process in self.processes:
                process.kill(how)

    def bury(self) -> None:
        """Every rank has ended: ends what they had started. From now on their numbers may mean somebody else's processes."""
        self.kill()
        self._buried = True

    def note_failure(self, rank: int) -> None:
        """`rank` is the first to have failed; the others only follow."""
        process = self.processes[rank]
        code, last = process.code, process.output.last
        self.failed = rank
        self.killed = code is not None and code < 0
        self.cause = f"rank {rank} {how_it_ended(code)}" if self.killed or not last else last[-1]


def how_it_ended(code: int | None) -> str:
    """An exit code in words."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
