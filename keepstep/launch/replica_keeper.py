"""Keeps replicas on this machine: starts them, sees their ranks end, and starts them again, or not (FT-HSDP section 5.4).

    start ──> running ──a rank exits──> the rest of that replica is killed, the store is told, a new life starts
                 │
                 └── an outcome: done, left, or given up with the reason. `Owner` makes of it what it means for the job

Exit codes of a rank (`protocol.errors`): 0 done; 78 do not restart, the configuration is wrong; 93 do not restart this replica;
75 it misses another rank, which may have the cause: wait a moment for that one to end too; anything else: restart, with a
pause when lives end without having trained anything, and an end to it when that repeats.

It decides nothing about training: the store is told which incarnations are dead and which are announced, and the quorum does
the rest. One asyncio loop (`launch.shell`). Fails: a replica whose processes cannot be started is given up.
"""

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from keepstep.launch.orphans import Guard, reap
from keepstep.launch.processes import Life, how_it_ended, start_cold
from keepstep.launch.restarts import GiveUp, History
from keepstep.launch.settings import LaunchSettings
from keepstep.launch.shell import Shell
from keepstep.launch.spares import Spares
from keepstep.launch.zygote import Zygote, ZygoteError
from keepstep.protocol.errors import EX_CONFIG, EX_NO_RESTART, EX_REPLICA_LOST
from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.roster import Failure
from keepstep.runtime.etcd import EtcdStore

TRAINED_TO_THE_END = b'"event": "final"', b'"event": "over"'
HAS_TRAINED = b'"event": "commit"'
HAS_LEFT = b'"event": "left"'
TERM_GRACE_S = 5.0
CAUSE_S = 5.0  # for the rank that has the cause to end too, once the others miss it


class Replica:
    """One replica over its lives here."""

    def __init__(self, replica_id: int, history: History) -> None:
        self.id, self.history = replica_id, history
        self.life: Life | None = None
        self.claimed: Incarnation | None = None  # of the life that is to start
        self.outcome = ""  # "done", "left", or why it was given up
        self.leaving = False  # it was asked to leave, or the job to stop
        self.drained = False  # it itself was
        self.request_id = ""  # of the newest request about it

    @property
    def over(self) -> bool:
        return bool(self.outcome)

    @property
    def running(self) -> bool:
        return self.life is not None and bool(self.life.running)


class Owner(Protocol):
    """Whose replicas they are: the launcher of a machine, or the agent of a host."""

    def claim(self, replica: Replica, incarnation: Incarnation, start: Callable[[], None]) -> None:
        """Calls `start` when this life of the replica may begin."""
        ...

    def on_outcome(self, replica: Replica) -> None:
        """It does not go on here."""
        ...

    def on_mistake(self, replica: Replica, sentence: str) -> None:
        """What a restart would only repeat: the user's configuration cannot work."""
        ...


