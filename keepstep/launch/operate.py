"""`keepstep drain`, `keepstep add`, `keepstep stop`: what an operator wants of a job that runs.

A command writes a request into the job's store, which stands there whoever is alive to hear it: the leader of the replica reports
that it wants out (and the quorum lets it go at a step boundary), the launcher does not start it again, on whatever host they are.
Then it watches the store, says in words what is awaited, and ends when it has come true.

The job's token is asked for, so that a request goes to the job it is meant for. It does not protect the store: who may write
there is believed (docs/security.md).

Fails: ConfigError with one sentence for what cannot be asked; StoreError if no store answers; 1 if it has not come true in time.
"""

import asyncio
import getpass
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keepstep.launch.settings import check_job, read_token_file
from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import ReplicaId, Step
from keepstep.protocol.messages import Kind, Request, Role
from keepstep.protocol.reasons import names
from keepstep.protocol.roster import TrySeats, moves, new_seats, runs
from keepstep.runtime.etcd import EtcdStore, JobRecord
from keepstep.runtime.etcd_roster import RosterStore
from keepstep.runtime.etcd_view import StoreView

LOOK_S = 0.5  # how often it is asked whether the run itself has ended: nothing tells us
PATIENT_STEPS = 3  # a replica that is a member for longer, though it was asked to leave, is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A job, and how it is reached."""

    url: str
    job: str
    token: bytes
    run_dir: Path | None  # of a run on this machine

    @property
    def ended(self) -> bool:
        """Whether the run on this machine is over. Its store may be gone with it."""
        return self.run_dir is not None and not (self.run_dir / "token").exists()


@dataclass(frozen=True, slots=True)
class Awaited:
    """What an answer would be. `done`: it has come."""

    words: str
    done: bool = False


Progress = Callable[[StoreView], Awaited]


def find(run_dir: Path | None, store: str | None, job: str | None, token_file: Path | None) -> Target:
    """The job of a run directory, or of a store. Raises ConfigError."""
    if (run_dir is None) == (store is None) or (store is None) != (job is None):
        raise ConfigError("name either the run directory, or --store and --job")
    if run_dir is None:
        assert store is not None
        assert job is not None
        token = read_token_file(token_file)
        if token is None:
            raise ConfigError("set KEEPSTEP_TOKEN or --token-file to the job's secret")
        return Target(url=store, job=check_job(job), token=token, run_dir=None)
    try:
        about = json.loads((run_dir / "run.json").read_text())
        url, name = about.get("store"), about["job"]
    except (OSError, ValueError, KeyError, AttributeError):
        raise ConfigError(f"{run_dir} holds no run: name the --run-dir of one, or --store and --job") from None
    token = read_token_file(token_file or run_dir / "token") if (token_file or run_dir / "token").exists() else None
    if token is None or not isinstance(url, str):
        raise ConfigError(f"the run in {run_dir} has not begun, or is over")
    return Target(url=url, job=str(name), token=token, run_dir=run_dir)


def drain(target: Target, replica: int, *, wait_s: float) -> int:
    """The replica leaves at a step boundary and is not started again. Returns the exit code."""
    return asyncio.run(_carry_out(target, replica, True, leaving(ReplicaId(replica)), wait_s))


def add(target: Target, replica: int, *, wait_s: float) -> int:
    """The replica comes back. Returns the exit code."""
    return asyncio.run(_carry_out(target, replica, False, coming(ReplicaId(replica)), wait_s))


def drain_host(target: Target, host: str, *, wait_s: float) -> int:
    """Its replicas leave at a step boundary and go on elsewhere, and it gets no more. Returns the exit code."""
    return asyncio.run(_about_host(target, host, True, emptying(host), wait_s))


def add_host(target: Target, host: str, *, wait_s: float) -> int:
    """It may keep replicas again. Returns the exit code."""
    return asyncio.run(_about_host(target, host, False, filling(host), wait_s))


def stop(target: Target, *, wait_s: float) -> int:
    """Every replica leaves at the same step boundary, and the job ends. Returns the exit code."""
    return asyncio.run(_carry_out(target, None, True, stopping, wait_s))


