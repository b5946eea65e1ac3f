"""One simulated leader: the real leader's machine and the real `Decider`, with a made-up store and control tree around them.

Mirrors `runtime.leader.LeaderShell`: `on_message` and `_enter`, `_on_view`, `_watch_report`, `_watch_members`, the reporter
(`_reporter`, `_persist`: the newest report is written, again and again while the store is away), `_act`, `_confirm`, `_publish`.
"""

from typing import TYPE_CHECKING

from keepstep.protocol.deciding import Confirm, Decider, Effect, TryPublish
from keepstep.protocol.ids import LEADER, Rank, ReplicaId
from keepstep.protocol.messages import Decision, Hello, Report, Upward, Verdict
from keepstep.protocol.step import Effect as StepEffect
from keepstep.protocol.step import LeaderMachine, Publish, TellDecided
from keepstep.protocol.stuck import of_no_use
from keepstep.simulation.clock import MS
from keepstep.simulation.disk import LOOK
from keepstep.simulation.store import BACK_OFF, Client

if TYPE_CHECKING:
    from keepstep.simulation.life import Life
    from keepstep.simulation.rank import SimRank

LINK_GRACE = 400 * MS
OVERWRITTEN = 1000 * MS


class SimLeader:
    """Rank 0's extra duties in one life of a replica."""

    def __init__(self, life: "Life", rank: "SimRank") -> None:
        self.life, self.world, self.process = life, life.world, rank.process
        self.machine = LeaderMachine(life.settings)
        self.client = Client(self.world.store, self.process, life.replica_id, self._on_view)
        self._decider = Decider(self.world.plan.policy)
        self._timer = 0
        self._hellos: dict[Rank, Hello] = {}
        self._report: Report | None = None
        self._writing = False
        self._overwritten = False
        self._suspected: Decision | None = None
        self._closed = False

    def start(self) -> None:
        self.client.watch()

    def close(self) -> None:
        self._closed = True
        self.client.close()

    # --- inputs -----------------------------------------------------------------------------------------------

    def on_message(self, message: Upward) -> None:
        if isinstance(message, Hello):
            self._hellos[message.rank] = message
            if len(self._hellos) == self.machine.settings.size:
                self.world.clock.after(self.world.takes(10 * MS), self.process, self._enter)
            return
        if not self._closed:
            self._carry_out(self.machine.on_message(message))

    def _enter(self) -> None:
        """The job's record and our endpoints are written: report."""
        if not self.client.connected:  # these calls are repeated while the store is away
            self.world.clock.after(BACK_OFF, self.process, self._enter)
            return
        if self.world.plan.checkpoints:
            self._look()
        for number in range(self.machine.settings.size):
            self._carry_out(self.machine.on_message(self._hellos[Rank(number)]))

    def _on_view(self) -> None:
        if self._closed:
            return
        view = self.client.view()
        if view.last is not None:
            self._carry_out(self.machine.on_decision(view.last))
        self._carry_out(self.machine.on_asked(leave=self.life.replica_id in self.client.asked))
        if of_no_use(self.life.replica_id, self.life.incarnation, self.machine.stuck, view):
            self.world.say(self.life.replica_id, "makes no progress and ends")
            self.world.end_process(self.life.ranks[LEADER])
            return
        self._watch_members()
        if not self._overwritten and self._is_overwritten():
            self._overwritten = True
            self.world.clock.after_local(OVERWRITTEN, self.process, self._check_report)
        if not self.machine.over:
            self._act(self._decider.on_view(view, self.client.revision, now=self._now, mine=self._report))

    def _look(self) -> None:
        """For checkpoints, when there is nothing else to do."""
        if self._closed:
            return
        if self.machine.running is None:
            self._carry_out(self.machine.on_checkpoints(self.world.disk.found()))
        self.world.clock.after_local(LOOK, self.process, self._look)

    @property
    def _now(self) -> int:
        return self.world.clock.local(self.process)

    def _check_report(self) -> None:
        self._overwritten = False
        if not self._closed and self._is_overwritten():
            self._writing = True
            self._write()

    def _is_overwritten(self) -> bool:
        shown = self.client.seen.get(self.life.replica_id)
        if self._report is None or self._writing:
            return False
        return self.client.connected and (shown is None or shown.report != self._report)

    def _watch_members(self) -> None:
        running = self.machine.running
        if running is None or not self.client.connected or running is self._suspected or not self._lost(running):
            return
        self._suspected = running
        self.world.clock.after_local(LINK_GRACE, self.process, self._check_members, running)

    def _check_members(self, decision: Decision) -> None:
        self._suspected = None
        if self.client.connected and not self._closed:
            self._carry_out(self.machine.on_members_lost(decision, self._lost(decision)))

    def _lost(self, decision: Decision) -> frozenset[ReplicaId]:
        dead, reports = self.client.dead, self.client.seen
        return frozenset(
            m.replica_id
            for m in decision.members
            if m.replica_id != self.life.replica_id and (m.incarnation in dead or m.replica_id not in reports)
        )

    # --- effects ----------------------------------------------------------------------------------------------

    def _carry_out(self, effects: tuple[StepEffect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self.world.judge.on_answer(effect.report)
                self._report = effect.report
                if not self._writing:
                    self._writing = True
                    self.world.point("report", self.life.replica_id)
                    self.world.clock.after(0, self.process, self._write)
            elif isinstance(effect, TellDecided):
                self.world.point("adopt", self.life.replica_id)
                self.life.tell_decided(effect.decision)
            else:
                message = effect.message
                if isinstance(message, Verdict):
                    self.world.judge.on_verdict(self.life, message.seq, message.commit, message.reason)
                    if message.commit:
                        self.world.point("commit", self.life.replica_id)
                self.life.tell(message)

    def _write(self) -> None:
        report = self._report
        assert report is not None
        if not self._closed:
            self.client.put_report(report, lambda written: self._written(report, written))

    def _written(self, report: Report, written: bool) -> None:
        if not written:
            self.world.clock.after(BACK_OFF, self.process, self._write)
            return
        self.world.point("reported", self.life.replica_id)
        if self._report is not report:
            self._write()
        else:
            self._writing = False

    # --- deciding ---------------------------------------------------------------------------------------------

    def _act(self, effects: tuple[Effect, ...]) -> None:
        self._timer += 1
        for effect in effects:
            if isinstance(effect, TryPublish):
                self.world.point("publish", self.life.replica_id)
                self.world.clock.after(0, self.process, self._publish, effect)
            elif isinstance(effect, Confirm):
                self.client.read(self._confirmed)
            else:
                self.life.on_halted(effect.halt)
                return
        due = self._decider.next_deadline()
        if due is not None:
            delay = max(0, due - self._now) + MS // 10
            self.world.clock.after_local(delay, self.process, self._on_time, self._timer)

    def _confirmed(self, read: bool) -> None:
        if self._closed or self.machine.over:
            return
        view, now = self.client.view(), self._now
        if read and view.last is not None:
            self._carry_out(self.machine.on_decision(view.last))
        if self.machine.over:
            return
        if read:
            self._act(self._decider.on_view(view, self.client.revision, now=now, mine=self._report, fresh=True))
        else:
            self._act(self._decider.on_unconfirmed(now=self._now))

    def _on_time(self, timer: int) -> None:
        if timer == self._timer and not self._closed and not self.machine.over:
            self._act(self._decider.on_time(now=self._now))

    def _publish(self, effect: TryPublish) -> None:
        self.client.publish(effect.decision, effect.revision, self._published)

    def _published(self) -> None:
        if not self._closed and not self.machine.over:
            self._act(self._decider.on_published(now=self._now))
