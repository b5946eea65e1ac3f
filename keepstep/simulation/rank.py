"""One simulated rank: the real rank machine and the real `Attempts`, with made-up threads around them.

Mirrors `runtime.rank.RankRuntime` (`_on_down`, `_on_engine`, `_carry_out` and the small parts under it) and, for the main thread,
the loop of `training.training.Training` (`begin`, `_commit`, `_apply`, `_load`, `_leave`): one order at a time, buckets filled
by Train, sums taken through the optimizer by Apply. The main threads of a replica meet in Train, as in FSDP's collectives.
"""

from collections import deque
from typing import TYPE_CHECKING, Any, cast

from keepstep.ports import ExchangeBuffer
from keepstep.protocol import catch_up as effects
from keepstep.protocol.catch_up import Apply, Begin, Leave, LoadState, Order, RankMachine, Train
from keepstep.protocol.errors import InvariantViolation
from keepstep.protocol.ids import LEADER, QuorumId, Rank, ReplicaId, Seq
from keepstep.protocol.messages import Downward, Endpoint, Hello, Lags, Role, Said, Saved, StateName, Verdict, Vote
from keepstep.protocol.pace import KeepsUp, Pace, Stuck
from keepstep.runtime.attempts import Attempts
from keepstep.simulation.clock import MS, Process
from keepstep.simulation.disk import FileLoad, Save
from keepstep.simulation.fabric import Buffer, Contribution, SimEngine
from keepstep.simulation.transfer import Fetch, Holding

if TYPE_CHECKING:
    from keepstep.simulation.life import Life
    from keepstep.simulation.world import World

Effects = tuple[effects.Effect, ...]
Given = tuple[Order, tuple[Buffer, ...], int | None]
"""An order with its reduced buckets, and with the content of a fetched state."""

NOWHERE = Endpoint(host="", ftar_port=0, state_port=0)