async def _carry_out(target: Target, replica: int | None, leave: bool, progress: Progress, wait_s: float) -> int:
    store = await EtcdStore.open(target.url, target.job)
    try:
        _check(target, replica, await store.job_record())
        refusal = refused(await store.read(), replica, leave)
        if refusal:
            raise ConfigError(refusal)
        await store.ask(None if replica is None else ReplicaId(replica), _request(leave))
        return await _wait(store, target, progress, wait_s)
    finally:
        await store.close()


async def _about_host(target: Target, host: str, leave: bool, progress: Progress, wait_s: float) -> int:
    store = await RosterStore.open(target.url, target.job)
    try:
        _check(target, None, await store.job_record())
        refusal = refused_of_host(await store.read(), host)
        if refusal:
            raise ConfigError(refusal)
        await store.drain_host(host, _request(leave) if leave else None)
        return await _wait(store, target, progress, wait_s)
    finally:
        await store.close()


def _check(target: Target, replica: int | None, record: JobRecord | None) -> None:
    if record is None:
        raise ConfigError(f"the store at {target.url} knows no job {target.job!r}: is the name right?")
    if record.token_check != EtcdStore.token_check(target.job, target.token):
        raise ConfigError(f"this is not the token of job {target.job}: give its own with --token-file")
    if replica is not None and not 0 <= replica < record.num_replicas:
        raise ConfigError(
            f"job {target.job} has replicas 0 to {record.num_replicas - 1}, their number is fixed when it starts "
            "(--replicas): name one of them"
        )


def refused(view: StoreView, replica: int | None, leave: bool) -> str:
    """Why this cannot be asked now; empty if it can."""
    if view.last is not None and view.last.kind is Kind.END:
        return "the job has ended"
    stop = view.requests.get(None)
    if replica is not None and not leave and stop is not None and stop.leave:
        return "the job was asked to stop: nobody comes back"
    mine = view.requests.get(ReplicaId(replica)) if replica is not None else None
    takes_part = view.last is not None and any(m.replica_id == replica for m in view.last.members)
    if replica is not None and not leave and takes_part and not (mine is not None and mine.leave):
        return f"replica {replica} takes part already"
    return ""


def refused_of_host(view: StoreView, host: str) -> str:
    """Why nothing can be asked of it; empty if it can."""
    roster = view.roster
    if view.last is not None and view.last.kind is Kind.END:
        return "the job has ended"
    if roster.plan is None:
        return f"no agents run this job, so it has no host {host}: name the number of a replica"
    known = sorted({*roster.hosts, *roster.drained, *(at.host for at in roster.places.values())})
    return "" if host in known else f"the job has no host {host}: name one of {', '.join(known)}, or a replica's number"


def _request(leave: bool) -> Request:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in containers
        user = f"user {os.getuid()}"
    return Request(request_id=secrets.token_hex(8), leave=leave, by=f"{user} on {socket.gethostname()}")


async def _wait(store: EtcdStore, target: Target, progress: Progress, wait_s: float) -> int:
    changed, said = asyncio.Event(), ""
    views: list[StoreView] = []
    loop = asyncio.get_running_loop()

    def on_change(view: StoreView) -> None:
        views[:] = [view]
        changed.set()

    await store.watch(on_change)
    deadline = loop.time() + wait_s
    while True:
        awaited = progress(views[0])
        if not awaited.done and target.ended:
            awaited = Awaited("the run has ended", done=True)
        elif not awaited.done and not views[0].connected:
            awaited = Awaited("the store is away: the request stands")
        if awaited.words != said:
            said = awaited.words
            print(f"keepstep: {said}", flush=True)
        if awaited.done:
            return 0
        if loop.time() >= deadline:
            print(f"keepstep: this has not come true in {wait_s:g} s (--wait); the request stands", file=sys.stderr)
            return 1
        changed.clear()
        try:
            async with asyncio.timeout(min(LOOK_S, max(0.0, deadline - loop.time()))):
                await changed.wait()
        except TimeoutError:
            continue


# --- what is awaited, from what the store shows ----------------------------------------------------------------


