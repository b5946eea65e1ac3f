"""The rings between the replicas: what `runtime.engine` promises, and every way in which it may fail.

A member completes an exchange once every member of *its* ring has given its bucket to a ring of that name under that decision;
which buckets these are is recorded, not checked: that is the judge's business. From then on members complete one by one,
and whatever breaks the ring in between leaves some with the sum and some without. Break-ups travel from member to member; a dead
one is noticed at once, a frozen or cut-off one after a silence, a missing one when it has not connected, or made no progress, for
long enough.

Mirrors `runtime.ring`, `connecting` and `engine` in what they tell and when; there are no chunks, credits or links here.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keepstep.protocol.ids import Incarnation, QuorumId, Rank, ReplicaId, Seq
from keepstep.protocol.messages import Peer
from keepstep.simulation.clock import MS, SECOND

if TYPE_CHECKING:
    from keepstep.simulation.rank import SimRank
    from keepstep.simulation.world import World

SILENCE = 3 * SECOND
CONNECT = 5 * SECOND
PROGRESS = 10 * SECOND
TOLD = "told: "  # begins what a member knows from another one


@dataclass(slots=True, eq=False)
class Contribution:
    """What one rank puts into one exchange. `units` empty: zeros."""

    life: Incarnation
    units: tuple[int, ...] = ()
    computed_from: int = 0  # the content of the state
    content: int = 0  # 0: zeros


@dataclass(slots=True, eq=False)
class Buffer:
    """A bucket: what goes in stays, what comes out is overwritten by the next exchange of the same attempt."""

    contribution: Contribution
    sum: int | None = None
    units: tuple[int, ...] = ()  # of all who are in the sum


@dataclass(slots=True, eq=False)
class End:
    """One member's end of a ring."""

    rank: "SimRank"
    quorum_id: QuorumId
    peers: tuple[Peer, ...]
    lives: tuple[Incarnation, ...]
    exchanges: int = 0
    seq: Seq | None = None
    buffers: dict[int, Buffer] = field(default_factory=dict)
    on_the_way: set[int] = field(default_factory=set)
    done: int = 0
    begun: int = 0  # how often
    broken: str = ""
    suspect: ReplicaId | None = None
    own_link: bool = False  # ours to or from the suspect failed

    @property
    def neighbours(self) -> tuple[ReplicaId, ReplicaId]:
        """The previous and the next member."""
        at = self.lives.index(self.rank.life.incarnation)
        return self.peers[at - 1].replica_id, self.peers[(at + 1) % len(self.peers)].replica_id

    @property
    def busy(self) -> bool:
        return self.seq is not None and self.done < self.exchanges


