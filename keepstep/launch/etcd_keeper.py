"""Keeps the embedded etcd running: starts it again when it ends, for as long as that may help.

Training waits meanwhile, and nothing is lost: it has its data in the run directory. A full disk may be emptied, and a port that
somebody took while it was down be given back. Runs on the launcher's loop; starting blocks it for a moment.

Fails: `start` raises StoreError or ConfigError; later, `give_up` is called once it has been down for `PATIENCE_S`.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from keepstep.protocol.errors import ConfigError, StoreError
from keepstep.runtime.etcd_server import EmbeddedEtcd

PAUSE_S = 2.0
PATIENCE_S = 600.0


class EtcdKeeper:
    """One embedded etcd. `guarded` runs callbacks of the loop, as the launcher's does."""

    def __init__(
        self,
        run_dir: Path,
        *,
        say: Callable[[str], None],
        on_end: Callable[[int | None], None],
        give_up: Callable[[], None],
        guarded: Callable[..., None],
    ) -> None:
        self._etcd = EmbeddedEtcd(run_dir / "etcd", run_dir / "logs" / "etcd.log")
        self._say, self._on_end, self._give_up, self._guarded = say, on_end, give_up, guarded
        self._stopped = False

    @property
    def pid(self) -> int:
        return self._etcd.pid

    def start(self) -> str:
        """Returns its address."""
        url = self._etcd.start()
        self._watch()
        return url

    def stop(self) -> None:
        """For good; bounded in time."""
        self._stopped = True
        self._etcd.stop()

    def _watch(self) -> None:
        loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(self._etcd.pid)

        def ended() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            if self._stopped:
                return
            code = self._etcd.poll()
            self._say(f"the embedded etcd ended with code {code}: starting it again")
            self._on_end(code)
            self._start_again(loop.time() + PATIENCE_S, first=True)

        loop.add_reader(pidfd, self._guarded, ended)

    def _start_again(self, deadline: float, first: bool) -> None:
        if self._stopped:
            return
        loop = asyncio.get_running_loop()
        try:
            self.start()
        except (StoreError, ConfigError) as error:
            if loop.time() > deadline:
                self._say(f"{error}; it has not come back in {PATIENCE_S:.0f} s, and the job ends")
                self._give_up()
                return
            if first:
                self._say(f"{error}; training waits, and it is tried again every {PAUSE_S:g} s")
            loop.call_later(PAUSE_S, self._guarded, self._start_again, deadline, False)
        else:
            if not first:
                self._say("the embedded etcd runs again")