def leaving(replica: ReplicaId) -> Progress:
    """Until the replica is out of the job."""
    since: Step | None = None

    def progress(view: StoreView) -> Awaited:
        nonlocal since
        last = view.last
        if last is not None and last.kind is Kind.END:
            return Awaited("the job has ended meanwhile", done=True)
        members = last.members if last is not None else ()
        if replica not in view.reports and replica not in view.announced:
            others = [m.replica_id for m in members if m.replica_id != replica and m.replica_id in view.reports]
            went_on = f": {names(others)} go on" if len(others) > 1 else f": {names(others)} goes on" if others else ""
            return Awaited(f"replica {replica} has left{went_on}", done=True)
        if last is None or replica not in {m.replica_id for m in members}:
            return Awaited(f"replica {replica} is no member any more: waiting for its processes to end")
        since = last.step if since is None else since
        if last.step - since < PATIENT_STEPS:
            return Awaited(f"waiting for replica {replica} to reach a step boundary")
        return Awaited(
            f"replica {replica} is needed, since too few others hold the state (at least 1, or --min-replicas): it leaves once "
            "they do"
        )

    return progress


def emptying(host: str) -> Progress:
    """Until it keeps nothing."""
    moved: set[ReplicaId] = set()

    def progress(view: StoreView) -> Awaited:
        if view.last is not None and view.last.kind is Kind.END:
            return Awaited("the job has ended meanwhile", done=True)
        roster, requests = view.roster, view.requests
        here = {r for r, at in roster.places.items() if at.host == host}
        moved.update(here)
        busy = sorted(r for r in here if runs(r, roster, requests))
        if busy:
            few = len(view.reports) < 2
            why = "; the last one stays, for nobody else holds the state" if few else ""
            return Awaited(f"waiting for {names(busy)} to leave {host} at a step boundary{why}")
        waits = sorted(r for r in here if moves(r, roster, requests))
        there = sorted(f"replica {r} on {roster.places[r].host}" for r in moved - here if r in roster.places)
        on = f": {', '.join(there)}" if there else ""
        room = f"; no other host has room for {names(waits)}" if waits and not free(view) else ""
        if waits and not room:
            return Awaited(f"waiting for another host to take {names(waits)}")
        return Awaited(f"host {host} keeps nothing any more{on}{room}", done=True)

    def free(view: StoreView) -> bool:
        return isinstance(new_seats(view.roster, view.requests, frozenset()), TrySeats)

    return progress


def filling(host: str) -> Progress:
    """It may keep replicas again: whether there are any for it is up to the agents."""

    def progress(view: StoreView) -> Awaited:
        away = "" if host in view.roster.hosts else ", once its agent runs"
        return Awaited(f"host {host} may keep replicas again{away}", done=True)

    return progress


def coming(replica: ReplicaId) -> Progress:
    """Until the replica trains."""

    def progress(view: StoreView) -> Awaited:
        last = view.last
        if last is not None and last.kind is Kind.END:
            return Awaited("the job has ended meanwhile", done=True)
        me = next((m for m in last.members if m.replica_id == replica), None) if last is not None else None
        alive = replica in view.reports and (me is None or view.reports[replica][0].incarnation == me.incarnation)
        if me is not None and alive and last is not None and last.kind is Kind.TRAIN and me.role is Role.WORKER:
            return Awaited(f"replica {replica} trains again, from step {last.step}", done=True)
        if me is not None and alive:
            return Awaited(f"replica {replica} catches up")
        if replica in view.announced or replica in view.reports:
            return Awaited(f"replica {replica} is being started")
        if not view.launched:
            return Awaited(
                f"replica {replica} may come back, but no `keepstep run` or agent is there to start it: start it yourself"
            )
        return Awaited(f"waiting for {'an agent' if view.roster.plan else '`keepstep run`'} to start replica {replica}")

    return progress


def stopping(view: StoreView) -> Awaited:
    """Until nobody trains any more."""
    last = view.last
    if last is not None and last.kind is Kind.GATHER and last.saver is not None:
        return Awaited(f"replica {last.saver} saves state {last.step}; then all leave")
    if last is None and view.roster.plan is not None and not view.launched:
        return Awaited("the job has ended before its first step", done=True)
    if last is None or last.kind is not Kind.END:
        return Awaited("waiting for every replica to reach the same step boundary")
    if view.reports and view.connected:
        return Awaited(
            f"{names(view.reports)} {'leaves' if len(view.reports) == 1 else 'leave'} before step {last.step}"
        )
    return Awaited(f"the job has {'stopped before' if last.stopped else 'ended at'} step {last.step}", done=True)
