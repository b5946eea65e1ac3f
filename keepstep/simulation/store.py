"""The store: linearizable, with leases and watches; and one leader's connection to it, which may fail in every way.

Mirrors `runtime.etcd`, `etcd_lease` and `etcd_view` as a leader sees them: a call that fails may have been carried out; a lease
ends by the store's clock when nothing has come from its owner for a while, and is replaced, with the newest report
under it, once the owner is back; a watch brings all changes in order, several at a time, as late as it likes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.messages import Decision, Report
from keepstep.protocol.quorum import SeenReport, View
from keepstep.simulation.clock import MS, SECOND, Process

if TYPE_CHECKING:
    from keepstep.simulation.world import World

LEASE = 2 * SECOND
CALL = 5 * SECOND  # after this, a call without an answer has failed
BACK_OFF = 100 * MS

Change = tuple[str, int, object]  # what, of which replica, new value


class Store:
    """What etcd holds of the job, and every change of it in order."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.up = True
        self.log: list[Change] = []
        self.last: Decision | None = None
        self.revision = 0  # of the decision
        self.reports: dict[ReplicaId, tuple[Report, Client]] = {}
        self.clients: list[Client] = []

    def change(self, what: str, replica: int, value: object) -> None:
        """Appends to the history and lets everybody who watches know, sooner or later."""
        self.log.append((what, replica, value))
        for client in self.clients:
            client.notify()

    def put_report(self, client: "Client", report: Report) -> None:
        self.world.judge.on_report(report)
        self.reports[report.replica_id] = report, client
        self.change("report", report.replica_id, report)

    def drop_reports_of(self, client: "Client") -> None:
        """Its lease has run out, or it has withdrawn."""
        for replica, (_, owner) in list(self.reports.items()):
            if owner is client:
                del self.reports[replica]
                self.change("drop", replica, None)

    def swap_decision(self, decision: Decision, revision: int) -> None:
        if self.revision != revision:
            return
        self.world.judge.on_decision(decision)
        self.last = decision
        self.revision += 1
        self.change("decision", 0, decision)
        self.world.on_published(decision)

    def mark_dead(self, life: Incarnation) -> None:
        self.change("dead", 0, life)

    def announce(self, replica: int, coming: bool) -> None:
        self.change("announced" if coming else "unannounced", replica, None)

    def ask(self, replica: int, leave: bool) -> None:
        self.change("leave" if leave else "stay", replica, None)

    def ask_to_stop(self) -> None:
        self.change("stop", 0, None)

    def go_away(self) -> None:
        self.up = False
        for client in self.clients:
            client.on_cut()

    def come_back(self) -> None:
        self.up = True
        for client in list(self.clients):
            client.on_restored()


