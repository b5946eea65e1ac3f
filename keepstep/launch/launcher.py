"""Runs a job on one machine: the store, R replicas of K ranks, and a new life for each replica that dies (FT-HSDP section 5.4).

    start ──> running ──a rank exits──> the rest of that replica is killed, the store is told, a new life starts
                 │
                 ├── every replica done, or late after the first that is ──> 0
                 ├── `keepstep stop`: every replica has left at a step boundary ──> 0
                 ├── exit code 78 (the user's mistake) before anything was trained ──> 78
                 └── no replica can go on ──> 1, with the reason

`keepstep drain` and `add` reach us through the store: a replica that has left is not restarted until it is asked back.

Exit codes of a rank (`protocol.errors`): 0 done; 78 do not restart, the configuration is wrong; 93 do not restart this replica;
75 it misses another rank, which may have the cause: wait a moment for that one to end too; anything else: restart, with a
pause when lives end without having trained anything, and an end to it when that repeats.

One asyncio loop in the main thread, so that PR_SET_PDEATHSIG of everything we start means what it should. It decides nothing
about training: the store is told which incarnations are dead and which are announced, and the quorum does the rest.
"""

import asyncio
import ctypes
import json
import logging
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVarTuple

from keepstep.launch.etcd_keeper import EtcdKeeper
from keepstep.launch.orphans import Guard, reap
from keepstep.launch.processes import Life, how_it_ended, start_cold
from keepstep.launch.restarts import GiveUp, History
from keepstep.launch.screen import Screen
from keepstep.launch.settings import LaunchSettings
from keepstep.launch.spares import Spares
from keepstep.launch.zygote import Zygote, ZygoteError
from keepstep.protocol.errors import EX_CONFIG, EX_NO_RESTART, EX_REPLICA_LOST, StoreError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.messages import Request
from keepstep.runtime.etcd import EtcdStore, JobRecord
from keepstep.runtime.event_log import EventLog
from keepstep.version import __version__

log = logging.getLogger("keepstep.launch")
Ts = TypeVarTuple("Ts")

PR_SET_CHILD_SUBREAPER = 36
TRAINED_TO_THE_END = b'"event": "final"', b'"event": "over"'
HAS_LEFT = b'"event": "left"'
TERM_GRACE_S = 5.0
CAUSE_S = 5.0  # for the rank that has the cause to end too, once the others miss it
TELL_S = 20.0


class Replica:
    """One replica over its lives."""

    def __init__(self, replica_id: int, history: History) -> None:
        self.id, self.history = replica_id, history
        self.life: Life | None = None
        self.outcome = ""  # "done", "left", or why it was given up
        self.leaving = False  # it was asked to leave, or the job to stop
        self.drained = False  # it itself was
        self.request_id = ""  # of the newest request about it

    @property
    def over(self) -> bool:
        return bool(self.outcome)


