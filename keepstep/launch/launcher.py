"""Runs a job on one machine: the store, R replicas of K ranks, and a new life for each replica that dies (FT-HSDP section 5.4).

    replicas run (`launch.replica_keeper`)
       ├── every replica done, or late after the first that is ──> 0
       ├── `keepstep stop`: every replica has left at a step boundary ──> 0
       ├── exit code 78 (the user's mistake) before anything was trained ──> 78
       └── no replica can go on ──> 1, with the reason

`keepstep drain` and `add` reach us through the store (`launch.requests`).
"""

import asyncio
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from keepstep.launch.etcd_keeper import EtcdKeeper
from keepstep.launch.replica_keeper import HAS_TRAINED, Replica, ReplicaKeeper
from keepstep.launch.requests import Requests
from keepstep.launch.screen import Screen
from keepstep.launch.settings import LaunchSettings
from keepstep.launch.shell import Shell
from keepstep.protocol.errors import EX_CONFIG
from keepstep.protocol.ids import Incarnation
from keepstep.runtime.etcd import EtcdStore, JobRecord
from keepstep.runtime.event_log import EventLog
from keepstep.version import __version__


class Launcher:
    """One run. `run` returns the exit code and leaves nothing behind."""

    def __init__(self, settings: LaunchSettings, screen: Screen) -> None:
        self.settings = settings
        self._shell = Shell(screen, EventLog(settings.run_dir / "events" / "launcher.jsonl", {}))
        self._keeper = ReplicaKeeper(settings, self._shell, self)
        for replica in range(settings.replicas):
            self._keeper.take(replica)
        self._requests = Requests(self._keeper)
        self._etcd: EtcdKeeper | None = None
        self._store: EtcdStore | None = None
        self._token_file = settings.run_dir / "token"

    async def run(self) -> int:
        """Starts everything, waits for the end. Raises ConfigError or StoreError if it cannot start: nothing is left then."""
        keeper, shell = self._keeper, self._shell
        code, begun = 1, False
        shape = {"num_replicas": self.settings.replicas, "ranks_per_replica": self.settings.ranks}
        shell.events.emit("start", {**shape, "pid": os.getpid()})
        shell.begin(keeper.kill_all)
        keeper.others = lambda: [] if self._etcd is None else [self._etcd.pid]
        try:
            await self._start_store()
            begun = True
            for replica in [*keeper.replicas.values()]:
                keeper.start(replica)
            code = await shell.ended
            return code
        finally:
            await self._clean_up()
            shell.events.emit("end", {"code": code})
            shell.events.close()
            if not begun:
                self.settings.take_back()

    def verdict(self, code: int) -> str:
        """What a run that ended with `code` came to."""
        done = any(replica.outcome == "done" for replica in self._keeper.replicas.values())
        if code == 0 and self._requests.stop_asked and not done:
            return "the job was stopped, as it was asked to, and is not complete"
        if code == 0:
            return "the job is complete"
        if self._shell.signal is not None:
            return f"the job was ended by {self._shell.signal.name}"
        first = f", {self._keeper.first_failure} failed first" if self._keeper.first_failure else ""
        return f"the job has failed (exit code {code}){first}"

    # --- what becomes of replicas -----------------------------------------------------------------------------

    def claim(self, replica: Replica, incarnation: Incarnation, start: Callable[[], None]) -> None:
        """At once: only one launcher starts replicas of this job."""
        start()

    def on_outcome(self, replica: Replica) -> None:
        replicas = self._keeper.replicas.values()
        if all(other.over for other in replicas):
            well = self._requests.stop_asked or any(other.outcome == "done" for other in replicas)
            self._shell.end(0 if well else 1)

    def on_mistake(self, replica: Replica, sentence: str) -> None:
        """The job's, if nothing was trained yet: it ends. Else this replica's own."""
        keeper = self._keeper
        replicas = keeper.replicas.values()
        keeper.trained = keeper.trained or any(r.life and keeper.has(r.life, HAS_TRAINED) for r in replicas)
        if keeper.trained and any(not r.over or r.outcome == "done" for r in replicas if r is not replica):
            keeper.give_up(replica, sentence)
        else:
            self._shell.events.emit("gave_up", {"replica": replica.id, "reason": sentence})
            self._shell.say(f"replica {replica.id}: {sentence}")
            self._shell.end(EX_CONFIG)

    # --- starting and ending ----------------------------------------------------------------------------------

    async def _start_store(self) -> None:
        settings, shell = self.settings, self._shell
        token = settings.token or secrets.token_hex(16).encode()
        write_token(self._token_file, token)
        url = settings.store
        if url is None:
            self._etcd = EtcdKeeper(
                settings.run_dir,
                say=shell.say,
                on_end=lambda code: shell.events.emit("etcd", {"code": code}),
                give_up=lambda: shell.end(1),
                guarded=shell.guarded,
            )
            url = self._etcd.start()
        self._store = await EtcdStore.open(url, settings.job, lease_s=5.0)
        await self._store.claim_launcher(
            f"pid {os.getpid()} on {os.uname().nodename}, run directory {settings.run_dir}"
        )
        await self._store.claim_job(job_record(settings, token))
        await self._store.forget_requests()
        self._keeper.begin(self._store, settings.environment(os.environ, url, self._token_file))
        await self._store.watch(lambda view: shell.guarded(self._requests.on_change, view.requests), only="requests/")
        write_about(settings, url)

    async def _clean_up(self) -> None:
        """Whatever happened: nothing of ours runs on."""
        polite, self._shell.stopping = self._shell.stopping, True
        await self._keeper.end_lives(polite=polite)
        await self._shell.end_tasks()
        if self._store is not None:
            await self._store.close()
        if self._etcd is not None:
            self._etcd.stop()
            self._etcd = None
        self._keeper.clean_up()
        self._token_file.unlink(missing_ok=True)


def job_record(settings: LaunchSettings, token: bytes) -> JobRecord:
    """What all replicas must agree on, as far as it is known before they start."""
    return JobRecord(
        version=__version__,
        num_replicas=settings.replicas,
        ranks_per_replica=settings.ranks,
        data_fingerprint="",
        layout_digest="",
        token_check=EtcdStore.token_check(settings.job, token),
    )


def write_token(path: Path, token: bytes) -> None:
    """For the ranks, and for nobody else."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(token)


def write_about(settings: LaunchSettings, store: str | None) -> None:
    """What other commands must know to find the job. Whole at any time."""
    about = {"script": str(settings.script), "args": settings.args, "job": settings.job, "store": store}
    part = settings.run_dir / "run.json.part"
    part.write_text(json.dumps(about) + "\n")
    part.replace(settings.run_dir / "run.json")


def launch(settings: LaunchSettings) -> int:
    """Runs the job; returns the exit code."""

    async def main() -> tuple[int, str]:
        launcher = Launcher(settings, screen)
        code = await launcher.run()
        return code, launcher.verdict(code)

    write_about(settings, settings.store)
    screen = Screen()
    try:
        code, verdict = asyncio.run(main())
        screen.error(f"keepstep: {verdict}; logs are in {settings.run_dir / 'logs'}\n")
    finally:
        screen.close()
    return code
