"""`decide` in a toy world: crashes, restarts, cut leases, stale and late reports, partial completion, slow fetches.

A replica here is a dozen fields and the rules of docs/protocol.md; a state's content is the list of decisions whose sums
went into it, so that equal bits are equal tuples. The world judges by content alone and never asks the code under test:

  I1  a replica's content is what its state's name says, and equal names have equal ledgers
  I2  the units of a content are distinct, and are exactly those that its ledger calls committed
  I3  one quorum_id is one ring, and is not used again once one of its members failed to complete a step
  I4  a decision's base is a prefix of the history before it; nobody is called WORKER of a state that it does not hold
  I5  once all faults end, the job reaches its end, with equal contents, or says that no state is left, and is right

Then the same for mutants of `decide`: each must be caught. A failure prints the seed:
`python tests/properties/test_quorum_world.py SEED` (with PYTHONPATH=.) replays it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.protocol import quorum
from keepstep.protocol.errors import KeepstepError
from keepstep.protocol.ids import NO_DECISION, Incarnation, ReplicaId, Seq, UnitId
from keepstep.protocol.ledger import commit, is_committed
from keepstep.protocol.messages import Decision, Kind, LedgerState, Member, Policy, Report, Role, StateName
from keepstep.protocol.quorum import Halt, SeenReport, View, Wait, decide

SECOND = 1_000_000_000
Content = tuple[int, ...]


class Violation(AssertionError):
    """The protocol broke a promise."""


@dataclass
class Toy:
    """One replica."""

    replica_id: ReplicaId
    lives: int = 0
    alive: bool = True
    state: StateName | None = None
    content: Content | None = None  # None: not materialized
    ledger: LedgerState | None = None
    base: StateName | None = None  # being fetched
    told: Seq = NO_DECISION  # the decision that told it to fetch from `sources`
    sources: tuple[Member, ...] = ()
    pending: list[Seq] = field(default_factory=list)  # committed while fetching, to be replayed
    running: Decision | None = None
    answered: int = -1
    held: tuple[UnitId, ...] = ()

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.replica_id}.{self.lives}")

    def member(self, decision: Decision) -> Member | None:
        return decision.member(self.replica_id, self.incarnation)


class World:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        size = rng.choice([2, 3, 4])
        self.policy = Policy(
            num_replicas=size,
            min_replicas=rng.choice([1, 1, 1, 2]),
            start_wait_ns=rng.choice([0, SECOND]),
            straggler_ns=rng.choice([0, 2 * SECOND]),
            member_grace_ns=rng.choice([0, SECOND // 20]),
            join_wait_ns=rng.choice([0, 0, SECOND]),
            restore_wait_ns=rng.choice([0, 3 * SECOND]),
            finish_wait_ns=rng.choice([0, SECOND]),
            ancestry_max=rng.choice([1, 3, 32]),
            units_per_worker=rng.choice([1, 2]),
        )
        stream = rng.random() < 0.3
        self.initial = LedgerState(
            policy="stream" if stream else "pool",
            cursors=(0,) * size if stream else (),
            total=rng.choice([15, 60, 200, 200]),
        )
        self.toys = [Toy(ReplicaId(i)) for i in range(size)]
        self.calm = rng.choice([0.1, 0.3, 0.5])  # how often a whole round goes by without a new fault
        self.crashes = rng.choice([0.01, 0.02, 0.04])
        self.now = 0
        self.last: Decision | None = None
        self.history: dict[Seq, Decision] = {}
        self.store: dict[ReplicaId, SeenReport] = {}
        self.on_the_way: list[Report] = []
        self.staged: Decision | None = None  # computed, not published
        self.dead: set[Incarnation] = set()
        self.adopted: dict[Seq, set[Incarnation]] = {}
        self.completed: dict[Seq, set[Incarnation]] = {}
        self.serving: dict[tuple[Incarnation, StateName], Content] = {}
        self.contents: dict[StateName, Content] = {}
        self.ledgers: dict[StateName, LedgerState | None] = {}

    # --- what a state's name says ---

    def content_of(self, name: StateName) -> Content:
        if name not in self.contents:
            before = () if name.step == 0 else self.content_of(self.history[name.lineage].start)
            self.contents[name] = (*before, -name.lineage if name.step == 0 else name.lineage)
        return self.contents[name]

    def units_of(self, content: Content) -> list[UnitId]:
        return [u for seq in content[1:] for m in self.history[Seq(seq)].members for u in m.units]

    # --- events ---

    def report(self, toy: Toy) -> None:
        """Whoever reports gives up what it was doing: it can no longer complete the decision that it answers."""
        toy.running = None
        toy.answered = answers = self.last.seq if self.last else NO_DECISION
        its_ledger = toy.ledger if toy.state else self.initial
        self.on_the_way.append(
            Report(
                replica_id=toy.replica_id,
                incarnation=toy.incarnation,
                answers=answers,
                state=toy.state,
                materialized=toy.content is not None,
                ledger=its_ledger,
                held_units=toy.held,
                finished=toy.state is not None and not self.open_units(its_ledger),
            )
        )

    def open_units(self, of: LedgerState | None) -> list[int]:
        assert of is not None
        assert of.total is not None
        return [u for u in range(of.total) if not is_committed(of, UnitId(u))]

    def deliver(self) -> None:
        if self.on_the_way:
            report = self.on_the_way.pop(0)
            self.store[report.replica_id] = SeenReport(report=report, seen_at=self.now)

    def look(self, seen: set[ReplicaId], *, all_dead: bool) -> Decision | Wait | Halt:
        dead = frozenset(i for i in self.dead if all_dead or self.rng.random() < 0.5)
        view = View(
            last=self.last,
            last_seen_at=self.now,
            reports={i: s for i, s in self.store.items() if i in seen},
            dead=dead,
            announced=frozenset()
            if all_dead
            else frozenset(t.replica_id for t in self.toys if self.rng.random() < 0.1),
        )
        return decide(view, self.policy, now=self.now)

    def publish(self, decision: Decision) -> None:
        """Compare-and-swap: only what was computed from the last decision counts."""
        if decision.seq != (self.last.seq if self.last else 0) + 1:
            return
        self.judge_decision(decision)
        self.last = self.history[decision.seq] = decision

    def adopt(self, toy: Toy) -> None:
        decision = self.last
        if decision is None or decision.kind is Kind.END or decision.seq <= toy.answered:
            return
        me = toy.member(decision)
        if me is None or toy.incarnation in self.adopted.get(decision.seq, ()):
            return
        if me.role is Role.WORKER:
            if toy.state is None and decision.base == decision.seq:
                toy.state, toy.content, toy.ledger = decision.start, (-decision.seq,), self.initial
            elif toy.state != decision.start or toy.content is None:
                raise Violation(f"{toy.incarnation} is WORKER of {decision.start} but holds {toy.state}")
            self.serving[toy.incarnation, decision.start] = toy.content or ()
        elif me.fetch:
            toy.state, toy.base, toy.content, toy.pending = decision.start, decision.start, None, []
            toy.ledger, toy.sources, toy.told = decision.ledger, decision.workers, decision.seq
        elif toy.state not in (
            None,
            decision.start,
        ):  # None: its fetch failed after it had reported; it contributes zeros
            raise Violation(f"{toy.incarnation} is to go on fetching {decision.start} but reported {toy.state}")
        toy.running, toy.held = decision, me.units
        self.adopted.setdefault(decision.seq, set()).add(toy.incarnation)
        if decision.kind is Kind.GATHER and (toy.content is not None or toy.state is None):
            self.report(toy)

    def complete(self, toy: Toy) -> None:
        """An exchange completes here once everybody has contributed, whatever has become of the others since."""
        decision = toy.running
        if decision is None or decision.kind is not Kind.TRAIN:
            return
        if self.adopted[decision.seq] < {m.incarnation for m in decision.members}:
            return
        toy.running = None
        self.completed.setdefault(decision.seq, set()).add(toy.incarnation)
        if toy.state is None:
            return
        assert toy.ledger is not None
        if toy.content is not None:
            toy.content = (*toy.content, decision.seq)
        else:
            toy.pending.append(decision.seq)
        toy.state = decision.outcome
        toy.ledger = commit(toy.ledger, [u for m in decision.members for u in m.units])
        toy.held = quorum.speculate(decision, toy.replica_id)

    def fetch(self, toy: Toy) -> None:
        if toy.content is not None or toy.base is None:
            return
        living = {t.incarnation: t for t in self.toys if t.alive}
        sources = [living[m.incarnation] for m in toy.sources if m.incarnation in living]
        served = [self.serving.get((t.incarnation, toy.base)) for t in sources]
        got = next((content for content in served if content is not None), None)
        if got is not None:
            toy.content, toy.pending, toy.base = (*got, *toy.pending), [], None
        elif all(t.answered >= toy.told for t in sources):  # dead, or never took part: it will not serve that state
            toy.state, toy.base, toy.pending, toy.ledger, toy.held = None, None, [], None, ()
        else:
            return
        if toy.running is None or toy.running.kind is Kind.GATHER or toy.state is None:
            self.report(toy)

    def crash(self, toy: Toy) -> None:
        toy.alive = False
        self.dead.add(toy.incarnation)
        if self.rng.random() < 0.7:
            self.store.pop(toy.replica_id, None)
        if self.rng.random() < 0.5:
            self.on_the_way = [r for r in self.on_the_way if r.incarnation != toy.incarnation]

    def restart(self, toy: Toy) -> None:
        lives = toy.lives + 1
        self.toys[toy.replica_id] = Toy(toy.replica_id, lives=lives)

    # --- the judge ---

    def judge_decision(self, new: Decision) -> None:
        before = self.last
        base = self.content_of(new.start)
        if before is not None:
            longest = (*self.content_of(before.start), before.seq)
            fresh_start = new.step == 0 and new.base == new.seq
            if base != longest[: len(base)] and not (fresh_start and before.step == 0):
                raise Violation(f"decision {new.seq} starts from {base}, which is not in the history {longest}")
        done = self.units_of(base)
        issued = [u for m in new.members for u in m.units]
        if len(set(issued)) != len(issued) or set(issued) & set(done):
            raise Violation(f"decision {new.seq} issues {issued} after {done}")
        if any(m.units for m in new.members if m.role is not Role.WORKER):
            raise Violation(f"decision {new.seq} gives units to a replica that catches up")
        if new.kind is Kind.TRAIN and not (issued and len(new.workers) >= self.policy.min_replicas):
            raise Violation(f"decision {new.seq} trains nothing or with too few: {new}")
        if new.kind is Kind.END and (len(done) != self.initial.total or new.workers != new.members):
            raise Violation(f"decision {new.seq} ends the job after {done}")
        for old in self.history.values():
            if old.kind is Kind.TRAIN and new.kind is Kind.TRAIN and old.quorum_id == new.quorum_id:
                self.judge_ring(old, new)

    def judge_ring(self, old: Decision, new: Decision) -> None:
        ring = [m.incarnation for m in old.members]
        if [m.incarnation for m in new.members] != ring:
            raise Violation(f"decisions {old.seq} and {new.seq} share quorum_id {old.quorum_id} but not their members")
        if self.completed.get(old.seq, set()) != set(ring):
            raise Violation(f"quorum_id {old.quorum_id} goes on, but not everybody completed decision {old.seq}")

    def judge(self, toy: Toy) -> None:
        if not toy.alive or toy.state is None or toy.content is None:
            return
        expected = self.content_of(toy.state)
        if toy.content != expected:
            raise Violation(f"{toy.incarnation} at {toy.state} holds {toy.content}, not {expected}")
        if toy.state not in self.ledgers:
            self.ledgers[toy.state] = toy.ledger
            self.judge_ledger(toy.content, toy.ledger)
        if self.ledgers[toy.state] != toy.ledger:
            raise Violation(f"two ledgers for {toy.state}")

    def judge_ledger(self, content: Content, of: LedgerState | None) -> None:
        assert of is not None
        assert of.total is not None
        units = self.units_of(content)
        committed = {u for u in range(of.total) if is_committed(of, UnitId(u))}
        if len(set(units)) != len(units) or set(units) != committed:
            raise Violation(f"trained {units}, but the ledger says {sorted(committed)}")


def one_event(world: World) -> None:
    rng = world.rng
    toy = rng.choice(world.toys)
    dice = rng.random()
    world.now += rng.choice([0, SECOND // 100, SECOND // 10, SECOND])
    if rng.random() < world.calm:
        return hurried_round(world)
    if not toy.alive:
        if dice < 0.8:
            world.restart(toy)
        return
    if dice < 0.16:
        world.report(toy)
    elif dice < 0.26:
        world.deliver()
    elif dice < 0.30:
        world.store.pop(toy.replica_id, None)  # its lease ran out: cut off, not dead
    elif dice < 0.42:
        answer = world.look({t.replica_id for t in world.toys if rng.random() < 0.85}, all_dead=False)
        if isinstance(answer, Decision):
            world.staged = answer
    elif dice < 0.52:
        if world.staged is not None:
            world.publish(world.staged)
            world.staged = None
    elif dice < 0.70:
        world.adopt(toy)
    elif dice < 0.86:
        world.complete(toy)
    elif dice < 1 - world.crashes:
        world.fetch(toy)
    else:
        world.crash(toy)
    world.judge(toy)


def hurried_round(world: World) -> None:
    """Most of one step, in the usual order; each part may be left undone."""
    rng = world.rng
    alive = [t for t in world.toys if t.alive]
    rng.shuffle(alive)

    def each(action: Callable[[Toy], None], likely: float) -> None:
        for toy in alive:
            if rng.random() < likely:
                action(toy)
                world.judge(toy)

    each(lambda toy: world.report(toy) if toy.running is None else None, 0.95)
    while world.on_the_way:
        world.deliver()
    world.now += rng.choice([0, SECOND // 10, 3 * SECOND])
    answer = world.look({t.replica_id for t in world.toys if rng.random() < 0.95}, all_dead=False)
    if isinstance(answer, Decision):
        world.publish(answer)
    each(world.adopt, 0.97)
    each(world.fetch, 0.7)
    each(world.complete, 0.9)


def heal(world: World) -> str:
    """All faults end. Says how the job went on: "end" or "no state"; raises Violation if it did neither."""
    for toy in list(world.toys):
        if not toy.alive:
            world.restart(toy)
    world.store.clear()
    world.on_the_way.clear()
    everyone = {t.replica_id for t in world.toys}
    for toy in world.toys:
        world.report(toy)
    answer: Decision | Wait | Halt | None = None
    for _ in range(300):
        while world.on_the_way:
            world.deliver()
        world.now += 5 * SECOND
        answer = world.look(everyone, all_dead=True)
        if isinstance(answer, Halt):
            return judge_halt(world)
        if isinstance(answer, Decision):
            world.publish(answer)
            if answer.kind is Kind.END:
                return judge_end(world, answer)
        for action in (world.adopt, world.fetch, world.complete):
            for toy in world.toys:
                action(toy)
                world.judge(toy)
        for toy in world.toys:  # completed, or not a member
            if world.last is not None and toy.running is None and toy.answered < world.last.seq:
                world.report(toy)
    raise Violation(f"no progress: {world.last} and then {answer}")


def judge_halt(world: World) -> str:
    assert world.last is not None
    longest = (*world.content_of(world.last.start), world.last.seq)
    if world.policy.ancestry_max < 32:
        return "no state"  # such a short memory may have forgotten a state that lives
    for toy in world.toys:
        if toy.content and toy.content == longest[: len(toy.content)] and len(longest) - len(toy.content) < 32:
            raise Violation(f"the job gave up, but {toy.incarnation} holds {toy.state}")
    return "no state"


def judge_end(world: World, end: Decision) -> str:
    contents = {t.content for t in world.toys}
    if len(contents) != 1 or len(end.members) != len(world.toys):
        raise Violation(f"the job ended with {contents}")
    (content,) = contents
    assert content is not None
    if sorted(world.units_of(content)) != list(range(world.initial.total or 0)):
        raise Violation(f"at the end the units are {sorted(world.units_of(content))}")
    return "end"


def play(seed: int, events: int = 250) -> str:
    world = World(random.Random(seed))
    try:
        for _ in range(events):
            one_event(world)
            if world.last is not None and world.last.kind is Kind.END:
                return "end under faults"
        return heal(world)
    except (AssertionError, KeepstepError) as error:
        where = world.last.reason if world.last else "no decision"
        raise Violation(f"seed {seed}: {error}\nlast decision: {where}") from error


SEEDS = 400
