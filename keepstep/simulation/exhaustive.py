"""Every order of events in a small world: `python -m keepstep.simulation.exhaustive --replicas 3 --steps 2 --faults 2`.

Free events may always happen: reports are written and decisions read, exchanges complete, the dead are found out and started
again. Faults are counted: a death, a link that breaks, a lease that runs out, a wait that is over though somebody is only
slow, a decision published later than it was made. When nothing else can happen any more, waits are over for free; a world
where then still nothing can happen has stopped, which is as much a violation as a wrong bit. Worlds that are equal are visited
once.

Judged in each: equal names, equal contents (I1); units once, and as the ledger says (I2); whole sums of one decision (I3); a
base on the chain (I4); an end where everybody holds the final state, or where nothing was left to hold (I5).
"""

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from keepstep.protocol.errors import KeepstepError
from keepstep.protocol.ids import Incarnation, ReplicaId, UnitId
from keepstep.protocol.ledger import is_committed
from keepstep.protocol.messages import Decision, Kind, LedgerState, Policy, Report, StateName
from keepstep.protocol.quorum import Halt, SeenReport, View, decide
from keepstep.simulation.judge import Violation
from keepstep.simulation.small_model import Content, Gift, Node

REMEMBERED = 100_000
EARLY, LATE = 1, 10**15  # ns: no wait is over; every wait is over


@dataclass(frozen=True, slots=True)
class Small:
    """One world: what is so, and what has been decided."""

    nodes: tuple[Node, ...]
    reports: tuple[Report | None, ...]
    dead: frozenset[Incarnation]
    decisions: tuple[Decision, ...]
    faults: int
    staged: Decision | None = None
    given: frozenset[tuple[int, int, Gift]] = frozenset()  # (quorum_id, seq): what is in the rings

    @property
    def last(self) -> Decision | None:
        return self.decisions[-1] if self.decisions else None


@dataclass
class Counts:
    """What a search came to."""

    states: int = 0
    events: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    complete: bool = True

    def __str__(self) -> str:
        endings = ", ".join(f"{n} {what}" for what, n in sorted(self.endings.items()))
        how = "every one visited" if self.complete else "NOT ALL VISITED"
        return f"exhaustive: {self.states} states, {self.events} events, {how}; ends: {endings}"


