"""Keeps replicas on one of several hosts: `keepstep agent`, the same command on every host (FT-HSDP section 5.4).

    enter the pool ──> seated: keep those replicas ──the job is over──> the same exit code on every host
                         │     └── a replica's place is elsewhere now: end it here
                         └── no seat: a spare host, which waits

Every agent computes who should sit where (`protocol.roster`) and tries to publish it: none of them is needed for that. A life is
claimed in the store before it is started, so that an agent which was cut off starts nothing that is somebody else's by now.

What an agent has started dies with it, as with `keepstep run`: its replicas begin again when it is back, and on other hosts if it
is not. While the store is away everything goes on, and nothing is moved. One asyncio loop (`launch.shell`).
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.launch.agent_settings import AgentSettings
from keepstep.launch.launcher import job_record, write_about, write_token
from keepstep.launch.replica_keeper import Replica, ReplicaKeeper
from keepstep.launch.requests import Requests
from keepstep.launch.screen import Screen
from keepstep.launch.shell import Shell
from keepstep.protocol.errors import ConfigError, StoreError
from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.roster import (
    Became,
    Claim,
    Outcome,
    Seating,
    TrySeats,
    code_of_end,
    differences,
    failures_before,
    runs,
)
from keepstep.runtime.etcd_roster import RosterStore
from keepstep.runtime.etcd_view import StoreView
from keepstep.runtime.event_log import EventLog

LEASE_S = 5.0
ENTER_S = 4 * LEASE_S  # the agent before us on this host may have died just now
RETRY_S = 0.5


class Agent:
    """One life of it. `run` returns the exit code and leaves nothing behind."""

    def __init__(self, settings: AgentSettings, screen: Screen) -> None:
        self.settings = settings
        launch = settings.launch
        self._shell = Shell(screen, EventLog(launch.run_dir / "events" / "launcher.jsonl", {}))
        self._keeper = ReplicaKeeper(launch, self._shell, self)
        self._requests = Requests(self._keeper)
        self._seating = Seating()
        self._numbers: dict[int, int] = {}  # of the places of the replicas that are kept here
        self._mistakes: set[int] = set()  # replicas that a restart would not help
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(
            asyncio.Lock
        )  # what is written of a replica goes in order
        self._store: RosterStore | None = None
        self._view: StoreView | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = ""
        self._token_file = launch.run_dir / "token"

    async def run(self) -> int:
        """Raises ConfigError or StoreError if it cannot start: nothing is left then."""
        shell, launch = self._shell, self.settings.launch
        code, begun = 1, False
        shape = {"num_replicas": launch.replicas, "ranks_per_replica": launch.ranks}
        shell.events.emit("start", {**shape, "pid": os.getpid(), "host": self.settings.host.name, "boot": _boot()})
        shell.begin(self._keeper.kill_all)
        entering = asyncio.get_running_loop().create_task(self._enter())
        try:
            both: tuple[asyncio.Future[Any], ...] = (entering, shell.ended)
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if entering.done():
                entering.result()
                begun = True
            code = await shell.ended
            return code
        finally:
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
            await self._clean_up()
            shell.events.emit("end", {"code": code})
            shell.events.close()
            if not begun:
                launch.take_back()

    def verdict(self, code: int) -> str:
        """What the job came to, as far as it is known here."""
        outcomes = {} if self._view is None else self._view.roster.outcomes
        if self._shell.signal is not None:
            return f"the agent was ended by {self._shell.signal.name}; the job goes on elsewhere, if there is room"
        if code == 0 and all(o.became is not Became.DONE for o in outcomes.values()):
            return "the job was stopped, as it was asked to, and is not complete"
        if code == 0:
            return "the job is complete"
        why = "; ".join(f"replica {r} on {o.host}: {o.reason}" for r, o in sorted(outcomes.items()) if o.reason)
        return f"the job has failed (exit code {code}): {why}"

    # --- entering ---------------------------------------------------------------------------------------------

    async def _enter(self) -> None:
        settings, launch = self.settings, self.settings.launch
        assert launch.store is not None
        assert launch.token is not None
        write_token(self._token_file, launch.token)
        self._store = await RosterStore.open(launch.store, launch.job, lease_s=LEASE_S)
        differ = differences(await self._store.offer_plan(settings.plan), settings.plan)
        if differ:
            raise ConfigError(
                f"the agents of job {launch.job} run something else, {differ}: start all with the same command, or choose "
                f"another --job; to begin this one anew, delete the keys under keepstep/{launch.job}/"
            )
        await self._store.claim_job(job_record(launch, launch.token))
        self._keeper.begin(self._store, settings.environment(launch.store, self._token_file))
        await self._keeper.warm_up()  # a start that waits for it would hold up the loop for longer than a lease lasts
        await self._enter_pool(self._store)
        write_about(launch, launch.store)
        self._keeper.make_spares()  # a host without a replica has one ready for those that come here
        await self._store.watch_roster(lambda view: self._shell.guarded(self._on_view, view))

    async def _enter_pool(self, store: RosterStore) -> None:
        host, loop = self.settings.host, asyncio.get_running_loop()
        deadline, said = loop.time() + ENTER_S, False
        while (held := await store.enter(host)) is not None:
            if loop.time() > deadline:
                raise ConfigError(
                    f"another agent of job {store.job} is called {host.name} ({held}): end that one, or name this host "
                    "differently with --host"
                )
            if not said:
                self._shell.say(
                    f"an agent of this host was there just now: waiting until its lease of {LEASE_S:g} s has ended"
                )
                said = True
            await asyncio.sleep(RETRY_S)

    # --- seats ------------------------------------------------------------------------------------------------

    def _on_view(self, view: StoreView) -> None:
        if not view.connected:
            self._seating.lost_sight()  # and nothing is moved: what we know may be over
            return
        if view.roster.plan != self.settings.plan:
            self._shell.say(
                f"the store has lost what job {self.settings.launch.job} runs, or holds something else, so this agent ends: "
                "start all agents again; with --checkpoint-dir, the job goes on from its newest checkpoint"
            )
            self._shell.end(1)
            return
        self._view = view
        self._seat(self._seating.on_view(view.roster, view.requests, now=time.monotonic_ns()))
        self._keep(view)
        self._requests.on_change(view.requests)
        self._drain(view)
        if any(outcome.became is Became.DONE for outcome in view.roster.outcomes.values()):
            self._keeper.finish()
        self._check_end(view)

    def _on_time(self) -> None:
        self._seat(self._seating.on_time(now=time.monotonic_ns()))
        if self._view is not None:
            self._check_end(self._view)

    def _seat(self, answer: TrySeats | None) -> None:
        """Publishes what is wrong with the seats, and looks again when time alone may change that."""
        if answer is not None and not self._shell.stopping:
            self._shell.start(self._publish(answer))
        if self._seating.waiting and self._seating.waiting != self._waiting:
            self._shell.say(f"waiting: {self._seating.waiting}")
        self._waiting = self._seating.waiting
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic_ns()
        due = self._seating.next_deadline(now=now)
        self._timer = None if due is None else self._shell.later((due - now) / 1e9 + 1e-3, self._on_time)

    async def _publish(self, answer: TrySeats) -> None:
        assert self._store is not None
        try:
            won = await self._store.publish_seats(answer.seats, answer.revision)
        except StoreError as error:
            self._shell.say(f"seats could not be published: {error}")
            await asyncio.sleep(RETRY_S)
            self._on_time()
        else:
            if won:  # else somebody else was first, and we shall see it
                self._shell.events.emit("seats", {"reason": answer.seats.reason})
                self._shell.say(answer.seats.reason)

    def _keep(self, view: StoreView) -> None:
        """Ends what is not ours any more, and starts what is now."""
        host, keeper = self.settings.host, self._keeper
        mine = {r: at for r, at in view.roster.places.items() if (at.host, at.agent) == (host.name, host.agent)}
        for replica in [*keeper.replicas.values()]:
            at = mine.get(ReplicaId(replica.id))
            if at is None or at.number != self._numbers[replica.id]:
                now = view.roster.places.get(ReplicaId(replica.id))
                keeper.lose(replica, "it has no place" if now is None else f"its place is on {now.host}")
        for r, at in mine.items():
            if r in keeper.replicas or not runs(r, view.roster, view.requests):
                continue
            claim = view.roster.claims.get(r)
            self._numbers[r] = at.number
            failures = failures_before(r, view.roster, wall_s=time.time())
            replica = keeper.take(r, lives=0 if claim is None else claim.life, failures=failures)
            if self._requests.stop_asked:
                self._requests.let_go(replica)
            else:
                keeper.resume(replica)

    def _drain(self, view: StoreView) -> None:
        """The leaders of a drained host leave by themselves: nothing is started again here."""
        request = view.roster.drained.get(self.settings.host.name)
        for replica in [*self._keeper.replicas.values()]:
            if request is not None and not replica.leaving and not replica.over:
                self._shell.say(f"replica {replica.id} leaves this host, as {request.by} asked (keepstep drain)")
                replica.drained = True
                self._requests.let_go(replica)
            elif request is None and replica.drained and not replica.over and not self._asked_to_leave(replica, view):
                replica.drained = replica.leaving = False
                self._shell.tell(self._keeper.store.announce(ReplicaId(replica.id)))

    @staticmethod
    def _asked_to_leave(replica: Replica, view: StoreView) -> bool:
        """It itself, or the whole job; not only its host."""
        asked = (view.requests.get(ReplicaId(replica.id)), view.requests.get(None))
        return any(request is not None and request.leave for request in asked)

    # --- what becomes of replicas -----------------------------------------------------------------------------

    def claim(self, replica: Replica, incarnation: Incarnation, start: Callable[[], None]) -> None:
        """Calls `start` once the store says that this life is the replica's newest."""
        claim = Claim(
            incarnation=incarnation,
            number=self._numbers[replica.id],
            life=replica.history.lives,
            host=self.settings.host.name,
            failures=replica.history.told(now=asyncio.get_running_loop().time(), wall_s=time.time()),
        )
        self._shell.start(self._claim(replica, claim, start))

    async def _claim(self, replica: Replica, claim: Claim, start: Callable[[], None]) -> None:
        async with self._turns[
            replica.id
        ]:  # a claim forgets the outcome: one that comes after it must be written after it
            await self._claim_now(replica, claim, start)

    async def _claim_now(self, replica: Replica, claim: Claim, start: Callable[[], None]) -> None:
        assert self._store is not None
        said = False
        while self._is_wanted(replica, claim):
            try:
                granted = await self._store.claim(ReplicaId(replica.id), claim)
            except StoreError as error:
                if not said:
                    self._shell.say(f"replica {replica.id} waits for the store: {error}")
                said = True
                await asyncio.sleep(RETRY_S)
                continue
            if granted:
                start()
            elif self._keeper.replicas.get(replica.id) is replica:
                self._keeper.lose(replica, "it has been seated elsewhere since")
            return

    def _is_wanted(self, replica: Replica, claim: Claim) -> bool:
        ours = self._keeper.replicas.get(replica.id) is replica
        return ours and not replica.over and replica.claimed == claim.incarnation

    def on_outcome(self, replica: Replica) -> None:
        """Tells the others."""
        view = self._view
        assert view is not None
        if replica.outcome == "done":
            became = Became.DONE
        elif replica.outcome == "left":
            its_own = self._asked_to_leave(replica, view) or self.settings.host.name not in view.roster.drained
            became = Became.LEFT if its_own else Became.MOVES
        else:
            became = Became.MISTAKE if replica.id in self._mistakes else Became.GIVEN_UP
        outcome = Outcome(
            became=became,
            host=self.settings.host.name,
            number=self._numbers[replica.id],
            reason=replica.outcome if became in (Became.MISTAKE, Became.GIVEN_UP) else "",
            request_id=replica.request_id,
        )
        self._shell.start(self._put_outcome(ReplicaId(replica.id), outcome))

    async def _put_outcome(self, replica: ReplicaId, outcome: Outcome) -> None:
        """Until it is written: the job could not end without it."""
        assert self._store is not None
        async with self._turns[replica]:
            while not self._shell.ended.done():
                try:
                    await self._store.put_outcome(replica, outcome)
                except StoreError:
                    await asyncio.sleep(RETRY_S)
                else:
                    return

    def on_mistake(self, replica: Replica, sentence: str) -> None:
        """This replica's own: a host may lack what others have."""
        self._mistakes.add(replica.id)
        self._keeper.give_up(replica, sentence)

    # --- ending -----------------------------------------------------------------------------------------------

    def _check_end(self, view: StoreView) -> None:
        code = code_of_end(view.roster, view.requests, self._seating.gone(now=time.monotonic_ns()))
        if code is not None:
            self._shell.end(code)

    async def _clean_up(self) -> None:
        """Whatever happened: nothing of ours runs on."""
        polite, self._shell.stopping = self._shell.stopping, True
        if self._timer is not None:
            self._timer.cancel()
        await self._keeper.end_lives(polite=polite)
        await self._shell.end_tasks()
        if self._store is not None:
            await self._store.close()
        self._keeper.clean_up()
        self._token_file.unlink(missing_ok=True)


def _boot() -> str:
    """Names the kernel's run, and so the monotonic clock of these records; empty if it has no name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def keep(settings: AgentSettings) -> int:
    """Runs the agent of this host until the job is over; returns the exit code."""

    async def main() -> tuple[int, str]:
        agent = Agent(settings, screen)
        code = await agent.run()
        return code, agent.verdict(code)

    screen = Screen()
    try:
        code, verdict = asyncio.run(main())
        screen.error(f"keepstep: {verdict}; logs are in {settings.launch.run_dir / 'logs'}\n")
    finally:
        screen.close()
    return code
