"""A small world for exhaustive search: the real machines of replicas of one rank, without time, with little memory.

What happens inside one replica happens at once: its main thread, its control tree, its bookkeeping. What happens between replicas
is an event of its own, in any order: a report is written, a decision is made, published late, or read, an exchange completes or
fails at one member, a fetch ends well or badly, a process dies, is known to be dead, is started again, a lease is lost and found.

A state's content is the chain of sums that went into it, so that equal contents are equal bits. A `Node` is changed only while it
is new, and is shared by all worlds that it is the same in.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from keepstep.protocol import catch_up as rank_effects
from keepstep.protocol.catch_up import Apply, Begin, LoadState, Order, RankMachine, Train
from keepstep.protocol.ids import Incarnation, Rank, ReplicaId
from keepstep.protocol.messages import Decided, Decision, Endpoint, Hello, LedgerState, Peer, Report, StateName, Verdict
from keepstep.protocol.step import LeaderMachine, Publish, StepSettings, TellDecided

NOWHERE = Endpoint(host="", ftar_port=0, state_port=0)
Content = tuple[Any, ...]
Gift = tuple[Incarnation, Content, tuple[int, ...]]
"""What a member puts into an exchange: who, computed from what, for which units. Zeros: no content, no units."""


class Node:
    """One replica."""

    def __init__(self, replica: int, life: int, steps: int, ledger: LedgerState, replicas: int) -> None:
        self.replica, self.life, self.alive = ReplicaId(replica), life, True
        self.incarnation = Incarnation(f"{'abcdefgh'[replica]}{life}")
        self.settings = StepSettings(
            replica_id=self.replica, incarnation=self.incarnation, size=1, max_steps=steps, max_pending=1
        )
        self.leader = LeaderMachine(self.settings)
        self.rank = RankMachine(self.settings, Rank(0))
        self.outbox: Report | None = None  # decided to say, not written yet
        self.written: Report | None = None
        self.leased = True
        self.left = False
        self.name: StateName | None = None  # of the tensors
        self.content: Content = (f"born {self.incarnation}",)
        self.aside: dict[StateName, Content] = {}
        self.wanted: frozenset[StateName] = frozenset()  # by readers
        self.past = -1  # the newest step that the tensors have held
        self.ring: tuple[int, tuple[Incarnation, ...]] | None = None
        self.broken = False
        self.seq = 0  # begun on the ring, and not complete here yet; 0: nothing
        self.attempt: tuple[int, Gift] | None = None
        self.wants_attempt = 0
        self.gift: Gift | None = None  # given to the ring under `seq`
        self.sums: dict[int, tuple[Gift, ...]] = {}
        self.fetch: tuple[StateName, tuple[Incarnation, ...]] | None = None
        self.fetched: Content | None = None
        self.gone: list[str] = []  # what is wrong, if anything is
        self._todo: deque[Callable[[], None]] = deque()
        self._key: tuple[Any, ...] | None = None
        hello = Hello(rank=Rank(0), endpoint=NOWHERE, layout_digest="", ledger=ledger, version="")
        self.do(lambda: self._leader_out(self.leader.on_message(hello)))

    # --- copies -----------------------------------------------------------------------------------------------

    def copy(self) -> "Node":
        """The same, to be changed."""
        new = object.__new__(Node)
        new.__dict__.update(self.__dict__)
        new.leader, new.rank = _copy(self.leader), _copy(self.rank)
        new.rank._serving = _copy(self.rank._serving)
        new.aside, new.sums, new.gone = dict(self.aside), dict(self.sums), []
        new._todo, new._key = deque(), None
        return new

    def key(self, number: Callable[[Any], int]) -> tuple[Any, ...]:
        """Equal for equal nodes. `number` numbers the values that machines hold."""
        if self._key is None:
            parts = [self.__dict__, self.leader.__dict__, self.rank.__dict__, self.rank._serving.__dict__]
            values = [value for part in parts for name, value in part.items() if name not in _NOT_STATE]
            self._key = tuple([_plain(value, number) for value in values])
        return self._key

    # --- running ----------------------------------------------------------------------------------------------

    def do(self, action: Callable[[], None]) -> None:
        """Lets something happen, and all that follows from it inside this replica."""
        self._todo.append(action)
        while self._todo:
            self._todo.popleft()()

    def on_decision(self, decision: Decision) -> None:
        self.do(lambda: self._leader_out(self.leader.on_decision(decision)))

    def on_sum(self, gifts: tuple[Gift, ...]) -> None:
        seq, self.seq = self.seq, 0
        self.sums[seq] = gifts
        self.do(lambda: self._rank_out(self.rank.on_step_done(_seq(seq))))

    def on_broken(self) -> None:
        assert self.ring is not None
        self.broken = True
        seq, self.seq = self.seq, 0
        if seq:
            self.do(lambda: self._rank_out(self.rank.on_step_failed(_seq(seq), None, "broken")))
        else:
            quorum_id = self.ring[0]
            self.do(lambda: self._rank_out(self.rank.on_ring_broken(quorum_id, None, "broken")))  # type: ignore[arg-type]

    def on_fetched(self, content: Content | None) -> None:
        assert self.fetch is not None
        (state, _), self.fetch, self.fetched = self.fetch, None, content
        failure = None if content is not None else "gone"
        self.do(lambda: self._rank_out(self.rank.on_fetched(state, failure)))

    def _leader_out(self, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self.outbox = effect.report
            else:
                message = _decided(effect.decision) if isinstance(effect, TellDecided) else effect.message
                self._todo.append(lambda message=message: self._down(message))  # type: ignore[misc]

    def _down(self, message: Any) -> None:
        if isinstance(message, Verdict) and not message.commit:
            self.sums.pop(message.seq, None)
            self.seq, self.gift = 0, None
        self._rank_out(self.rank.on_message(message))

    def _rank_out(self, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            match effect:
                case rank_effects.GiveOrder():
                    self._obey(effect.order)
                case rank_effects.ConfigureRing():
                    self.ring = (effect.quorum_id, tuple([peer.incarnation for peer in effect.peers]))
                    self.broken, self.seq, self.gift = False, 0, None
                case rank_effects.BeginExchanges():
                    self._begin(effect)
                case rank_effects.BreakRing():
                    raise AssertionError("nobody tells this leader about lost members")
                case rank_effects.StartFetch():
                    self.fetch = (effect.state, tuple([peer.incarnation for peer in effect.sources]))
                case rank_effects.CancelFetch():
                    self.fetch = self.fetched = None
                    running = self.rank.running
                    self.sums = {s: g for s, g in self.sums.items() if running is not None and s == running.seq}
                case rank_effects.Serve():
                    self.wanted = frozenset(effect.readers.values())
                    self.aside = {state: c for state, c in self.aside.items() if state in self.wanted}
                case rank_effects.SendUp():
                    up = effect.message
                    self._todo.append(lambda up=up: self._leader_out(self.leader.on_message(up)))  # type: ignore[misc]

    def _begin(self, effect: rank_effects.BeginExchanges) -> None:
        assert self.ring is not None
        assert self.ring[0] == effect.quorum_id
        self.seq, self.gift, self.wants_attempt = effect.seq, None, effect.attempt or 0
        if effect.attempt is None:
            self.gift = (self.incarnation, (), ())
        elif self.attempt is not None and self.attempt[0] == effect.attempt:
            self.gift = self.attempt[1]
        if self.broken:
            self._todo.append(self.on_broken_again)

    def on_broken_again(self) -> None:
        """The ring that an exchange is begun on is broken already."""
        if self.broken and self.seq:
            seq, self.seq = self.seq, 0
            self._rank_out(self.rank.on_step_failed(_seq(seq), None, "broken"))

    # --- the main thread --------------------------------------------------------------------------------------

    def _obey(self, order: Order) -> None:
        match order:
            case Begin():
                self._reach(order.state, self.content)
            case Train():
                if self.name != order.start:
                    self.gone.append(f"{order} is computed from {self.name}")
                self.attempt = (order.attempt, (self.incarnation, self.content, order.units))
                if self.seq and self.wants_attempt == order.attempt:
                    self.gift = self.attempt[1]
            case Apply():
                if self.name != order.decision.start:
                    self.gone.append(f"decision {order.decision.seq} is applied to {self.name}")
                self._before_write()
                gifts = self.sums.pop(order.decision.seq, ())
                if not gifts:
                    self.gone.append(f"decision {order.decision.seq} is applied without its sum")
                self._reach(order.decision.outcome, (*self.content, tuple([gift[2] for gift in gifts])))
                self._held(order.decision.outcome)
            case LoadState():
                self._before_write()
                assert self.fetched is not None
                self._reach(order.state, self.fetched)
                self.fetched = None
                self._held(order.state)
            case _:
                self.left = True
                if order.error == "":
                    return
                self.gone.append(f"{self.incarnation} leaves: {order.error}")

    def _before_write(self) -> None:
        if self.name is not None and self.name in self.wanted:
            self.aside[self.name] = self.content

    def _reach(self, name: StateName, content: Content) -> None:
        self.name, self.content, self.past = name, content, max(self.past, name.step)

    def _held(self, name: StateName) -> None:
        self._todo.append(lambda: self._rank_out(self.rank.on_held(name)))

    def serves(self, state: StateName) -> Content | str:
        """Its content, "not yet", or "gone"."""
        if self.name == state:
            return self.content
        return self.aside.get(state, "gone" if state.step < self.past else "not yet")


_NOT_STATE = {"leader", "rank", "_serving", "settings", "gone", "_todo", "_key"}


def _decided(decision: Decision) -> Decided:
    peers = [Peer(replica_id=m.replica_id, incarnation=m.incarnation, endpoint=NOWHERE) for m in decision.members]
    return Decided(decision=decision, peers=tuple(peers))


def _seq(number: int) -> Any:
    return number


def _copy(machine: Any) -> Any:
    """A machine's values are frozen, but for its own sets, lists and mappings."""
    new = object.__new__(type(machine))
    for name, value in machine.__dict__.items():
        new.__dict__[name] = value.copy() if type(value) in (set, dict, list) else value
    return new


def _plain(value: Any, number: Callable[[Any], int]) -> Any:
    kind = type(value)
    if value is None or kind in (int, bool, str):
        return value
    if kind in (set, frozenset):
        return frozenset([_plain(v, number) for v in value])
    if kind is dict:
        return frozenset([(_plain(k, number), _plain(v, number)) for k, v in value.items()])
    if kind is list:
        return tuple([_plain(v, number) for v in value])
    return number(value)