class Client:
    """One leader's connection: its view, its lease, its calls. `on_view` is called after every change that it sees."""

    def __init__(self, store: Store, process: Process, replica: ReplicaId, on_view: Callable[[], None]) -> None:
        self.store, self.world, self.process, self.replica = store, store.world, process, replica
        self.on_view = on_view
        self.mute = self.blind = False
        self.connected = False
        self.errors = 0  # so many calls fail at once
        self.request_takes = 0  # ns, for the next write
        self.late_until = 0  # ns: a write is on its way for so long
        self.slowness = 1
        self.revision = 0
        self._at = 0  # how much of the history has been seen
        self._told = False
        self._last: Decision | None = None
        self._last_seen_at = 0
        self.seen: dict[ReplicaId, SeenReport] = {}
        self.dead: frozenset[Incarnation] = frozenset()
        self._announced: frozenset[ReplicaId] = frozenset()
        self.asked: frozenset[ReplicaId] = frozenset()  # to leave
        self._stopping = False
        self._wanted: Report | None = None  # what is to stand under our lease
        self._has_lease = True
        self._silent_since = -1  # nothing of ours reaches the store
        self._silences = 0
        self._closed = False
        self._lost: list[
            Callable[[], None]
        ] = []  # calls whose answer is lost, until the connection is back or they give up

    # --- what it sees -----------------------------------------------------------------------------------------

    def view(self) -> View:
        return View(
            last=self._last,
            last_seen_at=self._last_seen_at,
            reports=self.seen,
            dead=self.dead,
            announced=self._announced,
            stopping=self._stopping,
        )

    def watch(self) -> None:
        """Reads everything and follows what comes, from now on."""
        self.store.clients.append(self)
        self.world.clock.after(self.world.takes(4 * MS), self.process, self._reread)

    def notify(self) -> None:
        if self.connected and not self._told and not self.blind and self.store.up:
            self._told = True
            self.world.clock.after(self.world.takes(3 * MS) * self.slowness, self.process, self._deliver)

    def _deliver(self) -> None:
        self._told = False
        news = self._at < len(self.store.log)
        if news and not self.blind and self.store.up and not self._closed:
            self._read_on()
            self.on_view()

    def _read_on(self) -> None:
        now = self.world.clock.local(self.process)
        log = self.store.log
        for what, replica, value in log[self._at :]:
            if isinstance(value, Report):
                known = self.seen.get(value.replica_id)
                if known is None or known.report != value:
                    self.seen[value.replica_id] = SeenReport(report=value, seen_at=now)
            elif isinstance(value, Decision):
                self._last, self._last_seen_at = value, now
                self.revision += 1
            elif what == "drop":
                self.seen.pop(ReplicaId(replica), None)
            elif what == "dead":
                self.dead |= {Incarnation(str(value))}
            elif what == "announced":
                self._announced |= {ReplicaId(replica)}
            elif what == "unannounced":
                self._announced -= {ReplicaId(replica)}
            elif what == "leave":
                self.asked |= {ReplicaId(replica)}
            elif what == "stay":
                self.asked -= {ReplicaId(replica)}
            else:
                self._stopping = True
        self._at = len(log)

    def _reread(self) -> None:
        """The first reading, or the one after the watch was lost."""
        if self.connected or self._closed:
            return
        if self.blind or self.mute or not self.store.up:
            self.world.clock.after(BACK_OFF, self.process, self._reread)
            return
        self.connected, self._told = True, False
        self._read_on()
        self.on_view()

    # --- what happens to it -----------------------------------------------------------------------------------

    def on_cut(self) -> None:
        """The store has become unreachable in one direction or both: the watch is lost when it has been silent long enough."""
        self.world.clock.after_local(self.world.takes(3 * SECOND), self.process, self._lose_watch)
        self.on_silence()

    def _lose_watch(self) -> None:
        if self.connected and (self.blind or not self.store.up):
            self.connected = False
            self.on_view()
            self.world.clock.after(BACK_OFF, self.process, self._reread)

    def on_restored(self) -> None:
        lost, self._lost = self._lost, []
        for fail in lost:
            self.world.clock.after(self.world.takes(50 * MS), self.process, fail)
        self.on_silence()
        self.notify()

    def on_silence(self) -> None:
        """Whether anything of ours reaches the store may have changed: the lease runs out, or is renewed."""
        silent = self.mute or not self.process.running
        if silent and self._silent_since < 0:
            self._silent_since = self.world.clock.now
            self._silences += 1
            left = LEASE - int(LEASE / 3 * self.world.rng.random())
            self.world.clock.after(left, None, self._expire, self._silences)
        elif not silent and self._silent_since >= 0:
            self._silent_since = -1
            self._silences += 1
            if not self._has_lease:
                wait = int(LEASE / 3 * self.world.rng.random())
                self.world.clock.after_local(wait, self.process, self._renew)

    def _expire(self, silence: int) -> None:
        if silence != self._silences or self._closed:
            return
        if not self.store.up:
            self.world.clock.after(LEASE, None, self._expire, silence)  # no lease ends while nobody is there to end it
            return
        self._has_lease = False
        if any(owner is self for _, owner in self.store.reports.values()):
            self.world.say(self.replica, "its lease has run out")
        self.store.drop_reports_of(self)
        if not self.process.alive:
            self.store.clients.remove(self)

    def _renew(self) -> None:
        if self._has_lease or self._closed or self._wanted is None:
            return
        if self.mute or not self.store.up:
            self.world.clock.after_local(LEASE // 3, self.process, self._renew)
        else:
            self._has_lease = True
            self.world.say(self.replica, "has a lease again, and the same report under it")
            self.store.put_report(self, self._wanted)

    def close(self) -> None:
        """Withdraws."""
        self._closed = True
        if self in self.store.clients:
            self.store.clients.remove(self)
        self.world.clock.after(self.world.takes(3 * MS), None, self.store.drop_reports_of, self)

    def _no_answer(self, done: Callable[[], None]) -> None:
        """The call ends, badly, when its time is over or when the connection is back."""
        over = False

        def fail() -> None:
            nonlocal over
            if not over:
                over = True
                done()

        self._lost.append(fail)
        self.world.clock.after_local(CALL, self.process, fail)

    # --- calls ------------------------------------------------------------------------------------------------

    def put_report(self, report: Report, done: Callable[[bool], None]) -> None:
        """`done(True)`: it is written; `done(False)`: perhaps not, or not yet."""
        self._wanted = report
        clock, late = self.world.clock, self.request_takes
        if self.errors:
            self.errors -= 1
            clock.after(self.world.takes(3 * MS), self.process, done, False)
            return
        self.request_takes = 0
        if late:
            self.late_until = clock.now + 2 * CALL  # by then it has been written again, if it was given up
        if late > CALL:
            clock.after(late, None, self._write, report, None)
            clock.after_local(CALL, self.process, done, False)
        else:
            clock.after(late or self.world.takes(2 * MS), None, self._write, report, done)

    def _write(self, report: Report, done: Callable[[bool], None] | None) -> None:
        clock = self.world.clock
        lost = self.mute or not self.store.up or self._closed or not (self._has_lease or self.process.running)
        if not lost:
            self._has_lease = True  # a lost one has been replaced
            self.store.put_report(self, report)
        if done is None:
            return
        if lost or self.blind:
            self._no_answer(lambda: done(False))
        else:
            clock.after(self.world.takes(2 * MS), self.process, done, True)

    def read(self, done: Callable[[bool], None]) -> None:
        """Everything, now. `done(False)`: the store cannot be reached."""
        self.world.clock.after(self.world.takes(2 * MS), None, self._read, done)

    def _read(self, done: Callable[[bool], None]) -> None:
        if self.mute or self.blind or not self.store.up:
            self._no_answer(lambda: done(False))
        else:
            self.world.clock.after(self.world.takes(2 * MS), self.process, self._has_read, done)

    def _has_read(self, done: Callable[[bool], None]) -> None:
        self._read_on()
        done(True)

    def publish(self, decision: Decision, revision: int, done: Callable[[], None]) -> None:
        """Compare-and-swap; `done` when the call has ended, however."""
        clock = self.world.clock
        if self.errors:
            self.errors -= 1
            clock.after(BACK_OFF, self.process, done)
            return
        clock.after(self.world.takes(2 * MS), None, self._swap, decision, revision, done)

    def _swap(self, decision: Decision, revision: int, done: Callable[[], None]) -> None:
        lost = self.mute or not self.store.up
        if not lost:
            self.store.swap_decision(decision, revision)
        if lost or self.blind:
            self._no_answer(done)
        else:
            self.world.clock.after(self.world.takes(2 * MS), self.process, done)
