"""The storage for checkpoints that all replicas of a world share, and how a rank writes to it and reads from it.

Mirrors `training.checkpoint` and `runtime.checkpoint_store` as the protocol sees them: a rank copies its part of a state while it
is readable, writes it after a while, and when all ranks of the replica have, rank 0 publishes them, at once and whole. A full
disk takes nothing; a published checkpoint may turn out to be unreadable by whoever tries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepstep.protocol.ids import Incarnation, Rank
from keepstep.protocol.messages import Checkpoint, LedgerState, StateName
from keepstep.simulation.clock import MS, SECOND

if TYPE_CHECKING:
    from keepstep.simulation.rank import SimRank
    from keepstep.simulation.world import World

LOOK = SECOND
"""How often a leader with nothing to do looks for checkpoints."""


@dataclass(slots=True, kw_only=True)
class Published:
    """One complete checkpoint."""

    checkpoint: Checkpoint
    parts: tuple[int, ...]  # the content of each rank's part
    at: int
    rotten: bool = False


class Disk:
    """What is on it."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.full = False
        self.published: dict[str, Published] = {}
        self._parts: dict[tuple[Incarnation, StateName], dict[Rank, int]] = {}

    def found(self) -> tuple[Checkpoint, ...]:
        """The complete ones, newest first."""
        every = [each.checkpoint for each in self.published.values()]
        return tuple(sorted(every, key=lambda c: (c.state.lineage, c.state.step), reverse=True))

    def write(self, life: Incarnation, state: StateName, rank: Rank, content: int) -> bool:
        """True: every rank of this life has written its part, now."""
        parts = self._parts.setdefault((life, state), {})
        parts[rank] = content
        return len(parts) == self.world.plan.ranks

    def publish(self, life: Incarnation, state: StateName, ledger: LedgerState) -> None:
        written = self._parts[life, state]
        parts = tuple([written[Rank(k)] for k in range(self.world.plan.ranks)])
        checkpoint = Checkpoint(name=f"{state.step}-{state.lineage}", state=state, ledger=ledger)
        self.world.judge.on_checkpoint(checkpoint, parts)
        if checkpoint.name not in self.published:
            self.published[checkpoint.name] = Published(checkpoint=checkpoint, parts=parts, at=self.world.clock.now)

    def rot(self) -> None:
        """The newest cannot be read any more."""
        for checkpoint in self.found()[:1]:
            self.published[checkpoint.name].rotten = True


class Save:
    """One rank's part of one checkpoint. `done(ok, reason)` in rank 0, when it is published or given up."""

    def __init__(
        self, rank: "SimRank", state: StateName, ledger: LedgerState, done: Callable[[StateName, bool, str], None]
    ) -> None:
        self.rank, self.world, self.state, self.ledger, self._done = rank, rank.world, state, ledger, done
        rank.holding.keep(state)
        self._after(20 * MS, self._copy)

    def _after(self, typically: int, action: Callable[[], None]) -> None:
        self.world.clock.after(self.world.takes(typically), self.rank.process, action)

    def _copy(self) -> None:
        got = [self.rank.holding.ask(self.state, piece, saving=True) for piece in (0, 1)]
        if "not yet" in got:
            self._after(50 * MS, self._copy)
            return
        self.rank.holding.keep(None)
        content = got[0]
        if isinstance(content, str):
            self._give_up("it was overwritten before it could be copied")
        else:
            self._after(300 * MS * self.rank.life.fetch_slowness, lambda: self._write(content))

    def _write(self, content: int) -> None:
        if self.world.disk.full:
            self._give_up("no space left on device")
        elif self.world.disk.write(self.rank.life.incarnation, self.state, self.rank.number, content):
            self.world.point("save", self.rank.life.replica_id)
            leader = self.rank.life.ranks[0]
            self.world.clock.after(self.world.takes(10 * MS), leader.process, self._publish)

    def _publish(self) -> None:
        self.world.disk.publish(self.rank.life.incarnation, self.state, self.ledger)
        if self.world.talks:
            self.world.say(self.rank.life.replica_id, f"has saved state {self.state.step}/{self.state.lineage}")
        self._done(self.state, True, "")

    def _give_up(self, reason: str) -> None:
        leader = self.rank.life.ranks[0]
        self.world.clock.after(self.world.takes(MS), leader.process, self._done, self.state, False, reason)


class FileLoad:
    """One rank's part of a checkpoint, read. Like `transfer.Fetch`."""

    def __init__(
        self, rank: "SimRank", state: StateName, checkpoint: Checkpoint, done: Callable[["FileLoad"], None]
    ) -> None:
        self.rank, self.state, self.checkpoint, self._done = rank, state, checkpoint, done
        self.content: int | None = None
        self.why = ""
        self._over = False
        world = rank.world
        world.clock.after(world.takes(200 * MS) * rank.life.fetch_slowness, rank.process, self._read)

    def cancel(self) -> None:
        self._over = True

    def _read(self) -> None:
        if self._over:
            return
        found = self.rank.world.disk.published.get(self.checkpoint.name)
        if found is None or found.rotten:
            self.why = f"checkpoint {self.checkpoint.name} cannot be read"
        else:
            self.content = found.parts[self.rank.number]
        self._done(self)
