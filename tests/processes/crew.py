"""Members of a process group as real processes, each of which runs what the test tells it to."""

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import keepstep

Task = Callable[..., Any]

# Forked from a process that has imported torch and started no threads: this one has some.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "keepstep.training.process_group"])


class Failure(Exception):
    """What a member's task raised."""


class Member:
    """One process with one FTARProcessGroup."""

    def __init__(self, number: int, address: str, options: dict[str, Any]) -> None:
        self.number = number
        self._connection, theirs = mp.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs, number, address, options), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, task: Task, *args: Any) -> None:
        self._connection.send((task, args))

    def end(self, timeout: float = 30) -> Any:
        if not self._connection.poll(timeout):
            raise TimeoutError(f"member {self.number} has not answered in {timeout} s")
        ok, value = self._connection.recv()
        if not ok:
            raise Failure(value)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()
        self._connection.close()


class Crew:
    """Several members, and the store where they meet."""

    def __init__(self, count: int, **options: Any) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._meetings = 0
        address = f"127.0.0.1:{self._store.port}"
        self.members = [Member(number, address, options) for number in range(count)]

    def all(self, task: Task, *args: Any, members: Sequence[Member] | None = None) -> list[Any]:
        """What `task(pg, *args)` returns on each."""
        members = self.members if members is None else members
        for member in members:
            member.start(task, *args)
        return self._all_end(members)

    def _all_end(self, members: Sequence[Member]) -> list[Any]:
        results: list[Any] = []
        for member in members:
            try:
                results.append(member.end())
            except Failure as failure:
                results.append(failure)
        for result in results:
            if isinstance(result, Failure):
                raise result
        return results

    def configure(self, members: Sequence[Member] | None = None) -> None:
        members = self.members if members is None else members
        self._meetings += 1
        for rank, member in enumerate(members):
            member.start(_configure, f"meeting-{self._meetings}", rank, len(members))
        self._all_end(members)

    def close(self) -> None:
        for member in self.members:
            member.close()


def _configure(pg: keepstep.FTARProcessGroup, prefix: str, rank: int, size: int) -> None:
    pg.configure(f"{pg.test_address}/{prefix}", f"member-{os.getpid()}", rank, size)  # type: ignore[attr-defined]


def _serve(connection: Connection, number: int, address: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if "tokens" in options:
        options = {"token": options["tokens"][number]}
    elif "settings" in options:
        options = {"settings": options["settings"][number]}
    pg = keepstep.FTARProcessGroup(timedelta(seconds=10), **options)
    pg.test_address = address  # type: ignore[attr-defined]
    while True:
        try:
            task, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, task(pg, *args)))
        except BaseException as error:  # noqa: BLE001  (the test is told)
            connection.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