class Launcher:
    """One run. `run` returns the exit code and leaves nothing behind."""

    def __init__(self, settings: LaunchSettings, screen: Screen) -> None:
        self.settings, self._screen = settings, screen
        history = partial(History, settings.max_restarts, settings.restart_window_s)
        self.replicas = [Replica(i, history()) for i in range(settings.replicas)]
        self._events = EventLog(settings.run_dir / "events" / "launcher.jsonl", {})
        self._etcd: EtcdKeeper | None = None
        self._store: EtcdStore | None = None
        self._guard: Guard | None = None
        self._zygote: Zygote | None = None
        self._spares: Spares | None = None
        self._token_file = settings.run_dir / "token"
        self._env: dict[str, str] = {}
        self._tell: asyncio.Queue[Coroutine[Any, Any, None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._first_failure = ""  # which rank
        self._signal: signal.Signals | None = None  # what ended us
        self._finishing = False  # some replica is done
        self._stop_asked = False  # the whole job was asked to stop
        self._trained = False  # some replica has committed a step: from now on one replica's mistake is its own

    async def run(self) -> int:
        """Starts everything, waits for the end. Raises ConfigError or StoreError if it cannot start: nothing is left then."""
        loop = asyncio.get_running_loop()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        code, begun = 1, False
        shape = {"num_replicas": self.settings.replicas, "ranks_per_replica": self.settings.ranks}
        self._events.emit("start", {**shape, "pid": os.getpid()})
        try:
            self._guard = Guard()
            await self._start_store()
            self._zygote = Zygote(self._env)
            self._tasks.append(loop.create_task(self._tell_store()))
            begun = True
            self._spares = self._make_spares()
            for replica in self.replicas:
                self._start(replica)
            code = await self._ended
            return code
        finally:
            await self._clean_up()
            self._events.emit("end", {"code": code})
            self._events.close()
            if not begun:
                self.settings.take_back()

    def verdict(self, code: int) -> str:
        """What a run that ended with `code` came to."""
        if code == 0 and self._stop_asked and not any(replica.outcome == "done" for replica in self.replicas):
            return "the job was stopped, as it was asked to, and is not complete"
        if code == 0:
            return "the job is complete"
        if self._signal is not None:
            return f"the job was ended by {self._signal.name}"
        first = f", {self._first_failure} failed first" if self._first_failure else ""
        return f"the job has failed (exit code {code}){first}"

    # --- starting ---------------------------------------------------------------------------------------------

    async def _start_store(self) -> None:
        settings = self.settings
        token = settings.token or secrets.token_hex(16).encode()
        fd = os.open(self._token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(token)
        url = settings.store
        if url is None:
            self._etcd = EtcdKeeper(
                settings.run_dir,
                say=self._say,
                on_end=lambda code: self._events.emit("etcd", {"code": code}),
                give_up=lambda: self._end(1),
                guarded=self._guarded,
            )
            url = self._etcd.start()
        self._store = await EtcdStore.open(url, settings.job, lease_s=5.0)
        await self._store.claim_launcher(
            f"pid {os.getpid()} on {os.uname().nodename}, run directory {settings.run_dir}"
        )
        record = JobRecord(
            version=__version__,
            num_replicas=settings.replicas,
            ranks_per_replica=settings.ranks,
            data_fingerprint="",
            layout_digest="",
            token_check=EtcdStore.token_check(settings.job, token),
        )
        await self._store.claim_job(record)
        await self._store.forget_requests()
        await self._store.watch(lambda view: self._guarded(self._on_requests, view.requests), only="requests/")
        write_about(settings, url)
        self._env = settings.environment(os.environ, url, self._token_file)

    def _start(self, replica: Replica) -> None:
        if self._stopping or replica.over:
            return
        replica.history.lives += 1
        assert self._spares is not None
        taken = self._spares.take()
        try:
            life = Life(
                replica_id=replica.id,
                number=replica.history.lives,
                ranks=self.settings.ranks,
                args=self._command,
                start=taken.start,
                env=self._env,
                logs=self.settings.run_dir / "logs",
                show=self._screen.out,
                on_exit=lambda life, rank: self._guarded(self._on_exit, replica, life, rank),
            )
        except OSError as error:
            self._give_up(replica, f"its processes cannot be started: {error}")
            return
        finally:
            taken.close()
        replica.life = life
        guard, store = self._guard, self._store
        assert guard is not None
        assert store is not None
        guard.add(life.pids)
        self._tell.put_nowait(store.announce(ReplicaId(replica.id)))
        self._events.emit(
            "spawn",
            {"replica": replica.id, "incarnation": life.incarnation, "life": life.number, "pids": life.pids},
        )

    @property
    def _command(self) -> list[str]:
        return [str(self.settings.script.resolve()), *self.settings.args]

    def _make_spares(self) -> Spares:
        assert self._guard is not None
        return Spares(
            self.settings.spares,
            ranks=self.settings.ranks,
            args=self._command,
            env=self._env,
            start=self._start_process,
            logs=self.settings.run_dir / "logs",
            show=self._screen.out,
            say=self._say,
            emit=self._events.emit,
            guarded=self._guarded,
            started=self._guard.add,
            ended=self._guard.remove,
        )

    def _start_process(self, args: Sequence[str], env: Mapping[str, str], output: int, listener: int | None) -> int:
        """Warm if possible."""
        if self._zygote is not None:
            try:
                return self._zygote.start(args, env, output, listener)
            except ZygoteError as error:
                self._say(f"ranks are started cold from now on, the process that forks them is gone: {error}")
                self._zygote.close()
                self._zygote = None
        return start_cold(args, env, output, listener)

    # --- what operators want ----------------------------------------------------------------------------------

    def _on_requests(self, requests: Mapping[ReplicaId | None, Request]) -> None:
        """The leaders read them too: theirs is when to leave, ours whether anything is started again."""
        stop = requests.get(None)
        if stop is not None and stop.leave and not self._stop_asked:
            self._stop_asked = True
            self._say(
                f"every replica leaves at the next step boundary and the job ends, asked by {stop.by} (keepstep stop)"
            )
            self._events.emit("stop_asked", {"by": stop.by})
            for replica in self.replicas:
                self._let_go(replica)
        for replica in self.replicas:
            request = requests.get(ReplicaId(replica.id))
            if request is None or request.request_id == replica.request_id or self._stopping or self._stop_asked:
                continue
            replica.request_id = request.request_id
            self._events.emit("asked", {"replica": replica.id, "leave": request.leave, "by": request.by})
            if not request.leave:
                self._take_back(replica, request.by)
            elif not replica.over:
                self._say(
                    f"replica {replica.id} leaves at its next step boundary, asked by {request.by} (keepstep drain)"
                )
                replica.drained = True
                self._let_go(replica)

    def _let_go(self, replica: Replica) -> None:
        """It leaves by itself, and is not started again."""
        if replica.over:
            return
        replica.leaving = True
        assert self._store is not None
        self._tell.put_nowait(self._store.unannounce(ReplicaId(replica.id)))
        if replica.life is None or not replica.life.running:
            self._has_left(replica, "was not running: it is not started again")

    def _take_back(self, replica: Replica, by: str) -> None:
        """Asked back: it stays if it has not left yet, and else gets another life, also if it had been given up."""
        running = replica.life is not None and bool(replica.life.running)
        if replica.outcome == "done" or (replica.over and running) or not (replica.over or replica.leaving):
            return
        self._say(f"replica {replica.id} {'stays' if running else 'is started again'}, asked by {by} (keepstep add)")
        replica.leaving = replica.drained = False
        if running:
            assert self._store is not None
            self._tell.put_nowait(self._store.announce(ReplicaId(replica.id)))
        else:
            replica.outcome = ""
            replica.history.forgive()
            self._start(replica)

    def _has_left(self, replica: Replica, words: str) -> None:
        replica.outcome = "left"
        self._events.emit("replica_left", {"replica": replica.id, "reason": words})
        self._say(f"replica {replica.id} {words}")
        self._check_end()

    # --- exits ------------------------------------------------------------------------------------------------

    def _on_exit(self, replica: Replica, life: Life, rank: int) -> None:
        code = life.processes[rank].code
        self._events.emit(
            "exit",
            {
                "replica": replica.id,
                "rank": rank,
                "incarnation": life.incarnation,
                "code": code,
                "life": life.number,
                "stopping": self._stopping,
            },
        )
        if self._stopping or life is not replica.life:
            return
        if not replica.over:
            self._note_exit(replica, life, rank)
        if life.running:
            return
        life.bury()
        assert self._guard is not None
        self._guard.remove(life.pids)
        self._reap()
        if not replica.over:
            self._after_life(replica, life)

    def _note_exit(self, replica: Replica, life: Life, rank: int) -> None:
        """What this exit means for the rest of the life."""
        code, loop = life.processes[rank].code, asyncio.get_running_loop()
        if code == EX_REPLICA_LOST and life.failed is None and life.bereft is None:
            life.bereft = rank
            self._mark_dead(life)
            loop.call_later(CAUSE_S, self._guarded, self._cause_is_silent, replica, life)
        elif code not in (0, EX_REPLICA_LOST) and life.failed is None:
            self._fail(replica, life, rank)
        elif code == 0 and life.running:
            loop.call_later(self.settings.finish_grace_s, self._guarded, self._end_stragglers, replica, life)
        if not life.running and life.bereft is not None and life.failed is None:
            self._fail(replica, life, life.bereft)

    def _fail(self, replica: Replica, life: Life, rank: int) -> None:
        """The life has failed, and `rank` has the cause."""
        life.note_failure(rank)
        self._first_failure = self._first_failure or f"replica {replica.id} rank {rank}"
        rest = "; the rest of the replica is ended" if self.settings.ranks > 1 else ""
        self._say(
            f"replica {replica.id} rank {rank} {how_it_ended(life.processes[rank].code)}{rest}; the other replicas go on"
        )
        life.kill()
        if life.bereft is None:
            self._mark_dead(life)

    def _mark_dead(self, life: Life) -> None:
        assert self._store is not None
        self._tell.put_nowait(self._store.mark_dead([life.incarnation]))

    def _cause_is_silent(self, replica: Replica, life: Life) -> None:
        """The rank that the others miss has not ended: it is frozen, or cut off from them."""
        if replica.life is life and life.running and life.failed is None and not self._stopping:
            assert life.bereft is not None
            self._fail(replica, life, life.bereft)

    def _end_stragglers(self, replica: Replica, life: Life) -> None:
        if replica.life is life and life.running and not self._stopping:
            grace = f"{self.settings.finish_grace_s:g} s"
            self._say(
                f"replica {replica.id}: one rank ended {grace} ago (--finish-grace), others have not: ending them"
            )
            life.kill()

    def _after_life(self, replica: Replica, life: Life) -> None:
        """Every rank has ended: done, again, or never again."""
        code = 0 if life.failed is None else life.processes[life.failed].code
        if code == 0 and self._has(life, *TRAINED_TO_THE_END):
            replica.outcome = "done"
            self._events.emit("replica_done", {"replica": replica.id})
            self._finish()
            self._check_end()
        elif replica.leaving:
            left = code == 0 and self._has(life, HAS_LEFT)
            if left and not replica.drained:  # the job has stopped; before, others may still be saving its state
                self._finish()
            self._has_left(
                replica, "has left the job" if left else f"was to leave, and has failed before: {life.cause}"
            )
        elif code == 0 and self._has(life, HAS_LEFT):
            self._start(replica)  # it was asked back when it had left already
        elif code == 0:
            script = self.settings.script.name
            trained = self._has(life, b'"event": "commit"')
            self._config_error(
                replica,
                f"{script} ended with exit code 0 before the job did: let it train until keepstep.Training is through"
                if trained
                else f"{script} ended without training: does it use keepstep.join()?",
            )
        elif code == EX_CONFIG:
            self._config_error(replica, life.cause.removeprefix("keepstep: "))
        elif code == EX_NO_RESTART:
            own = life.cause.startswith("keepstep: ")
            asked = f"exit code {EX_NO_RESTART} asks for no restart"
            self._give_up(replica, life.cause.removeprefix("keepstep: ") if own else asked)
        else:
            self._restart(replica, life)

    def _finish(self) -> None:
        """One is through: the rest has a while for it."""
        if not self._finishing:
            self._finishing = True
            asyncio.get_running_loop().call_later(self.settings.finish_grace_s, self._guarded, self._end_late)

    def _end_late(self) -> None:
        """A replica that is not through with training by now is frozen, or too late to matter: it must not hold the job up.

        One that is through may still be busy with what its script does after training: that is not ours to end.
        """
        for replica in self.replicas:
            life = replica.life
            if self._stopping or replica.over or (life is not None and self._has(life, *TRAINED_TO_THE_END)):
                continue
            grace = f"{self.settings.finish_grace_s:g} s"
            self._give_up(replica, f"another replica finished {grace} ago (--finish-grace), and this one has not")
            if life is not None:
                life.kill()

    def _restart(self, replica: Replica, life: Life) -> None:
        trained = self._has(life, b'"event": "commit"')
        self._trained = self._trained or trained
        answer = replica.history.after(
            life.cause,
            killed=life.killed,
            trained=trained,
            job_has_trained=self._trained,
            now=asyncio.get_running_loop().time(),
        )
        if isinstance(answer, GiveUp):
            self._give_up(replica, answer.reason)
        else:
            self._events.emit("restart", {"replica": replica.id, "pause_s": answer.pause_s})
            asyncio.get_running_loop().call_later(answer.pause_s, self._guarded, self._start, replica)

    def _config_error(self, replica: Replica, sentence: str) -> None:
        self._trained = self._trained or any(r.life and self._has(r.life, b'"event": "commit"') for r in self.replicas)
        others = [r for r in self.replicas if r is not replica]
        if self._trained and any(not r.over or r.outcome == "done" for r in others):
            self._give_up(replica, sentence)
        else:
            self._events.emit("gave_up", {"replica": replica.id, "reason": sentence})
            self._say(f"replica {replica.id}: {sentence}")
            self._end(EX_CONFIG)

    def _give_up(self, replica: Replica, reason: str) -> None:
        reason = replica.history.give_up(reason).reason
        replica.outcome = reason
        self._events.emit("gave_up", {"replica": replica.id, "reason": reason})
        self._say(f"replica {replica.id} is given up: {reason}")
        assert self._store is not None
        self._tell.put_nowait(self._store.unannounce(ReplicaId(replica.id)))
        self._check_end()

    def _check_end(self) -> None:
        if all(replica.over for replica in self.replicas):
            well = self._stop_asked or any(replica.outcome == "done" for replica in self.replicas)
            self._end(0 if well else 1)

    def _has(self, life: Life, *marks: bytes) -> bool:
        """Whether the leader of this life has written one of these events."""
        path = self.settings.run_dir / "events" / f"replica{life.replica_id}-rank0-{life.incarnation}.jsonl"
        try:
            text = path.read_bytes()
        except OSError:
            return False
        return any(mark in text for mark in marks)

    # --- the store --------------------------------------------------------------------------------------------

    async def _tell_store(self) -> None:
        """In order, and without holding up anything else. Leases cover for what is lost."""
        while True:
            work = await self._tell.get()
            try:
                await asyncio.wait_for(work, TELL_S)
            except (StoreError, TimeoutError) as error:
                self._say(f"the store could not be told: {error}")

    # --- ending -----------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[*Ts], None], *args: *Ts) -> None:
        """Runs a callback of the loop. An error of ours ends the job; asyncio would only log it, and the job would hang."""
        try:
            work(*args)
        except Exception as error:  # top of the callbacks
            log.exception("the launcher has failed")
            self._say(f"the launcher itself has failed, which is a bug, and ends the job: {error!r}")
            self._end(1)

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def _on_signal(self, number: int) -> None:
        if self._stopping:
            self._kill_all(signal.SIGKILL)
            return
        self._stopping, self._signal = True, signal.Signals(number)
        self._say(f"{self._signal.name}: ending every rank")
        self._kill_all(signal.SIGTERM)
        self._end(128 + number)

    def _kill_all(self, how: signal.Signals) -> None:
        for replica in self.replicas:
            if replica.life is not None:
                replica.life.kill(how)

    async def _clean_up(self) -> None:
        """Whatever happened: nothing of ours runs on."""
        polite, self._stopping = self._stopping, True
        spares = self._spares
        if spares is not None:
            spares.close()
            await self._until(lambda: not spares.running, TERM_GRACE_S)
        lives = [r.life for r in self.replicas if r.life is not None]
        if polite:
            await self._until(lambda: not any(life.running for life in lives), TERM_GRACE_S)
        self._kill_all(signal.SIGKILL)
        await self._until(lambda: not any(life.running for life in lives), TERM_GRACE_S)
        for life in lives:
            for process in life.processes:
                process.output.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._tell.empty():
            self._tell.get_nowait().close()
        if self._store is not None:
            await self._store.close()
        if self._etcd is not None:
            self._etcd.stop()
            self._etcd = None
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        self._reap()
        if self._guard is not None:
            self._guard.remove(pid for life in lives for pid in life.pids)
            self._guard.close()
        self._token_file.unlink(missing_ok=True)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110  (the kernel ends processes)
            await asyncio.sleep(0.01)

    def _reap(self) -> None:
        """Ends what has been orphaned onto us, but for that of lives that go on; at the end, all of it."""
        lives = [r.life for r in self.replicas if r.life is not None]
        known = {pid for life in lives for pid in life.pids}
        known |= set() if self._spares is None else {*self._spares.pids}
        known |= {p.pid for p in (self._guard, self._etcd, self._zygote) if p is not None}
        going_on = [] if self._stopping else [life for life in lives if life.running]
        reap(known, {life.incarnation for life in going_on}, {pid for life in going_on for pid in life.pids})

    def _say(self, words: str) -> None:
        self._screen.error(f"keepstep: {words}\n")


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
