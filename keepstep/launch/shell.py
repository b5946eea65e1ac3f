"""What every process that keeps replicas is built around: one asyncio loop, its signals, its end, and what the store is told.

Runs in the main thread, so that PR_SET_PDEATHSIG of everything that is started means what it should. An error of ours in a
callback ends the process with 1 instead of letting the job hang; a store that cannot be told is said, and leases cover for it.
"""

import asyncio
import ctypes
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVarTuple

from keepstep.launch.screen import Screen
from keepstep.protocol.errors import StoreError
from keepstep.runtime.event_log import EventLog

log = logging.getLogger("keepstep.launch")
Ts = TypeVarTuple("Ts")

PR_SET_CHILD_SUBREAPER = 36
TELL_S = 20.0


class Shell:
    """Create it on the loop."""

    def __init__(self, screen: Screen, events: EventLog) -> None:
        self.screen, self.events = screen, events
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stopping = False  # nothing is started any more
        self.signal: signal.Signals | None = None  # what ended us
        self._kill: Callable[[signal.Signals], None] = lambda how: None
        self._tell: asyncio.Queue[Coroutine[Any, Any, None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, kill: Callable[[signal.Signals], None]) -> None:
        """Whoever is orphaned among our descendants becomes our child; a signal for us is passed on by `kill`."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._kill = kill
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        self.start(self._tell_store())

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that ends with us."""
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.get_running_loop().create_task(self._watched(work)))

    async def end_tasks(self) -> None:
        """Nothing is told any more."""
        await asyncio.sleep(0)  # all have begun: Python complains of coroutines that never did
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._tell.empty():
            self._tell.get_nowait().close()

    def say(self, words: str) -> None:
        self.screen.error(f"keepstep: {words}\n")

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

    def tell(self, work: Coroutine[Any, Any, None]) -> None:
        """The store, after everything that it is being told already."""
        self._tell.put_nowait(work)

    def guarded(self, work: Callable[[*Ts], None], *args: *Ts) -> None:
        """Runs a callback of the loop. An error of ours ends the job; asyncio would only log it, and the job would hang."""
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001  (top of the callbacks: said, and ends us)
            self._failed(error)

    def later(self, seconds: float, work: Callable[[*Ts], None], *args: *Ts) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self.guarded, work, *args)

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Waits for what nothing tells, as what the kernel ends."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _on_signal(self, number: int) -> None:
        if self.stopping:
            self._kill(signal.SIGKILL)
            return
        self.stopping, self.signal = True, signal.Signals(number)
        self.say(f"{self.signal.name}: ending every rank")
        self._kill(signal.SIGTERM)
        self.end(128 + number)

    def _failed(self, error: Exception) -> None:
        log.error("the launcher has failed", exc_info=error)
        self.say(f"the launcher itself has failed, which is a bug, and ends the job: {error!r}")
        self.end(1)

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  (top of a task: said, and ends us)
            self._failed(error)

    async def _tell_store(self) -> None:
        """In order, and without holding up anything else. Leases cover for what is lost."""
        while True:
            work = await self._tell.get()
            try:
                await asyncio.wait_for(work, TELL_S)
            except (StoreError, TimeoutError) as error:
                self.say(f"the store could not be told: {error}")