class Fabric:
    """All rings of all ranks."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rings: dict[tuple[Rank, QuorumId], dict[Incarnation, End]] = {}
        self.cuts: set[tuple[int, int]] = set()  # no bytes from the first replica to the second

    def form(self, end: End) -> None:
        """A member has been told of a new ring."""
        world, rank = self.world, end.rank
        ring = self.rings.setdefault((rank.number, end.quorum_id), {})
        ring[rank.life.incarnation] = end
        if len(end.peers) == 1:
            return
        for peer in end.peers:
            if not world.rank_lives(peer.incarnation, rank.number):
                world.clock.after(world.takes(5 * MS), rank.process, self.break_end, end, peer.replica_id, "refused")
                return
        world.clock.after_local(CONNECT, rank.process, self._check_connected, end)

    def _check_connected(self, end: End) -> None:
        if end.broken or end.rank.engine.end is not end:
            return
        ring = self.rings[end.rank.number, end.quorum_id]
        missing = [p.replica_id for p in end.peers if p.incarnation not in ring]
        cut = self._cut_in(end)
        if missing or cut is not None:
            self.break_end(end, missing[0] if missing else _blamed(end, cut), "does not connect")

    def leave(self, end: End) -> None:
        """A member goes over to another ring. Whoever still needs it here is told."""
        ring = self.rings.get((end.rank.number, end.quorum_id), {})
        ring.pop(end.rank.life.incarnation, None)
        for other in ring.values():
            if other.busy:
                self._tell_broken(other, end.rank.life.replica_id, "it has left the ring", 10 * MS)

    def begin(self, end: End) -> None:
        end.begun += 1
        if len(end.peers) > 1:
            self.world.clock.after_local(PROGRESS, end.rank.process, self._check_progress, end, end.begun)

    def _check_progress(self, end: End, begun: int) -> None:
        if end.begun == begun and end.busy and end.rank.engine.end is end:
            self.break_end(end, None, "no progress")

    def advance(self, end: End, number: int) -> None:
        """A bucket has been given to the ring: who has all that it needs completes, sooner or later."""
        ring = self.rings[end.rank.number, end.quorum_id]
        for member in ring.values():
            if number in member.on_the_way or member.broken or number not in member.buffers:
                continue
            others = [ring.get(life) for life in member.lives]
            if any(o is None or o.seq != member.seq or number not in o.buffers for o in others):
                continue
            member.on_the_way.add(number)
            cut = self._cut_in(member)
            if any(o.rank.process.frozen for o in others if o is not None) or cut is not None:
                self._tell_broken(member, _blamed(member, cut), "silence", SILENCE)
                continue
            parts = tuple(o.buffers[number].contribution for o in others if o is not None)
            took = self.world.takes(60 * MS)
            if not self.world.plan.jitter:
                took += 20 * MS * member.lives.index(member.rank.life.incarnation)  # they never complete all at once
            self.world.clock.after(took, member.rank.process, self._complete, member, member.begun, number, parts)

    def _complete(self, end: End, begun: int, number: int, parts: tuple[Contribution, ...]) -> None:
        if end.broken or end.begun != begun or end.rank.engine.end is not end or number not in end.on_the_way:
            return
        assert end.seq is not None
        buffer = end.buffers[number]
        buffer.sum = hash(tuple([part.content for part in parts]))
        buffer.units = tuple([unit for part in parts for unit in part.units])
        self.world.judge.on_sum(end.rank, end.seq, number, parts, buffer.sum)
        end.done += 1
        if end.done == end.exchanges:
            self.world.point("sum", end.rank.life.replica_id)
            end.rank.on_step_done(end.seq)

    # --- breaking ---------------------------------------------------------------------------------------------

    def break_end(self, end: End, suspect: ReplicaId | None, why: str) -> None:
        """This member learns that the ring is broken; so will the others."""
        if end.broken or end.rank.engine.end is not end:
            return
        end.broken, end.suspect = why, suspect
        end.own_link = not why.startswith(TOLD) and suspect in end.neighbours
        if end.busy and end.seq is not None:
            end.rank.on_step_failed(end.seq, suspect, why, own_link=end.own_link)
        else:
            end.rank.on_ring_broken(end.quorum_id, suspect, why, own_link=end.own_link)
        for other in self.rings[end.rank.number, end.quorum_id].values():
            if other is not end and not other.broken:
                self._tell_broken(other, suspect, f"{TOLD}{why}", 10 * MS)

    def _tell_broken(self, end: End, suspect: ReplicaId | None, why: str, within: int) -> None:
        self.world.clock.after(self.world.takes(within), end.rank.process, self.break_end, end, suspect, why)

    def on_gone(self, rank: "SimRank") -> None:
        """A process has died: its connections end."""
        self._disturb(rank, "it is dead", 10 * MS)
        end = rank.engine.end
        if end is not None:
            self.rings[rank.number, end.quorum_id].pop(rank.life.incarnation, None)

    def on_frozen(self, rank: "SimRank") -> None:
        self._disturb(rank, "silence", SILENCE)

    def _disturb(self, rank: "SimRank", why: str, within: int) -> None:
        """Whether a member that is just completing does so in spite of it, is left to chance."""
        me = rank.life
        for (number, _), ring in self.rings.items():
            if number != rank.number:
                continue
            for end in ring.values():
                if end.rank is rank or me.incarnation not in end.lives or end.broken:
                    continue
                if why == "silence" and not end.busy:
                    continue
                if end.on_the_way and self.world.rng.random() < 0.5:
                    end.on_the_way.clear()
                self._tell_broken(end, me.replica_id, why, within)

    def cut(self, sender: int, receiver: int) -> None:
        self.cuts.add((sender, receiver))
        for ring in self.rings.values():
            for end in ring.values():
                cut = self._cut_in(end)
                if cut is not None and not end.broken:
                    if end.on_the_way and self.world.rng.random() < 0.5:
                        end.on_the_way.clear()
                    self._tell_broken(end, _blamed(end, cut), "silence", SILENCE)

    def _cut_in(self, end: End) -> tuple[ReplicaId, ReplicaId] | None:
        """Two neighbours in its ring that do not reach each other."""
        if not self.cuts:
            return None
        for before, after in zip((end.peers[-1], *end.peers), end.peers, strict=False):
            if (before.replica_id, after.replica_id) in self.cuts or (after.replica_id, before.replica_id) in self.cuts:
                return before.replica_id, after.replica_id
        return None


def _blamed(end: End, cut: tuple[ReplicaId, ReplicaId] | None) -> ReplicaId | None:
    """Whom a member suspects when two of its ring do not reach each other: the other one, if it is one of them. A third one is
    told, or notices by itself that nothing comes and suspects whom it can see."""
    me = end.rank.life.replica_id
    if cut is None or me not in cut:
        world = end.rank.world
        return end.neighbours[0] if cut is not None and world.plan.jitter and world.rng.random() < 0.3 else None
    return cut[cut[0] == me]


class SimEngine:
    """One rank's engine: what `protocol.catch_up`'s effects and `Attempts` call."""

    def __init__(self, rank: "SimRank") -> None:
        self.rank = rank
        self.fabric = rank.world.fabric
        self.end: End | None = None

    def configure(self, quorum_id: QuorumId, peers: tuple[Peer, ...]) -> None:
        old = self.end
        self.end = End(self.rank, quorum_id, peers, tuple([peer.incarnation for peer in peers]))
        if old is not None:
            self.fabric.leave(old)
        self.fabric.form(self.end)

    def begin(self, seq: Seq, quorum_id: QuorumId, exchanges: int) -> None:
        end = self.end
        assert end is not None
        assert end.quorum_id == quorum_id, "an exchange must not begin on another ring"
        end.seq, end.exchanges, end.done = seq, exchanges, 0
        end.buffers, end.on_the_way = {}, set()
        if end.broken:
            rank, why = self.rank, end.broken
            rank.world.clock.after(MS // 10, rank.process, self._fail_again, end, seq, why)
        self.fabric.begin(end)

    def _fail_again(self, end: End, seq: Seq, why: str) -> None:
        self.rank.on_step_failed(seq, end.suspect, why, own_link=end.own_link)

    def submit(self, seq: Seq, exchange: int, buffer: Any) -> None:
        end = self.end
        assert end is not None
        if end.broken or seq != end.seq:
            return
        assert end.exchanges > exchange
        end.buffers[exchange] = buffer
        self.rank.world.judge.on_contribution(self.rank, seq, buffer.contribution)
        self.fabric.advance(end, exchange)

    def abort(self, quorum_id: QuorumId, suspect: ReplicaId, why: str) -> None:
        if self.end is not None and self.end.quorum_id == quorum_id:
            self.fabric.break_end(self.end, suspect, why)
