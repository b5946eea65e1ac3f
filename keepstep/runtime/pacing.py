"""Watches a rank's main thread from its control loop: the clock and the voice of `protocol.pace`.

It can speak as long as Python runs in other threads: a main thread that hangs while it holds the interpreter lock makes the whole
rank silent, and is found as a frozen one is.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable

from keepstep.protocol.ids import Rank
from keepstep.protocol.messages import Lags
from keepstep.protocol.pace import Effect, KeepsUp, Pace, PaceSettings, Slow, Stuck
from keepstep.runtime.pace_file import PaceFile

log = logging.getLogger("keepstep")

KEEP_S = 5.0  # what is learned is kept at most so often


class Pacing:
    """One rank's. All calls on the control loop."""

    def __init__(
        self,
        settings: PaceSettings,
        rank: Rank,
        *,
        kept: PaceFile,
        say: Callable[[Lags], None],
        emit: Callable[..., None],
    ) -> None:
        """`say` tells the leader."""
        self._pace = Pace(settings, kept.before)
        self._kept, self._keep_at = kept, 0.0
        self._rank, self._say, self._emit = rank, say, emit
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def on_order(self, *, trains: bool) -> None:
        """The main thread was given something to do."""
        if not self._closed:
            self._pace.on_order(trains=trains, now=time.monotonic_ns())
            self._arm()

    def on_done(self) -> None:
        """It has done the first of what it had to do."""
        if not self._closed:
            for effect in self._pace.on_done(now=time.monotonic_ns()):
                self._carry_out(effect)
            self._keep()
            self._arm()

    def close(self) -> None:
        """What the script does from now on is its own."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        """A timer that comes too early looks again; that costs less than a new one for every order."""
        due = self._pace.next_deadline()
        if due is None or self._closed:
            return
        at = self._loop.time() + (due - time.monotonic_ns()) / 1e9
        if self._timer is not None and not self._timer.cancelled():
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        for effect in self._pace.on_time(now=time.monotonic_ns()):
            self._carry_out(effect)
        self._keep()
        self._arm()

    def _keep(self) -> None:
        """For the next life, which may begin at any moment."""
        if self._loop.time() >= self._keep_at and self._kept.keep(self._pace.learned):
            self._keep_at = self._loop.time() + KEEP_S

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Slow():
                at, _ = where()
                took, longest, before = effect.took / 1e9, effect.longest / 1e9, effect.before / 1e9
                known = f"the longest of its last steps took {longest:.1f} s" if longest else "it is its first"
                known = f"such a step of its life before took {before:.1f} s" if before else known
                words = f"{took:.1f} s for a step, and {known}; it is at {at}"
                log.warning("the main thread of this rank makes no progress: %s", words)
                self._emit("slow", took_s=took, longest_s=longest, before_s=before, at=at)
                self._say(Lags(rank=self._rank, slow=True, reason=words))
            case KeepsUp():
                log.warning("the main thread of this rank makes progress again, after %.1f s", effect.took / 1e9)
                self._emit("keeps_up", took_s=effect.took / 1e9)
                self._say(Lags(rank=self._rank, slow=False))
            case Stuck():
                at, collective = where()
                took = effect.took / 1e9
                words = f"its main thread has made no progress for {took:.0f} s, and is at {at}"
                log.warning("this life is ended if others wait for it, or go on without it: %s", words)
                self._emit("stuck", took_s=took, at=at)
                self._say(Lags(rank=self._rank, slow=True, stuck=True, waits=collective, reason=words))


def where() -> tuple[str, bool]:
    """The place in the script at which the main thread is, and the innermost one; whether it waits for other ranks there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost, script, collective = "", "", False
    while frame is not None:
        code = frame.f_code
        place = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        innermost = innermost or place
        collective = collective or "/torch/distributed/" in code.co_filename
        library = any(part in code.co_filename for part in ("/site-packages/", "/lib/python", "/keepstep/", "<frozen"))
        script = script or ("" if library else place)
        frame = frame.f_back
    return (f"{script} ({innermost})" if script and script != innermost else script or innermost), collective
