"""One world: its replicas, what goes wrong with them, and how it ends.

Under faults the judge demands safety after every event. Then everything heals, but for a partition that is meant to last, and
it demands progress: some more steps with every replica a WORKER (some more steps, if the partition lasts), or the end of the job
with equal states, within a bound.
"""

import random
from collections import defaultdict
from dataclasses import dataclass

from keepstep.protocol.apart import FIRST_PAUSE
from keepstep.protocol.errors import KeepstepError
from keepstep.protocol.ids import Incarnation, Rank, ReplicaId
from keepstep.protocol.messages import Decision, Kind, Role
from keepstep.protocol.pace import Learned
from keepstep.simulation.clock import MS, SECOND, Clock
from keepstep.simulation.disk import Disk
from keepstep.simulation.fabric import Fabric
from keepstep.simulation.judge import Judge, Violation
from keepstep.simulation.life import Life
from keepstep.simulation.plan import Fault, Plan
from keepstep.simulation.rank import SimRank
from keepstep.simulation.store import Store

CHECK = 500 * MS
WHOEVER_LIVES = ("cut link", "store away", "crash all", "disk full", "rot", "leave", "stop")
EVENTS_MAX = 200_000  # a world that does so much without getting anywhere is a failure too


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a world ended."""

    ending: str  # "end": the job is complete; "steps": all are WORKERs and go on; "no state": all states are gone
    steps: int  # committed by anybody, under all decisions
    events: int
    seconds: float  # simulated


class World:
    """Plays one plan. `run` returns a `Result` or raises `Violation`."""

    def __init__(self, plan: Plan, *, transcript: bool = False) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed * 1_000_003 + 1)
        self.clock = Clock()
        self.lines: list[str] | None = [] if transcript else None
        self.talks = transcript
        self.judge = Judge(self)
        self.store = Store(self)
        self.fabric = Fabric(self)
        self.disk = Disk(self)
        self.judge.on_beginning()
        self.lives: list[Life] = []
        self.by_incarnation: dict[Incarnation, Life] = {}
        self.learned: dict[tuple[ReplicaId, Rank], Learned | None] = {}  # kept for their next life
        self.healed = False
        self.leaving: set[int] = set()  # asked to leave, and not asked back
        self.asked: set[int] = set()  # asked to leave at any time
        self.stopping = False
        self._points: dict[tuple[str, int], list[Fault]] = defaultdict(list)
        self._passed: dict[tuple[str, int], int] = defaultdict(int)
        self._done_at = -1  # committed steps after which the world is over
        self._ending = ""
        for replica in range(plan.replicas):
            self.lives.append(self._born(replica, 0))
        for fault in plan.faults:
            if fault.point:
                self._points[fault.point, fault.replica].append(fault)
            else:
                self.clock.after(fault.at, None, self._happen, fault)
        if plan.lasting is not None:
            self.clock.after(plan.heal_at // 2, None, self._part)
        self.clock.after(plan.heal_at, None, self._heal)

    # --- small things that everybody needs --------------------------------------------------------------------

    def takes(self, typically: int) -> int:
        """How long something takes that typically takes so long: half to one and a half, now and then ten times as long."""
        jitter = self.plan.jitter
        if jitter == 0.0:
            return typically
        chance = self.rng.random()
        if chance > 0.97 and not self.healed:
            return int(typically * (1 + 300 * (chance - 0.97)))
        return int(typically * (0.5 + chance))

    def say(self, replica: int | None, text: str) -> None:
        """A line of the transcript."""
        if self.lines is not None:
            who = "" if replica is None else f"replica {replica}: "
            self.lines.append(f"{self.clock.now / SECOND:9.3f}  {who}{text}")

    def point(self, name: str, replica: int) -> None:
        """A replica passes a point where a fault may be due: it happens right after what is happening now."""
        if not self._points or self.healed:
            return
        due = self._points.get((name, replica))
        if due is None:
            return
        self._passed[name, replica] += 1
        for fault in due:
            if fault.nth == self._passed[name, replica]:
                self.clock.after(0, None, self._happen, fault)

    def rank_of(self, life: Incarnation, number: Rank) -> SimRank | None:
        found = self.by_incarnation.get(life)
        return None if found is None else found.ranks[number]

    def rank_lives(self, life: Incarnation, number: Rank) -> bool:
        rank = self.rank_of(life, number)
        return rank is not None and rank.process.alive

    # --- the launcher -----------------------------------------------------------------------------------------

    def _born(self, replica: int, number: int) -> Life:
        life = Life(self, ReplicaId(replica), number)
        self.by_incarnation[life.incarnation] = life
        self.store.announce(replica, True)
        self.clock.after(self.takes(20 * MS), None, life.start)
        return life

    def end_process(self, rank: SimRank, *, seen: bool = True, away: int = SECOND) -> None:
        """A process has ended. Its launcher, if it sees that, ends the others of the replica and starts another life."""
        if not rank.process.alive:
            return
        self._kill(rank)
        life = rank.life
        if life.over:
            return
        if all(not each.process.alive for each in life.ranks):
            self._all_gone(life, seen, away)
        elif seen:
            self.clock.after(self.takes(30 * MS), None, self._end_rest, life, seen, away)
        else:  # the others find out by the control tree
            for each in life.ranks:
                self.clock.after(self.takes(SECOND), each.process, self.end_process, each)

    def _kill(self, rank: SimRank) -> None:
        rank.process.alive = False
        rank.process.late.clear()
        self.fabric.on_gone(rank)
        if rank.is_leader:
            rank.life.leader.client.on_silence()

    def _end_rest(self, life: Life, seen: bool, away: int) -> None:
        for rank in life.ranks:
            if rank.process.alive:
                self._kill(rank)
        self._all_gone(life, seen, away)

    def _all_gone(self, life: Life, seen: bool, away: int) -> None:
        if life.over:
            return
        life.over = True
        self.judge.on_death(life)
        if seen:
            self.clock.after(self.takes(5 * MS), None, self._mark_dead, life)
        self.clock.after(away, None, self._restart, life)

    def _mark_dead(self, life: Life) -> None:
        if not self.store.up:
            self.clock.after(100 * MS, None, self._mark_dead, life)
        else:
            self.store.mark_dead(life.incarnation)

    def _restart(self, life: Life) -> None:
        if self.lives[life.replica_id] is not life or life.done:
            return
        if self.stopping or life.replica_id in self.leaving:
            self._is_gone(life)
            return
        self.say(life.replica_id, "is started again")
        self.lives[life.replica_id] = self._born(life.replica_id, life.number + 1)

    def end(self, life: Life) -> None:
        """It has left by itself, and doesn't come back."""
        life.over = True
        for rank in life.ranks:
            if rank.process.alive:
                self._kill(rank)
        self._is_gone(life)

    def _is_gone(self, life: Life) -> None:
        """It has no other life, for now."""
        life.done = True
        self.store.announce(life.replica_id, False)
        left = sum(not each.done for each in self.lives)
        if left < self.plan.policy.min_replicas and not any(each.finished for each in self.lives):
            self._ending = "no state"  # those who gave up do not come back, and the others are too few
            self.clock.stop()
        elif not left:
            self._ending = "end" if any(each.finished for each in self.lives) else "no state"
            self.clock.stop()

    # --- faults -----------------------------------------------------------------------------------------------

    def _happen(self, fault: Fault) -> None:
        life = self.lives[fault.replica]
        if self.healed or (life.over and fault.kind not in WHOEVER_LIVES):
            return
        self.say(None, f"*** {fault}")
        rank, client, until = life.ranks[fault.rank], life.leader.client, fault.duration
        match fault.kind:
            case "crash":
                for each in life.ranks:
                    self._kill(each)
                self._all_gone(life, fault.seen, until)
            case "crash all":
                for other in self.lives:
                    for each in other.ranks:
                        self._kill(each)
                    self._all_gone(other, fault.seen, until)
            case "disk full":
                self.disk.full = True
                self.clock.after(until, None, setattr, self.disk, "full", False)
            case "rot":
                self.disk.rot()
            case "crash rank":
                self.end_process(rank, seen=fault.seen, away=until)
            case "freeze" | "freeze rank":
                frozen = life.ranks if fault.kind == "freeze" else [rank]
                self._freeze(frozen)
                self.clock.after(until, None, self._thaw, frozen)
            case "mute" | "blind" | "cut off":
                self._note_out(life)
                client.mute, client.blind = fault.kind != "blind", fault.kind != "mute"
                client.on_cut()
                self.clock.after(until, None, self._reconnect, life)
            case "store away":
                for each_life in self.lives:
                    self._note_out(each_life)
                self.store.go_away()
                self.clock.after(until, None, self._store_back)
            case "store error":
                client.errors = 1 + fault.nth % 3
            case "late write":
                client.request_takes = until
            case "slow watch":
                client.slowness = 100
                self.clock.after(until, None, setattr, client, "slowness", 1)
            case "break ring":
                end = rank.engine.end
                if end is not None and len(end.peers) > 1 and rank.process.running:
                    self.fabric.break_end(end, None, "a link is lost")
            case "cut link":
                self.fabric.cut(fault.replica, fault.other)
                self.clock.after(until, None, self.fabric.cuts.discard, (fault.replica, fault.other))
            case "cut tree" | "slow tree" if fault.rank == 0:
                pass  # the leader and rank 0 are one process
            case "cut tree":
                life.cut_tree(Rank(fault.rank), until, fault.seen)
            case "slow tree":
                life.up[fault.rank].slowness = 100
                self.clock.after(until, None, setattr, life.up[fault.rank], "slowness", 1)
            case "slow main" | "slow fetch":
                name, factor = ("main_slowness", 10) if fault.kind == "slow main" else ("fetch_slowness", 20)
                setattr(life, name, factor)
                self.clock.after(until, None, setattr, life, name, 1)
            case "hang main":
                hung = life.ranks if fault.seen else [rank]
                for each_rank in hung:
                    each_rank.hang()
                self.clock.after(until, None, self._unhang, hung)
            case "damage":
                life.damage = True
            case "leave":
                self.leaving.add(fault.replica)
                self.asked.add(fault.replica)
                self.store.ask(fault.replica, True)
                self.store.announce(fault.replica, False)
                if not fault.seen:
                    self.clock.after(until, None, self._ask_back, fault.replica)
            case "stop":
                self.stopping = True
                self.store.ask_to_stop()
            case _:
                raise ValueError(f"unknown fault {fault.kind!r}")

    def _ask_back(self, replica: int) -> None:
        """It stays, or is started again."""
        if replica not in self.leaving or self.stopping:
            return
        self.leaving.discard(replica)
        self.store.ask(replica, False)
        life = self.lives[replica]
        if not life.done:
            self.store.announce(replica, True)
        elif not life.finished:
            self.lives[replica] = self._born(replica, life.number + 1)

    def _unhang(self, ranks: list[SimRank]) -> None:
        if not self.healed:
            self.judge.on_hung(ranks)
        for rank in ranks:
            rank.unhang()

    def _note_out(self, life: Life) -> None:
        """It is about to lose touch with the store."""
        if life.in_touch:
            life.out_since = self.clock.now

    def _freeze(self, ranks: list[SimRank]) -> None:
        self._note_out(ranks[0].life)
        for rank in ranks:
            if rank.process.running:
                rank.process.frozen = True
                self.fabric.on_frozen(rank)
                if rank.is_leader:
                    rank.life.leader.client.on_silence()

    def _thaw(self, ranks: list[SimRank]) -> None:
        for rank in ranks:
            if rank.process.alive and rank.process.frozen:
                self.clock.thaw(rank.process)
                rank.life.steady_since = self.clock.now
                if rank.is_leader:
                    rank.life.leader.client.on_silence()

    def _reconnect(self, life: Life) -> None:
        client = life.leader.client
        client.mute = client.blind = False
        life.steady_since = self.clock.now
        client.on_restored()

    def _store_back(self) -> None:
        if not self.store.up:
            self.store.come_back()
            for life in self.lives:
                life.steady_since = self.clock.now

    # --- the end ----------------------------------------------------------------------------------------------

    def _part(self) -> None:
        if self.plan.lasting is not None:
            one, other = self.plan.lasting
            self.say(None, f"*** replicas {one} and {other} do not reach each other any more, and never will")
            self.fabric.cut(one, other)
            self.fabric.cut(other, one)

    def _heal(self) -> None:
        """From now on nothing goes wrong any more, and everybody comes back."""
        self.say(None, "*** everything heals")
        self.healed = True
        self.fabric.cuts.clear()
        self._part()
        self.disk.full = False
        self._store_back()
        for life in self.lives:
            life.main_slowness = life.fetch_slowness = 1
            life.damage = False
            for link in (*life.down, *life.up):
                link.cut_until, link.slowness = 0, 1
            client = life.leader.client
            client.errors, client.slowness, client.request_takes = 0, 1, 0
            self._thaw(life.ranks)
            for rank in life.ranks:
                rank.unhang()
            self._reconnect(life)
            if life.over and not life.done:
                self.clock.after(SECOND, None, self._restart, life)
        self._check()

    def on_published(self, decision: Decision) -> None:
        """The judge has looked at it already."""
        if self.talks:
            self.say(None, describe(decision))
        everybody = sum(not life.done for life in self.lives)  # who gave up, rightly, doesn't come back
        demanded = self.plan.more_steps * everybody
        if self.plan.lasting is not None:  # of each two that do not reach each other, one must stand aside
            everybody, demanded = 1, 2 * FIRST_PAUSE  # and is tried again meanwhile
        if self.healed and self._done_at < 0 and decision.kind is Kind.TRAIN and len(decision.workers) >= everybody:
            self._done_at = self.judge.steps + demanded

    def _check(self) -> None:
        if 0 <= self._done_at <= self.judge.steps:
            self._ending = "steps"
            self.clock.stop()
        else:
            self.clock.after(CHECK, None, self._check)

    def _bound(self) -> int:
        policy = self.plan.policy
        waits = policy.start_wait_ns + 2 * policy.straggler_ns + 2 * policy.restore_wait_ns + policy.finish_wait_ns
        waits += policy.lost_wait_ns
        return self.plan.heal_at + int(1.3 * waits) + 200 * SECOND

    def run(self) -> Result:
        """Plays to the end. Raises Violation."""
        bound, clock = self._bound(), self.clock
        try:
            clock.run(bound, EVENTS_MAX)
            if not self._ending:
                last = self.store.last
                raise Violation(f"no progress: {last.seq if last else 'no'} {last.reason if last else 'decision'}")
            self.judge.on_end(self._ending)
        except (KeepstepError, AssertionError) as error:
            what = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
            raise Violation(f"at {clock.now / SECOND:.3f} s: {what}") from error
        return Result(ending=self._ending, steps=self.judge.steps, events=clock.events, seconds=clock.now / SECOND)


def describe(decision: Decision) -> str:
    """A decision in one line: what it is for, who does what in it, and why."""
    members = []
    for m in decision.members:
        if m.role is Role.WORKER:
            members.append(f"{m.incarnation} {'+'.join(str(u) for u in m.units) or '-'}")
        else:
            members.append(f"{m.incarnation} {'fetches' if m.fetch else 'catches up'}")
    start = f"from {decision.step}/{decision.base}"
    what = f"decision {decision.seq}: {decision.kind} {start}, ring {decision.quorum_id}"
    return f"{what} [{', '.join(members)}]: {decision.reason}"
