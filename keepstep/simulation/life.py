"""One life of a replica: its ranks, its leader, the control tree between them, and what its launcher does about its end.

Mirrors `runtime.tree` (messages keep their order; what ranks say alike is said once; a link that is silent for ten ticks is
lost, each end by its own count, and a rank that has lost one ends) and `launch.launcher` (an exit is seen at once, the rest of
the replica is ended, the store is told, another life is started).
"""

from typing import TYPE_CHECKING

from keepstep.protocol import together
from keepstep.protocol.catch_up import Leave, Train
from keepstep.protocol.errors import InvariantViolation
from keepstep.protocol.ids import Incarnation, Rank, ReplicaId
from keepstep.protocol.messages import (
    Abort,
    Decided,
    Decision,
    Downward,
    Finish,
    Load,
    Peer,
    Said,
    StartOver,
    Upward,
    Verdict,
)
from keepstep.protocol.quorum import Halt
from keepstep.protocol.step import StepSettings
from keepstep.protocol.together import Once, Together
from keepstep.simulation.clock import MS, SECOND
from keepstep.simulation.leader import SimLeader
from keepstep.simulation.rank import NOWHERE, SimRank

if TYPE_CHECKING:
    from keepstep.simulation.world import World

TREE_SILENT = 10 * SECOND


class Link:
    """One direction of the control link between rank 0 and another rank."""

    __slots__ = ("cut_until", "last", "slowness")

    def __init__(self) -> None:
        self.last = 0  # when the newest message arrives: none overtakes another
        self.cut_until = 0
        self.slowness = 1


class Life:
    """One incarnation. Its processes are `ranks`; it is over when all of them have ended."""

    def __init__(self, world: "World", replica_id: ReplicaId, number: int) -> None:
        plan = world.plan
        self.world, self.replica_id, self.number = world, replica_id, number
        self.incarnation = Incarnation(f"{'abcdefgh'[replica_id]}{number}")
        self.drift = plan.drifts[replica_id] if plan.drifts else 1.0
        self.offset = (replica_id * 1000 + number) * SECOND
        self.settings = StepSettings(
            replica_id=replica_id,
            incarnation=self.incarnation,
            size=plan.ranks,
            max_steps=plan.max_steps,
            max_pending=plan.max_pending,
        )
        self.main_slowness = self.fetch_slowness = 1
        self.damage = False  # the next piece of state that is served is damaged
        self.over = False  # no process of it is left
        self.done = False  # and there will be no other life
        self.steady_since = world.clock.now  # when it was last cut off, frozen or born
        self.out_since = -1  # when it was last in touch, if it is not
        self.finished = False  # it left the loop because the job is complete
        self.ranks = [SimRank(world, self, Rank(k)) for k in range(plan.ranks)]
        self._by_rank = dict(enumerate(self.ranks))
        self.down = [Link() for _ in self.ranks]
        self.up = [Link() for _ in self.ranks]
        self.leader = SimLeader(self, self.ranks[0])
        self._together, self._once = Together(plan.ranks), Once()
        self._met: dict[int, list[tuple[SimRank, Train]]] = {}

    def start(self) -> None:
        """The processes run; the models are built after a while."""
        clock, world = self.world.clock, self.world
        self.leader.start()
        for rank in self.ranks:
            clock.after(world.takes(300 * MS), rank.process, rank.say_hello)

    @property
    def runs(self) -> bool:
        return all(rank.process.running for rank in self.ranks)

    @property
    def in_touch(self) -> bool:
        """Nothing keeps it from the store."""
        client = self.leader.client
        late = self.world.clock.now < client.late_until
        return self.runs and not client.mute and not client.blind and not late and self.world.store.up

    # --- control tree -----------------------------------------------------------------------------------------

    def tell(self, message: Load | Verdict | StartOver | Abort | Finish) -> None:
        for rank in self.ranks:
            self._send(self.down[rank.number], rank, message)

    def tell_decided(self, decision: Decision) -> None:
        peers = tuple(
            [Peer(replica_id=m.replica_id, incarnation=m.incarnation, endpoint=NOWHERE) for m in decision.members]
        )
        if self.world.talks:
            self.world.say(self.replica_id, f"takes part in decision {decision.seq}")
        self.tell(Decided(decision=decision, peers=peers))  # type: ignore[arg-type]

    def _send(self, link: Link, to: SimRank, message: Downward) -> None:
        clock = self.world.clock
        due = max(clock.now + self.world.takes(MS), link.last, link.cut_until)
        link.last = due
        clock.after(due - clock.now, to.process, to.on_down, message)

    def send_up(self, rank: SimRank, message: Said) -> None:
        link, clock = self.up[rank.number], self.world.clock
        due = max(clock.now + self.world.takes(MS) * link.slowness, link.last, link.cut_until)
        link.last = due
        clock.after(due - clock.now, self.ranks[0].process, self._arrived, message)

    def _arrived(self, message: Said) -> None:
        """In every other replica merged on the way, as `runtime.upward` and the tree do it."""
        heard: Upward | None = message
        alike = together.merged(message)
        if self.replica_id % 2 == 0:
            pass
        elif alike is not None:
            topic, number, agreed = alike
            result = self._together.say(message.rank, topic, number, agreed)
            heard = None if result is None else together.said_by_all(topic, number, result)
        elif (key := together.enough_once(message)) is not None and not self._once.is_first(key):
            heard = None
        if heard is not None:
            self.leader.on_message(heard)

    def cut_tree(self, rank: Rank, duration: int, down: bool) -> None:
        """No message for a while, or the end: both ranks count the ticks without a sign of the other by themselves."""
        world = self.world
        links = self.down if down else self.up
        links[rank].cut_until = world.clock.now + duration
        if rank != 0 and duration > TREE_SILENT:
            for end in (self.ranks[0], self.ranks[rank]):
                world.clock.after_local(TREE_SILENT + world.takes(SECOND), end.process, self._lost, end)

    def _lost(self, rank: SimRank) -> None:
        """It has lost a control link: a replica with a lost rank is of no use."""
        if not rank.left and not self.world.healed:
            self.world.end_process(rank)

    # --- main threads -----------------------------------------------------------------------------------------

    def meet(self, attempt: int, rank: SimRank, order: Train) -> None:
        """Forward and backward are full of collectives: nobody goes on without the others."""
        here = self._met.setdefault(attempt, [])
        here.append((rank, order))
        if any(other.units != order.units or other.start != order.start for _, other in here):
            raise InvariantViolation(f"the ranks of {self.incarnation} compute different things: {here}")
        if len(here) == len(self.ranks):
            del self._met[attempt]
            takes = self.world.takes(700 * MS) * self.main_slowness
            for each, what in here:
                self.world.clock.after(takes + self.world.takes(5 * MS), each.process, each.computed, what)

    def on_left(self, rank: SimRank, order: Leave) -> None:
        """A main thread has left the loop. When all have, the replica is done."""
        if any(not each.left for each in self.ranks):
            return
        self.finished = self.world.judge.on_left(self, order)
        why = order.error or order.left
        self.world.say(self.replica_id, f"leaves ({why})" if why else "leaves: the job is complete")
        self.leader.close()
        self.world.end(self)

    # --- the end ----------------------------------------------------------------------------------------------

    def on_halted(self, halt: Halt) -> None:
        self.world.say(self.replica_id, f"gives up: {halt.reason}")
        self.world.judge.on_halt(self, halt)
        self.leader.close()
        self.world.end(self)