class ReplicaKeeper:
    """`begin`, then `start` replicas; `clean_up` leaves nothing running."""

    def __init__(self, settings: LaunchSettings, shell: Shell, owner: Owner) -> None:
        self.settings, self.shell, self._owner = settings, shell, owner
        self.replicas: dict[int, Replica] = {}
        self.first_failure = ""  # which rank
        self.trained = False  # some replica has committed a step: from now on one replica's mistake is its own
        self.others: Callable[[], Iterable[int]] = tuple  # pids of further children
        self._lost: list[Life] = []  # of replicas that are not ours any more, and are still ending
        self._store: EtcdStore | None = None
        self._guard: Guard | None = None
        self._zygote: Zygote | None = None
        self._spares: Spares | None = None
        self._env: Mapping[str, str] = {}
        self._finishing = False  # some replica is done

    def begin(self, store: EtcdStore, env: Mapping[str, str]) -> None:
        """`env` is what every rank is told."""
        self._store, self._env = store, env
        self._guard = Guard()
        self._zygote = Zygote(env)
        self._spares = Spares(
            self.settings.spares,
            ranks=self.settings.ranks,
            args=self._command,
            env=env,
            start=self._start_process,
            logs=self.settings.run_dir / "logs",
            show=self.shell.screen.out,
            say=self.shell.say,
            emit=self.shell.events.emit,
            guarded=self.shell.guarded,
            started=self._guard.add,
            ended=self._guard.remove,
        )

    async def warm_up(self) -> None:
        """Waits until lives begin at once, without holding up the loop. What goes wrong shows when the first one is started."""
        if self._zygote is not None:
            with contextlib.suppress(ZygoteError):
                await asyncio.to_thread(self._zygote.warm_up)

    def make_spares(self) -> None:
        """In a while, also if no replica is kept here yet."""
        assert self._spares is not None
        self._spares.settle()

    @property
    def store(self) -> EtcdStore:
        assert self._store is not None
        return self._store

    def take(self, replica_id: int, *, lives: int = 0, failures: Sequence[Failure] = ()) -> Replica:
        """This replica is kept here from now on. How many `lives` it has had elsewhere, and how they ended."""
        history = History(self.settings.max_restarts, self.settings.restart_window_s, lives=lives)
        history.recall(failures, now=asyncio.get_running_loop().time(), wall_s=time.time())
        self.replicas[replica_id] = Replica(replica_id, history)
        return self.replicas[replica_id]

    def resume(self, replica: Replica) -> None:
        """Its first life here, unless too many have failed elsewhere."""
        answer = replica.history.judge(job_has_trained=True)
        if isinstance(answer, GiveUp):
            self.give_up(replica, answer.reason)
        else:
            self.start(replica)

    def lose(self, replica: Replica, why: str) -> None:
        """It is not ours any more: its life ends, and nobody here starts another."""
        del self.replicas[replica.id]
        life = replica.life
        if life is not None and life.running:
            self.shell.say(f"replica {replica.id} is ended here: {why}")
            self._lost.append(life)
            life.kill()
        self.shell.events.emit("lost", {"replica": replica.id, "reason": why})
        self.shell.tell(self.store.unannounce(ReplicaId(replica.id)))

    def start(self, replica: Replica) -> None:
        """Its next life."""
        if self.shell.stopping or replica.over:
            return
        replica.history.lives += 1
        replica.claimed = incarnation = Incarnation(secrets.token_hex(8))
        self._owner.claim(replica, incarnation, lambda: self._begin_life(replica, incarnation))

    def _begin_life(self, replica: Replica, incarnation: Incarnation) -> None:
        ours = self.replicas.get(replica.id) is replica and replica.claimed == incarnation
        if self.shell.stopping or replica.over or not ours:
            return
        assert self._guard is not None
        assert self._spares is not None
        taken = self._spares.take()
        try:
            life = Life(
                replica_id=replica.id,
                incarnation=incarnation,
                number=replica.history.lives,
                ranks=self.settings.ranks,
                args=self._command,
                start=taken.start,
                env=self._env,
                logs=self.settings.run_dir / "logs",
                show=self.shell.screen.out,
                on_exit=lambda life, rank: self.shell.guarded(self._on_exit, replica, life, rank),
            )
        except OSError as error:
            self.give_up(replica, f"its processes cannot be started: {error}")
            return
        finally:
            taken.close()
        replica.life = life
        self._guard.add(life.pids)
        self.shell.tell(self.store.announce(ReplicaId(replica.id)))
        self.shell.events.emit(
            "spawn",
            {"replica": replica.id, "incarnation": life.incarnation, "life": life.number, "pids": life.pids},
        )

    @property
    def _command(self) -> list[str]:
        return [str(self.settings.script.resolve()), *self.settings.args]

    def _start_process(self, args: Sequence[str], env: Mapping[str, str], output: int, listener: int | None) -> int:
        """Warm if possible."""
        if self._zygote is not None:
            try:
                return self._zygote.start(args, env, output, listener)
            except ZygoteError as error:
                self.shell.say(f"ranks are started cold from now on, the process that forks them is gone: {error}")
                self._zygote.close()
                self._zygote = None
        return start_cold(args, env, output, listener)

    # --- exits ------------------------------------------------------------------------------------------------

    def _on_exit(self, replica: Replica, life: Life, rank: int) -> None:
        code = life.processes[rank].code
        self.shell.events.emit(
            "exit",
            {
                "replica": replica.id,
                "rank": rank,
                "incarnation": life.incarnation,
                "code": code,
                "life": life.number,
                "stopping": self.shell.stopping,
            },
        )
        if self.shell.stopping or life is not replica.life:
            return
        if not replica.over and life not in self._lost:
            self._note_exit(replica, life, rank)
        if life.running:
            return
        life.bury()
        assert self._guard is not None
        self._guard.remove(life.pids)
        self._reap()
        if life in self._lost:
            self._lost.remove(life)
        elif not replica.over:
            self._after_life(replica, life)

    def _note_exit(self, replica: Replica, life: Life, rank: int) -> None:
        """What this exit means for the rest of the life."""
        code = life.processes[rank].code
        if code == EX_REPLICA_LOST and life.failed is None and life.bereft is None:
            life.bereft = rank
            self._mark_dead(life)
            self.shell.later(CAUSE_S, self._cause_is_silent, replica, life)
        elif code not in (0, EX_REPLICA_LOST) and life.failed is None:
            self._fail(replica, life, rank)
        elif code == 0 and life.running:
            self.shell.later(self.settings.finish_grace_s, self._end_stragglers, replica, life)
        if not life.running and life.bereft is not None and life.failed is None:
            self._fail(replica, life, life.bereft)

    def _fail(self, replica: Replica, life: Life, rank: int) -> None:
        """The life has failed, and `rank` has the cause."""
        life.note_failure(rank)
        self.first_failure = self.first_failure or f"replica {replica.id} rank {rank}"
        rest = "; the rest of the replica is ended" if self.settings.ranks > 1 else ""
        self.shell.say(
            f"replica {replica.id} rank {rank} {how_it_ended(life.processes[rank].code)}{rest}; the other replicas go on"
        )
        life.kill()
        if life.bereft is None:
            self._mark_dead(life)

    def _mark_dead(self, life: Life) -> None:
        self.shell.tell(self.store.mark_dead([life.incarnation]))

    def _cause_is_silent(self, replica: Replica, life: Life) -> None:
        """The rank that the others miss has not ended: it is frozen, or cut off from them."""
        if replica.life is life and life.running and life.failed is None and not self.shell.stopping:
            assert life.bereft is not None
            self._fail(replica, life, life.bereft)

    def _end_stragglers(self, replica: Replica, life: Life) -> None:
        if replica.life is life and life.running and not self.shell.stopping:
            grace = f"{self.settings.finish_grace_s:g} s"
            self.shell.say(
                f"replica {replica.id}: one rank ended {grace} ago (--finish-grace), others have not: ending them"
            )
            life.kill()

    def _after_life(self, replica: Replica, life: Life) -> None:
        """Every rank has ended: done, again, or never again."""
        code = 0 if life.failed is None else life.processes[life.failed].code
        if code == 0 and self.has(life, *TRAINED_TO_THE_END):
            replica.outcome = "done"
            self.shell.events.emit("replica_done", {"replica": replica.id})
            self.finish()
            self._owner.on_outcome(replica)
        elif replica.leaving:
            left = code == 0 and self.has(life, HAS_LEFT)
            if left and not replica.drained:  # the job has stopped; before, others may still be saving its state
                self.finish()
            self.left(replica, "has left the job" if left else f"was to leave, and has failed before: {life.cause}")
        elif code == 0 and self.has(life, HAS_LEFT):
            self.start(replica)  # it was asked back when it had left already
        elif code == 0:
            script = self.settings.script.name
            self._owner.on_mistake(
                replica,
                f"{script} ended with exit code 0 before the job did: let it train until keepstep.Training is through"
                if self.has(life, HAS_TRAINED)
                else f"{script} ended without training: does it use keepstep.join()?",
            )
        elif code == EX_CONFIG:
            self._owner.on_mistake(replica, life.cause.removeprefix("keepstep: "))
        elif code == EX_NO_RESTART:
            own = life.cause.startswith("keepstep: ")
            asked = f"exit code {EX_NO_RESTART} asks for no restart"
            self.give_up(replica, life.cause.removeprefix("keepstep: ") if own else asked)
        else:
            self._restart(replica, life)

    def _restart(self, replica: Replica, life: Life) -> None:
        trained = self.has(life, HAS_TRAINED)
        self.trained = self.trained or trained
        answer = replica.history.after(
            life.cause,
            killed=life.killed,
            trained=trained,
            job_has_trained=self.trained,
            now=asyncio.get_running_loop().time(),
        )
        if isinstance(answer, GiveUp):
            self.give_up(replica, answer.reason)
        else:
            self.shell.events.emit("restart", {"replica": replica.id, "pause_s": answer.pause_s})
            self.shell.later(answer.pause_s, self._start_again, replica, life)

    def _start_again(self, replica: Replica, life: Life) -> None:
        if replica.life is life:  # nobody asked for it meanwhile
            self.start(replica)

    # --- outcomes ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """One replica is through: the rest has a while for it."""
        if not self._finishing:
            self._finishing = True
            self.shell.later(self.settings.finish_grace_s, self._end_late)

    def _end_late(self) -> None:
        """A replica that is not through with training by now is frozen, or too late to matter: it must not hold the job up.

        One that is through may still be busy with what its script does after training: that is not ours to end.
        """
        for replica in [*self.replicas.values()]:
            life = replica.life
            if self.shell.stopping or replica.over or (life is not None and self.has(life, *TRAINED_TO_THE_END)):
                continue
            grace = f"{self.settings.finish_grace_s:g} s"
            self.give_up(replica, f"another replica finished {grace} ago (--finish-grace), and this one has not")
            if life is not None:
                life.kill()

    def left(self, replica: Replica, words: str) -> None:
        replica.outcome = "left"
        self.shell.events.emit("replica_left", {"replica": replica.id, "reason": words})
        self.shell.say(f"replica {replica.id} {words}")
        self._owner.on_outcome(replica)

    def give_up(self, replica: Replica, reason: str) -> None:
        reason = replica.history.give_up(reason).reason
        replica.outcome = reason
        self.shell.events.emit("gave_up", {"replica": replica.id, "reason": reason})
        self.shell.say(f"replica {replica.id} is given up: {reason}")
        self.shell.tell(self.store.unannounce(ReplicaId(replica.id)))
        self._owner.on_outcome(replica)

    def has(self, life: Life, *marks: bytes) -> bool:
        """Whether the leader of this life has written one of these events."""
        path = self.settings.run_dir / "events" / f"replica{life.replica_id}-rank0-{life.incarnation}.jsonl"
        try:
            text = path.read_bytes()
        except OSError:
            return False
        return any(mark in text for mark in marks)

    # --- ending -----------------------------------------------------------------------------------------------

    @property
    def _lives(self) -> list[Life]:
        return [*(r.life for r in self.replicas.values() if r.life is not None), *self._lost]

    def kill_all(self, how: signal.Signals) -> None:
        for life in self._lives:
            life.kill(how)

    async def end_lives(self, *, polite: bool) -> None:
        """Every rank ends: with `polite`, it may take a moment for it."""
        lives, spares = self._lives, self._spares
        if spares is not None:
            spares.close()
            await self.shell.until(lambda: not spares.running, TERM_GRACE_S)
        if polite:
            await self.shell.until(lambda: not any(life.running for life in lives), TERM_GRACE_S)
        self.kill_all(signal.SIGKILL)
        await self.shell.until(lambda: not any(life.running for life in lives), TERM_GRACE_S)
        for life in lives:
            for process in life.processes:
                process.output.close()

    def clean_up(self) -> None:
        """After `end_lives`: nothing of ours runs on."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        self._reap()
        if self._guard is not None:
            self._guard.remove(pid for life in self._lives for pid in life.pids)
            self._guard.close()

    def _reap(self) -> None:
        """Ends what has been orphaned onto us, but for that of lives that go on; at the end, all of it."""
        lives = self._lives
        known = {pid for life in lives for pid in life.pids} | {*self.others()}
        known |= set() if self._spares is None else {*self._spares.pids}
        known |= {p.pid for p in (self._guard, self._zygote) if p is not None}
        going_on = [] if self.shell.stopping else [life for life in lives if life.running]
        reap(known, {life.incarnation for life in going_on}, {pid for life in going_on for pid in life.pids})
