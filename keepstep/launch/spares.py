"""Warm spares on this machine: replicas that have run the script up to `keepstep.join()` and wait there (FT-HSDP section 5.4).

    started ──every rank is in join()──> ready ──a replica needs a life──> taken: it is told its place, and goes on
       │                                   └──a file that it has run is another one now──> stale: ended
       └──── a rank ends ──────────────────────> ended; another one after a pause that grows

A spare is made of processes like any rank's, whose environment has no REPLICA_ID yet. `Taken.start` then takes the place of
whatever else starts a process (`launch.processes.Start`), so a life does not know where its processes come from.

Spares begin a while after whatever else has begun, so that they do not take the cores from a start or a restart.

Fails: a spare that does not answer within a second is killed, and the rank is started in the usual way. Runs on the launcher's
loop.
"""

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from keepstep.launch.processes import Output, RankProcess, Start, how_it_ended
from keepstep.runtime.spare import MAX_MESSAGE

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # before the next try, when spares end by themselves in a row
SETTLE_S = 5.0  # after a start or a restart
ANSWER_S = 1.0  # of a spare that is told its place: it has nothing else to do
PLACE = ("REPLICA_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

Emit = Callable[[str, Mapping[str, object]], None]


class Spare:
    """The processes of one replica that is not any yet."""

    def __init__(self, number: int, ranks: int, start: Callable[[int, int, int], int], own: "Owner") -> None:
        """`start`: (rank, where its output goes, its end of the socket) -> pid. Raises OSError."""
        self.number, self._begun_ns = number, time.time_ns()
        self._sources: set[str] = set()  # files that it has run
        self.processes: list[RankProcess] = []
        self.sockets: list[socket.socket] = []
        self._waiting = set(range(ranks))
        self._own, self._loop = own, asyncio.get_running_loop()
        try:
            for rank in range(ranks):
                self._start(rank, start)
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int, start: Callable[[int, int, int], int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWER_S)
        self.sockets.append(ours)
        reader, writer = os.pipe()
        try:
            pid = start(rank, writer, theirs.fileno())
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
            theirs.close()
        log = self._own.logs / f"spare-rank{rank}.log"
        output = Output(reader, f"[spare.k{rank}]", log, f"--- spare {self.number} rank {rank} ---\n", self._own.show)
        self.processes.append(RankProcess(rank, pid, output, partial(self._own.on_exit, self)))
        self._loop.add_reader(ours, self._heard, rank)

    def _heard(self, rank: int) -> None:
        """It is in join(), or it has ended: then its exit says so."""
        self._loop.remove_reader(self.sockets[rank])
        heard = b""
        with contextlib.suppress(OSError):
            heard = self.sockets[rank].recv(MAX_MESSAGE)
        if heard and rank in self._waiting:
            self._sources.update(json.loads(heard))
            self._waiting.remove(rank)
            if self.ready:
                self._own.on_ready(self)

    @property
    def ready(self) -> bool:
        return not self._waiting

    @property
    def stale(self) -> bool:
        """Whether a file that it has run is another one since: by the time of its last change, which no copying sets back."""
        try:
            return any(os.stat(path).st_ctime_ns > self._begun_ns for path in self._sources)
        except OSError:
            return True

    @property
    def own(self) -> list[RankProcess]:
        """Those that have not been given away."""
        return [p for p in self.processes if not p.released]

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self.own]

    @property
    def running(self) -> bool:
        return any(p.code is None for p in self.own)

    def tell(self, rank: int, place: Mapping[str, str], output: int, listener: int | None) -> int:
        """Tells a waiting rank its place; it stays our child, but somebody else's to wait for. Raises OSError, and has then
        killed the rank: it must not take the place later, when another process has it."""
        process, channel = self.processes[rank], self.sockets[rank]
        if process.code is not None:
            raise ChildProcessError(f"it {how_it_ended(process.code)}")
        fds = [output] if listener is None else [output, listener]
        try:
            socket.send_fds(channel, [json.dumps(dict(place)).encode()], fds)
            if not channel.recv(64):
                raise ChildProcessError("it has ended")
        except OSError:
            process.kill()
            raise
        process.release()
        return process.pid

    def end(self) -> None:
        """Kills whatever has not been given away."""
        for process in self.own:
            process.kill()
        for channel in self.sockets:
            if channel.fileno() >= 0:
                self._loop.remove_reader(channel)
                channel.close()


class Owner:
    """What spares tell, and where they write."""

    def __init__(
        self,
        logs: Path,
        show: Callable[[str], None],
        on_ready: Callable[[Spare], None],
        on_exit: Callable[[Spare, int], None],
    ) -> None:
        self.logs, self.show, self.on_ready, self.on_exit = logs, show, on_ready, on_exit


