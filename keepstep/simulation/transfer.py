"""How a state gets from one replica's rank to another's: who keeps what readable, and the fetch itself.

`Holding` mirrors `training.state.TrainingState`: the live tensors can be read while they hold the wanted state; just before they
are overwritten, what its readers have not read yet is copied aside, if the plan allows copies. `Fetch` mirrors
`runtime.state_fetcher`: the real `protocol.transfer.Transfer` decides who is asked for what.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.messages import Peer, Reader, StateName
from keepstep.protocol.transfer import Range, Transfer
from keepstep.simulation.clock import MS, SECOND

if TYPE_CHECKING:
    from keepstep.simulation.rank import SimRank

PIECES = 2  # of a state
SILENT = 6 * SECOND
ASK_AGAIN = SECOND
NOT_YET = 120 * SECOND


class Holding:
    """The states that one rank can serve."""

    def __init__(self, content: int, copies: bool) -> None:
        self.content = content  # of the live tensors, whatever their name
        self.live: StateName | None = None
        self._copies = copies
        self._aside: dict[StateName, tuple[int, set[int]]] = {}
        self._let_go: set[StateName] = set()
        self._readers: dict[Reader, StateName] = {}
        self._read: set[int] = set()
        self._reached = -1
        self._kept: StateName | None = None  # for ourselves, to be written to disk

    def keep(self, state: StateName | None) -> None:
        """From now on this state must stay readable to ourselves."""
        self._kept = state
        self._forget()

    def ask(self, state: StateName, piece: int, *, saving: bool = False) -> int | str:
        """The content, "not yet", or "gone"."""
        if state in self._aside:
            content, valid = self._aside[state]
            return content if piece in valid else "gone"
        if state == self.live:
            if not saving:
                self._read.add(piece)
            return self.content
        return "gone" if state in self._let_go or state.step < self._reached else "not yet"

    def serve(self, readers: Mapping[Reader, StateName]) -> None:
        before = self._readers_of_live()
        self._readers = dict(readers)
        if self._readers_of_live() != before:
            self._read = set()
        self._forget()

    def _forget(self) -> None:
        states = {*self._readers.values(), *([] if self._kept is None else [self._kept])}
        self._let_go &= states
        self._aside = {state: kept for state, kept in self._aside.items() if state in states}

    def _readers_of_live(self) -> set[Reader]:
        return {reader for reader, state in self._readers.items() if state == self.live}

    def before_write(self) -> None:
        readers = self._readers_of_live()
        kept = self.live == self._kept
        if self.live is not None and (readers or kept):
            if self._copies:
                read = self._read if len(readers) == 1 and not kept else set()
                self._aside[self.live] = self.content, set(range(PIECES)) - read
            else:
                self._let_go.add(self.live)
        self.live, self._read = None, set()

    def after_write(self, state: StateName) -> None:
        self.live = state
        self._reached = max(self._reached, state.step)


class Fetch:
    """One rank's fetch of one state from the same rank of `sources`. `done(content)`, or `done(None)` with `why`."""

    def __init__(
        self, rank: "SimRank", state: StateName, sources: tuple[Peer, ...], done: Callable[["Fetch"], None]
    ) -> None:
        self.rank, self.world, self.state, self._done = rank, rank.world, state, done
        self.transfer = Transfer(PIECES, [peer.replica_id for peer in sources], range_bytes=1)
        self._lives = {peer.replica_id: peer.incarnation for peer in sources}
        self._idle = set(self._lives)
        self._got: dict[int, int] = {}
        self._over = False
        self._since = self.world.clock.now
        self.content: int | None = None
        self.why = ""
        self.world.clock.after(self.world.takes(5 * MS), rank.process, self._go_on)

    def cancel(self) -> None:
        self._over = True

    def _go_on(self) -> None:
        """Everybody who has nothing to do is asked for something."""
        if self._over:
            return
        if self.transfer.complete or self.transfer.exhausted or not self._lives:
            self._over = True
            if self.transfer.complete:
                first = self._got[0]
                self.content = first if set(self._got.values()) == {first} else hash(tuple(sorted(self._got.items())))
            else:
                self.why = self.transfer.why or "there is nobody to fetch from"
            self._done(self)
            return
        for source in sorted(self._idle):
            part = self.transfer.next_range(source)
            if part is not None:
                self._idle.discard(source)
                takes = self.world.takes(40 * MS) * self.rank.life.fetch_slowness
                self.world.clock.after(takes, None, self._at_source, source, self._lives[source], part)

    def _at_source(self, source: ReplicaId, life: Incarnation, part: Range) -> None:
        """The request has reached its source, if there is one."""
        if self._over or not self.rank.process.alive:
            return
        clock, holder = self.world.clock, self.world.rank_of(life, self.rank.number)
        if holder is None or not holder.process.alive:
            clock.after(self.world.takes(5 * MS), self.rank.process, self._failed, source, "it is dead")
            return
        here = self.rank.life.replica_id
        if (
            holder.process.frozen
            or (source, here) in self.world.fabric.cuts
            or (here, source) in self.world.fabric.cuts
        ):
            clock.after_local(SILENT, self.rank.process, self._failed, source, "it is silent")
            return
        answer = holder.holding.ask(self.state, part[0])
        if answer == "gone":
            clock.after(
                self.world.takes(5 * MS), self.rank.process, self._failed, source, "it does not hold it any more"
            )
        elif answer == "not yet":
            if clock.now - self._since > NOT_YET:
                clock.after(0, self.rank.process, self._failed, source, "it did not reach the state")
            else:
                clock.after(ASK_AGAIN, None, self._at_source, source, life, part)
        else:
            assert isinstance(answer, int)
            self.world.point("serve", holder.life.replica_id)
            damaged, holder.life.damage = holder.life.damage, False
            clock.after(self.world.takes(20 * MS), self.rank.process, self._arrived, holder, part, answer, damaged)

    def _failed(self, source: ReplicaId, why: str) -> None:
        if not self._over:
            self.transfer.failed(source, why)
            self._go_on()

    def _arrived(self, holder: "SimRank", part: Range, content: int, damaged: bool) -> None:
        if self._over:
            return
        source = holder.life.replica_id
        if not holder.process.alive:
            self._failed(source, "it has died")
            return
        self.world.point("range", self.rank.life.replica_id)
        self._idle.add(source)
        if damaged:
            self.transfer.damaged(source, part, "damaged")
        elif self.transfer.done(source, part):
            self._got[part[0]] = content
        self._go_on()