class SimRank:
    """One process of one life of a replica."""

    def __init__(self, world: "World", life: "Life", number: Rank) -> None:
        plan = world.plan
        self.world, self.life, self.number = world, life, number
        self.process: Process = Process(f"{life.incarnation}/{number}", life.drift, life.offset)
        self.machine = RankMachine(life.settings, number)
        self.attempts = Attempts()
        self.pace = Pace(plan.pace, world.learned.get((life.replica_id, number)))
        self._due: int | None = None  # when the pace is looked at
        self.engine = SimEngine(self)
        self.holding: Holding = Holding(hash((plan.seed, life.replica_id, life.number, number)), plan.copies)
        self.left = False
        self._fetch: Fetch | FileLoad | None = None
        self._fetched: int | None = None
        self._orders: deque[Given] = deque()
        self._busy = False
        self._given = 0
        self.computed_at = 0
        self._hangs = False  # the main thread
        self._hung: list[tuple[Any, tuple[Any, ...]]] = []  # what it would have done meanwhile

    def say_hello(self) -> None:
        plan = self.world.plan
        hello = Hello(rank=self.number, endpoint=NOWHERE, layout_digest="layout", ledger=plan.ledger, version="1")
        self.life.send_up(self, hello)

    # --- events of the control loop ---------------------------------------------------------------------------

    def on_down(self, message: Downward) -> None:
        self.world.point("told", self.life.replica_id)
        if type(message) is Verdict and not message.commit:
            self.attempts.drop(message.seq)
        self._run(self.machine.on_message(message))

    def on_step_done(self, seq: Seq) -> None:
        self._run(self.machine.on_step_done(seq))

    def on_step_failed(self, seq: Seq, suspect: ReplicaId | None, why: str, *, own_link: bool) -> None:
        self._run(self.machine.on_step_failed(seq, suspect, why, own_link=own_link))

    def on_ring_broken(self, quorum_id: QuorumId, suspect: ReplicaId | None, why: str, *, own_link: bool) -> None:
        self._run(self.machine.on_ring_broken(quorum_id, suspect, why, own_link=own_link))

    def _on_fetched(self, fetch: Fetch | FileLoad) -> None:
        if fetch is not self._fetch:
            return  # `cancel` makes sure of that
        self._fetched = fetch.content
        if self.world.talks:
            self._say("has fetched it" if fetch.content is not None else f"can't fetch it: {fetch.why}")
        self._run(self.machine.on_fetched(fetch.state, None if fetch.content is not None else fetch.why))

    def _on_held(self, state: StateName) -> None:
        self._done()
        self._run(self.machine.on_held(state))

    # --- is the main thread in time? --------------------------------------------------------------------------

    def _watch(self) -> None:
        due = self.pace.next_deadline()
        if due is not None and not self.left and (self._due is None or due < self._due):
            self._due = due
            self.world.clock.after_local(max(0, due - self._now), self.process, self._on_time, due)

    def _on_time(self, due: int) -> None:
        if due != self._due:
            return
        self._due = None
        for effect in self.pace.on_time(now=self._now):
            self._send_up(Lags(rank=self.number, slow=True, stuck=type(effect) is Stuck))
        self._keep()
        self._watch()

    def _done(self) -> None:
        """The main thread has carried out an order."""
        for effect in self.pace.on_done(now=self._now):
            if type(effect) is KeepsUp:
                self._send_up(Lags(rank=self.number, slow=False))
        self._keep()
        self._watch()

    def _keep(self) -> None:
        """For the next life."""
        self.world.learned[self.life.replica_id, self.number] = self.pace.learned

    @property
    def _now(self) -> int:
        return self.world.clock.local(self.process)

    # --- effects ----------------------------------------------------------------------------------------------

    def _run(self, out: Effects) -> None:
        for effect in out:
            match effect:
                case effects.GiveOrder():
                    self._give(effect.order)
                case effects.ConfigureRing():
                    self.engine.configure(effect.quorum_id, effect.peers)
                case effects.BreakRing():
                    self.engine.abort(effect.quorum_id, effect.suspect, effect.reason)
                case effects.BeginExchanges():
                    self._begin(effect)
                case effects.StartFetch():
                    self._start_fetch(effect)
                case effects.CancelFetch():
                    self._cancel_fetch()
                case effects.Serve():
                    self.holding.serve(effect.readers)
                case effects.SaveState():
                    Save(self, effect.state, effect.ledger, self._on_saved)
                case effects.SendUp():
                    self._send_up(effect.message)

    def _start_fetch(self, effect: effects.StartFetch) -> None:
        self.world.point("fetch", self.life.replica_id)
        if effect.restore is not None:
            self._fetch = FileLoad(self, effect.state, effect.restore, self._on_fetched)
            return
        if self.world.talks:
            sources = ", ".join(peer.incarnation for peer in effect.sources) or "nobody"
            self._say(f"fetches state {effect.state.step}/{effect.state.lineage} from {sources}")
        self._fetch = Fetch(self, effect.state, effect.sources, self._on_fetched)

    def _on_saved(self, state: StateName, ok: bool, reason: str) -> None:
        self._send_up(Saved(rank=LEADER, state=state, ok=ok, reason=reason))

    def _send_up(self, message: Said) -> None:
        if type(message) is Vote:
            self.world.point("vote", self.life.replica_id)
            if self.world.talks and not message.yes:
                self._say(f"votes no on decision {message.seq}: {message.reason}")
        self.life.send_up(self, message)

    def _begin(self, effect: effects.BeginExchanges) -> None:
        exchanges = self.world.plan.exchanges
        self.world.point("begin", self.life.replica_id)
        self.engine.begin(effect.seq, effect.quorum_id, exchanges)
        if effect.attempt is None:
            zeros = [Buffer(Contribution(self.life.incarnation)) for _ in range(exchanges)]
            self.attempts.run_zeros(self.engine, effect.seq, tuple(cast("list[ExchangeBuffer]", zeros)))
        else:
            self.attempts.run(self.engine, effect.seq, effect.attempt)

    def _give(self, order: Order) -> None:
        reduced: tuple[Any, ...] = ()
        fetched = None
        if type(order) is Apply:
            reduced = self.attempts.take(order.decision.seq)
        elif type(order) is LoadState:
            fetched, self._fetched = self._fetched, None
            assert fetched is not None
        self.world.judge.on_order(self, self._given, order)
        self._given += 1
        self._orders.append((order, reduced, fetched))
        if type(order) not in (Begin, Leave):
            self.pace.on_order(trains=type(order) is Train, now=self._now)
            self._watch()
        self._work()

    def _cancel_fetch(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()
        self._fetch = self._fetched = None
        running = self.machine.running
        self.attempts.drop_all_but(running.seq if running is not None else None)

    # --- the main thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._busy or not self._orders:
            return
        self._busy = True
        order, reduced, fetched = self._orders.popleft()
        slow = self.life.main_slowness
        match order:
            case Begin():
                self.holding.after_write(order.state)
                self.world.judge.on_initial(self, order.state, self.holding.content)
                self._next()
            case Train():
                self.life.meet(order.attempt, self, order)
            case Apply():
                self._apply(order, reduced, slow)
            case LoadState():
                assert fetched is not None
                self.world.point("load", self.life.replica_id)
                self.holding.before_write()
                self._after(30 * MS * slow, self._loaded, order, fetched)
            case Leave():
                self.left = True
                self.life.on_left(self, order)

    def hang(self) -> None:
        """The main thread makes no progress until `unhang`; everything else of the process lives."""
        self._hangs = True

    def unhang(self) -> None:
        self._hangs = False
        for action, args in self._hung:
            self.world.clock.after(0, self.process, action, *args)
        self._hung.clear()

    def _put_off(self, action: Any, *args: Any) -> bool:
        """Whether the main thread hangs, so that this happens later."""
        if self._hangs:
            self._hung.append((action, args))
        return self._hangs

    def _after(self, typically: int, action: Any, *args: Any) -> None:
        self.world.clock.after(self.world.takes(typically), self.process, action, *args)

    def _next(self) -> None:
        self._busy = False
        self._work()

    def computed(self, order: Train) -> None:
        """Every rank of the replica takes part in forward and backward: the buckets fill."""
        if self._put_off(self.computed, order):
            return
        self.computed_at = self.world.clock.now
        base = self.holding.content
        if self.holding.live != order.start:
            raise InvariantViolation(f"{order} is to be computed from {self.holding.live}")
        for number in range(self.world.plan.exchanges):
            content = hash((base, order.units, self.number, number))
            given = Contribution(self.life.incarnation, order.units, base, content)
            self.attempts.submit(self.engine, order.attempt, number, cast(ExchangeBuffer, Buffer(given)))
        self.machine.on_computed(order.attempt)
        self._done()
        self._next()

    def _apply(self, order: Apply, reduced: tuple[Buffer, ...], slow: int) -> None:
        decision = order.decision
        self.world.point("apply", self.life.replica_id)
        if self.holding.live != decision.start:
            raise InvariantViolation(
                f"decision {decision.seq} starts from {decision.start}, we hold {self.holding.live}"
            )
        self.world.judge.on_apply(self, decision.seq, [buffer.sum for buffer in reduced])
        self.holding.before_write()
        self._after(5 * MS * slow, self._applied, order, reduced)

    def _applied(self, order: Apply, reduced: tuple[Buffer, ...]) -> None:
        if self._put_off(self._applied, order, reduced):
            return
        before, outcome = self.holding.content, order.decision.outcome
        self.holding.content = hash((before, len(order.decision.workers), *[buffer.sum for buffer in reduced]))
        self.holding.after_write(outcome)
        if self.world.talks and self._behind(order):
            self._say(f"has replayed decision {order.decision.seq}")
        units = reduced[0].units if reduced else ()
        self.world.judge.on_state(self, outcome, self.holding.content, order.ledger, before=before, units=units)
        self._after(MS // 10, self._on_held, outcome)
        self._next()

    def _loaded(self, order: LoadState, fetched: int) -> None:
        if self._put_off(self._loaded, order, fetched):
            return
        self.holding.content = fetched
        self.holding.after_write(order.state)
        self.world.judge.on_state(self, order.state, fetched, order.ledger)
        if self.world.talks:
            self._say(f"has loaded state {order.state.step}/{order.state.lineage}")
        self._after(MS // 10, self._on_held, order.state)
        self._next()

    def _behind(self, order: Apply) -> bool:
        me = order.decision.member(self.life.replica_id, self.life.incarnation)
        return me is not None and me.role is Role.CATCHING_UP

    def _say(self, text: str) -> None:
        self.world.say(self.life.replica_id, f"rank {self.number} {text}")

    @property
    def is_leader(self) -> bool:
        return self.number == LEADER