class Taken:
    """A spare that becomes a life. Close it once that has all its processes."""

    def __init__(
        self, spare: Spare | None, base: Mapping[str, str], otherwise: Start, say: Callable[[str], None]
    ) -> None:
        self._spare, self._base, self._otherwise, self._say = spare, base, otherwise, say

    def start(self, args: Sequence[str], env: Mapping[str, str], output: int, listener: int | None) -> int:
        """As `launch.processes.Start`."""
        if self._spare is not None:
            place = {name: value for name, value in env.items() if self._base.get(name) != value}
            try:
                return self._spare.tell(int(env["RANK"]), place, output, listener)
            except OSError as error:
                self._say(f"spare {self._spare.number} cannot be used: {error}")
        return self._otherwise(args, env, output, listener)

    def close(self) -> None:
        if self._spare is not None:
            self._spare.end()


class Spares:
    """`count` of them, if the script allows. `take` when a replica needs a life."""

    def __init__(
        self,
        count: int,
        *,
        ranks: int,
        args: Sequence[str],
        env: Mapping[str, str],
        start: Start,
        logs: Path,
        show: Callable[[str], None],
        say: Callable[[str], None],
        emit: Emit,
        guarded: Callable[..., None],
        started: Callable[[list[int]], None],
        ended: Callable[[list[int]], None],
    ) -> None:
        """`guarded` runs a callback and its arguments; `started` and `ended` are told process ids."""
        self.count, self._ranks, self._args = count, ranks, [*args]
        self._env = {k: v for k, v in env.items() if k not in PLACE} | {
            "KEEPSTEP_SPARE": "1",
            "KEEPSTEP_PARENT": str(os.getpid()),
        }
        self._start, self._say, self._emit, self._guarded = start, say, emit, guarded
        self._started, self._ended = started, ended
        self._own = Owner(
            logs,
            show,
            on_ready=lambda spare: guarded(self._on_ready, spare),
            on_exit=lambda spare, rank: guarded(self._on_exit, spare, rank),
        )
        self._made = 0
        self._failures = 0  # in a row
        self._said = ""
        self._spares: list[Spare] = []
        self._leaving: list[Spare] = []  # that still have processes to be waited for
        self._timer: asyncio.TimerHandle | None = None
        self._not_before = 0.0  # the loop's time
        self._closed = False

    # --- making them ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Something has been started: make what is missing, but a while later."""
        self._not_before = asyncio.get_running_loop().time() + SETTLE_S
        self._in(0.0)

    def _in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._closed and len(self._spares) < self.count:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time() + seconds, self._not_before), self._guarded, self._make)

    def _make(self) -> None:
        """One at a time: the next when this one is ready."""
        if self._closed or len(self._spares) >= self.count or any(not spare.ready for spare in self._spares):
            return
        self._made += 1

        def start(rank: int, output: int, channel: int) -> int:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return self._start(self._args, {**self._env, **own}, output, channel)

        try:
            spare = Spare(self._made, self._ranks, start, self._own)
        except OSError as error:
            self._failed(f"it cannot be started: {error}")
            return
        self._spares.append(spare)
        self._started(spare.pids)
        self._tell(spare, "started", pids=spare.pids)

    def _on_ready(self, spare: Spare) -> None:
        self._failures = 0
        self._tell(spare, "ready")
        self._in(0.0)

    def _on_exit(self, spare: Spare, rank: int) -> None:
        process = spare.processes[rank]
        if spare in self._spares:
            self._spares.remove(spare)
            spare.end()
            self._leaving.append(spare)
            words = process.output.last[-1] if process.output.last else ""
            why = f"rank {rank} {how_it_ended(process.code)}" + (f": {words}" if words else "")
            self._tell(spare, "ended", reason=why)
            self._failed(why if spare.ready else f"{why}; does the script need its REPLICA_ID before keepstep.join()?")
        if not spare.running:
            for each in spare.own:
                each.kill()  # what it had started
            self._ended(spare.pids)
        self._leaving = [other for other in self._leaving if other.running]

    def _failed(self, why: str) -> None:
        pause = PAUSES_S[min(self._failures, len(PAUSES_S) - 1)]
        self._failures += 1
        if why != self._said:
            self._said = why
            self._say(f"a spare has ended, the next one is tried in {pause:g} s: {why}")
        self._in(pause)

    # --- giving them away -------------------------------------------------------------------------------------

    def take(self) -> Taken:
        """A ready one that has run the script as it is now, or none."""
        found = None
        for spare in [s for s in self._spares if s.ready]:
            if spare.stale:
                self._give_up(spare, "stale")
            elif found is None:
                found = spare
        if found is not None:
            self._spares.remove(found)
            self._leaving.append(found)
            self._tell(found, "taken")
        self.settle()
        return Taken(found, self._env, self._start, self._say)

    def _give_up(self, spare: Spare, why: str) -> None:
        self._spares.remove(spare)
        self._leaving.append(spare)
        self._tell(spare, why)
        spare.end()

    def _tell(self, spare: Spare, state: str, **more: object) -> None:
        self._emit("spare", {"number": spare.number, "state": state, **more})

    # --- the end ----------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Of those that wait: not to be taken for orphans."""
        return [pid for spare in (*self._spares, *self._leaving) for pid in spare.pids]

    @property
    def running(self) -> bool:
        """Whether some process has not ended yet."""
        return any(spare.running for spare in (*self._spares, *self._leaving))

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for spare in [*self._spares]:
            self._give_up(spare, "closed")