class Search:
    """Visits every world that can come of one beginning. Raises Violation with the events that lead there."""

    def __init__(self, *, replicas: int, steps: int, faults: int, fine: bool = True, states_max: int = 10**9) -> None:
        self.fine = fine
        self.steps, self.faults, self.states_max = steps, faults, states_max
        self.ledger = LedgerState(total=10 * replicas)
        self.policy = Policy(num_replicas=replicas)
        self.replicas = replicas
        self._numbers: dict[Any, int] = {}
        self._by_id: dict[int, tuple[Any, int]] = {}
        self.counts = Counts()

    def run(self) -> Counts:
        """Visits them all."""
        gc.disable()  # worlds share most of what they are made of, and nothing refers back
        try:
            return self._run()
        finally:
            gc.enable()

    def _run(self) -> Counts:
        """Depth first: a path is a list of names."""
        nodes = tuple([Node(i, 0, self.steps, self.ledger, self.replicas) for i in range(self.replicas)])
        first = self._settle(Small(nodes, (None,) * self.replicas, frozenset(), (), 0))
        seen = {self._key(first)}
        stack: list[tuple[Small, tuple[Any, ...]]] = [(first, ())]
        while stack:
            world, path = stack.pop()
            self.counts.states += 1
            if self.counts.states >= self.states_max:
                self.counts.complete = False
                break
            try:
                ending = self._visit(world, path, seen, stack)
            except (KeepstepError, AssertionError) as error:
                raise Violation(f"{type(error).__name__}: {error}\n  after {' '.join(_names(path))}") from error
            if ending:
                self.counts.endings[ending] = self.counts.endings.get(ending, 0) + 1
        return self.counts

    def _visit(self, world: Small, path: Any, seen: set[int], stack: list[Any]) -> str:
        if world.last is not None and world.last.kind is Kind.END:
            return self._judge_end(world)
        moved, halted = False, ""
        for late in (False, True):
            if late and moved:
                break
            for name, what in self._events(world, late):
                if isinstance(what, Halt):
                    halted = self._judge_halt(world, what)
                    continue
                after = self._settle(what)
                moved = moved or after.faults == world.faults
                self.counts.events += 1
                key = self._key(after)
                if key not in seen:
                    seen.add(key)
                    stack.append((after, (name, path)))
        if not moved and not halted:
            raise Violation("nothing can happen any more, and the job has not ended")
        return halted if not moved else ""

    def _settle(self, world: Small) -> Small:
        """In the coarse model, what is said is written and what is decided is read at once, by all who have a lease."""
        if self.fine:
            return world
        for i in range(self.replicas):
            while (node := world.nodes[i]).alive and node.leased:
                if node.outbox is not None:
                    world = self._write(world, i)
                elif world.last is not None and world.last.seq > node.leader.last_seen and not node.leader.over:
                    world = self._read(world, i)
                else:
                    break
        return world

    # --- events -----------------------------------------------------------------------------------------------

    def _events(self, world: Small, waits_over: bool) -> Iterator[tuple[str, "Small | Halt"]]:
        can_fail = world.faults < self.faults
        yield from self._decisions(world, waits_over, can_fail)
        if waits_over:
            for i in range(self.replicas):
                yield from self._fetch_events(world, i, waits_over)
            return
        for i, node in enumerate(world.nodes):
            if not node.alive:
                if node.incarnation not in world.dead:
                    yield f"mark({i})", replace(world, dead=world.dead | {node.incarnation})
                else:
                    new = Node(i, node.life + 1, self.steps, self.ledger, self.replicas)
                    yield f"restart({i})", self._with(world, i, new)
                continue
            if self.fine and node.outbox is not None:
                yield f"write({i})", self._write(world, i)
            if not node.leased:
                found = node.copy()
                found.leased, found.outbox = True, found.outbox or found.written
                yield f"lease({i})", self._with(world, i, found)
            if self.fine and world.last is not None and world.last.seq > node.leader.last_seen:
                yield f"read({i})", self._read(world, i)
            yield from self._ring_events(world, i, can_fail)
            yield from self._fetch_events(world, i, waits_over)
            if can_fail:
                dead = node.copy()
                dead.alive = False
                yield f"crash({i})", replace(self._with(world, i, dead), faults=world.faults + 1)
                if world.reports[i] is not None and node.leased:
                    cut = node.copy()
                    cut.leased = False
                    gone = replace(self._with(world, i, cut), faults=world.faults + 1)
                    yield f"expire({i})", replace(gone, reports=_put(world.reports, i, None))

    def _decisions(self, world: Small, waits_over: bool, can_fail: bool) -> Iterator[tuple[str, "Small | Halt"]]:
        if world.staged is not None and world.staged.seq == len(world.decisions) + 1:
            yield "publish", self._publish(world, world.staged)
        if not any(node.alive for node in world.nodes):
            return
        reports = {ReplicaId(i): SeenReport(report=r, seen_at=0) for i, r in enumerate(world.reports) if r is not None}
        announced = frozenset(node.replica for node in world.nodes)
        view = View(last=world.last, last_seen_at=0, reports=reports, dead=world.dead, announced=announced)
        answer = decide(view, self.policy, now=LATE if waits_over else EARLY)
        if isinstance(answer, Halt):
            yield "halt", answer
        elif isinstance(answer, Decision):
            yield "decide", self._publish(world, answer)
            if can_fail and world.staged is None and not waits_over:
                yield "stage", replace(world, staged=answer, faults=world.faults + 1)
        if not waits_over and can_fail:
            hasty = decide(view, self.policy, now=LATE)
            if isinstance(hasty, Decision) and hasty != answer:
                yield "hurry", replace(self._publish(world, hasty), faults=world.faults + 1)

    def _ring_events(self, world: Small, i: int, can_fail: bool) -> Iterator[tuple[str, "Small | Halt"]]:
        node = world.nodes[i]
        if node.ring is None or (len(node.ring[1]) == 1 and not node.seq):
            return
        quorum_id, lives = node.ring
        if node.seq and not node.broken:
            gifts = {g[0]: g for q, s, g in world.given if q == quorum_id and s == node.seq}
            if all(life in gifts for life in lives):
                new = node.copy()
                self._judge_sum(world, node, tuple([gifts[life] for life in lives]))
                new.on_sum(tuple([gifts[life] for life in lives]))
                yield f"sum({i})", self._with(world, i, new)
        if node.broken or len(lives) == 1:
            return
        disturbed = any(self._disturbs(world, quorum_id, life) for life in lives if life != node.incarnation)
        if (disturbed and node.seq) or can_fail:
            new = node.copy()
            new.on_broken()
            after = self._with(world, i, new)
            yield f"break({i})", after if disturbed and node.seq else replace(after, faults=world.faults + 1)

    def _disturbs(self, world: Small, quorum_id: int, life: Incarnation) -> bool:
        """A member is dead, has gone over to another ring, or has seen this one break: others may notice."""
        node = next((n for n in world.nodes if n.incarnation == life), None)
        if node is None or not node.alive:
            return True
        ring = node.ring
        return ring is not None and (ring[0] > quorum_id or (ring[0] == quorum_id and node.broken))

    def _fetch_events(self, world: Small, i: int, waits_over: bool) -> Iterator[tuple[str, "Small | Halt"]]:
        node = world.nodes[i]
        if node.fetch is None or not node.alive:
            return
        state, sources = node.fetch
        living = [n for n in world.nodes if n.alive and n.incarnation in sources]
        answers = [n.serves(state) for n in living]
        found = next((a for a in answers if isinstance(a, tuple)), None)
        if (
            found is not None or waits_over or all(a == "gone" for a in answers)
        ):  # "not yet" is waited for, but not for ever
            new = node.copy()
            new.on_fetched(found)
            yield f"fetched({i})" if found is not None else f"unfetched({i})", self._with(world, i, new)

    def _with(self, world: Small, i: int, new: Node) -> Small:
        """The world with another node in it; what that gives to its ring is there to stay, and what it says is judged."""
        self._judge_node(world, new)
        given = world.given
        if new.alive and new.ring is not None and new.seq and new.gift is not None:
            given = given | {(new.ring[0], new.seq, new.gift)}
        return replace(world, nodes=_put(world.nodes, i, new), given=given)

    def _read(self, world: Small, i: int) -> Small:
        assert world.last is not None
        new = world.nodes[i].copy()
        new.on_decision(world.last)
        return self._with(world, i, new)

    def _write(self, world: Small, i: int) -> Small:
        new = world.nodes[i].copy()
        report, new.outbox = new.outbox, None
        new.written, new.leased = report, True
        return replace(self._with(world, i, new), reports=_put(world.reports, i, report))

    def _publish(self, world: Small, decision: Decision) -> Small:
        self._judge_decision(world, decision)
        decisions = (*world.decisions, replace(decision, reason=""))
        return replace(world, decisions=decisions, staged=None)  # whatever waits to be published comes too late

    # --- the judge --------------------------------------------------------------------------------------------

    def _expected(self, world: Small, name: StateName) -> Content | None:
        """What a name stands for, without the initial content; None: the beginning has any content."""
        decision = world.decisions[name.lineage - 1]
        if name.step == 0 and decision.base == name.lineage:
            return ()
        before = self._expected(world, decision.start)
        return None if before is None else (*before, tuple([m.units for m in decision.members]))

    def _judge_decision(self, world: Small, new: Decision) -> None:
        last = world.last
        if new.base != new.seq:
            assert last is not None
            at: StateName | None = last.outcome if last.kind is Kind.TRAIN else last.start
            while at is not None and at != new.start:
                before = world.decisions[at.lineage - 1]
                at = None if at.step == 0 else before.start
            if at is None:
                raise Violation(f"I4: decision {new.seq} starts from {new.start}, not in the history of {last.seq}")
        elif new.step != 0 or (last is not None and last.step != 0):
            raise Violation(f"I4: decision {new.seq} starts the job again")
        done = [] if new.base == new.seq else _units(self._expected(world, new.start))
        issued = [u for m in new.members for u in m.units]
        if len({*done, *issued}) != len(done) + len(issued):
            raise Violation(f"I2: decision {new.seq} issues {issued} after {done}")
        self._judge_ledger(new.ledger, done)

    def _judge_ledger(self, ledger: LedgerState | None, done: list[int]) -> None:
        if ledger is not None and [u for u in range(10 * self.replicas) if is_committed(ledger, UnitId(u))] != sorted(
            done
        ):
            raise Violation(f"I2: {ledger}, but trained were {done}")

    def _judge_sum(self, world: Small, node: Node, gifts: tuple[Gift, ...]) -> None:
        decision = world.decisions[node.seq - 1]
        for gift, member in zip(gifts, decision.members, strict=True):
            if (gift[0], gift[2]) != (member.incarnation, member.units):
                raise Violation(f"I3: the sum of decision {node.seq} holds {gift} of {member}")
            if gift[2] and gift[1][1:] != self._expected(world, decision.start):
                raise Violation(f"I1: {gift} of decision {node.seq} was not computed from {decision.start}")

    def _judge_node(self, world: Small, node: Node) -> None:
        if node.gone and not (world.last is not None and world.last.kind is Kind.END):
            raise Violation("; ".join(node.gone))
        if node.name is not None and node.content[1:] != self._expected(world, node.name):
            raise Violation(f"I1: {node.incarnation} holds {node.content} as {node.name}")
        if node.outbox is not None and node.outbox.state is not None:
            self._judge_ledger(node.outbox.ledger, _units(self._expected(world, node.outbox.state)))

    def _judge_end(self, world: Small) -> str:
        """Who is alive, and has answered what came before the end, holds the final state."""
        assert world.last is not None
        if world.last.step != self.steps:
            raise Violation(f"I2: the job ends at step {world.last.step}")
        holders = [n for n in world.nodes if n.name == world.last.start]
        if len({n.content for n in holders}) != 1:
            raise Violation(f"I1: the job ends with {[n.content for n in holders]}")
        return "ended" if any(n.alive for n in holders) else "ended when their last holder died"

    def _judge_halt(self, world: Small, halt: Halt) -> str:
        """Nobody alive may hold a state of the history."""
        assert world.last is not None
        at: StateName | None = world.last.outcome
        while at is not None:
            for node in world.nodes:
                if node.alive and node.name == at and world.reports[node.replica] is not None:
                    raise Violation(f"I5: {halt.reason}; but {node.incarnation} holds {at}")
            before = world.decisions[at.lineage - 1]
            at = None if at.step == 0 else before.start
        return "without a state"

    # --- telling worlds apart ---------------------------------------------------------------------------------

    def _key(self, world: Small) -> int:
        number = self._number
        nodes = tuple([node.key(number) for node in world.nodes])
        reports = tuple([None if r is None else number(r) for r in world.reports])
        decisions = tuple([number(world.decisions[seq - 1]) for seq in sorted(self._that_matter(world))])
        running = {node.seq for node in world.nodes} | {len(world.decisions)}
        given = frozenset([number(gift) for gift in world.given if gift[1] in running])
        staged = None if world.staged is None else number(world.staged)
        lives = {node.incarnation for node in world.nodes}
        lives |= {m.incarnation for m in world.last.members} if world.last is not None else set()
        size = len(world.decisions)
        return hash((nodes, reports, decisions, size, given, staged, world.dead & lives, world.faults))

    def _that_matter(self, world: Small) -> set[int]:
        """The decisions behind the last one, and behind what is held or reported. The others make no difference any more."""
        found: set[int] = set()
        names = [node.name for node in world.nodes] + [r.state for r in world.reports if r is not None]
        names += [node.outbox.state for node in world.nodes if node.outbox is not None]
        queue = [name.lineage for name in names if name is not None] + ([world.last.seq] if world.last else [])
        queue += [node.seq for node in world.nodes if node.seq]  # type: ignore[misc]
        while queue:
            seq = queue.pop()
            if seq not in found:
                found.add(seq)
                queue.append(world.decisions[seq - 1].base)
        return found

    def _number(self, value: Any) -> int:
        """A small number for a value, the same for equal ones."""
        known = self._by_id.get(id(value))
        if known is None:
            if len(self._by_id) == REMEMBERED:
                self._by_id.clear()  # it only saves comparing, and keeps every value alive
            known = self._by_id[id(value)] = (value, self._numbers.setdefault(value, len(self._numbers)))
        return known[1]


def _units(content: Content | None) -> list[int]:
    return [u for step in content or () for units in step for u in units]


def _put(old: tuple[Any, ...], i: int, new: Any) -> tuple[Any, ...]:
    return (*old[:i], new, *old[i + 1 :])


def _names(path: Any) -> list[str]:
    names: list[str] = []
    while path:
        name, path = path
        names.append(name)
    return names[::-1]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m keepstep.simulation.exhaustive")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--faults", type=int, default=2)
    parser.add_argument("--coarse", action="store_true", help="reports are written, and decisions read, at once")
    parser.add_argument("--states-max", type=int, default=10**9)
    options = parser.parse_args()
    search = Search(
        replicas=options.replicas,
        steps=options.steps,
        faults=options.faults,
        fine=not options.coarse,
        states_max=options.states_max,
    )
    try:
        print(search.run())
    except Violation as error:
        print(f"VIOLATION {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
