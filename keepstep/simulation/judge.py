"""The judge: what must hold, whatever happens, told from what can be seen from outside.

It imports nothing of the protocol but its words, and asks no machine: it keeps its own books from decisions as they are
published, buckets as they are given to rings, sums as they come out, states as main threads reach them, and verdicts as leaders
give them. A state's content is a number made of everything that went into it, so equal numbers are equal bits.

  I1  one name, one content: for each rank, and one history of units for all ranks
  I2  each unit once: in a history, in a decision, at the end; a ledger says exactly what its state was trained with
  I3  a sum holds one bucket of each member of its decision, made for that decision, from its start, in ring order; a quorum_id
      names one ring, and is kept only by members who all completed what came before
  I4  a decision starts from a state of the history that is not revoked; whoever has answered a decision does not complete it; a
      replica commits what all its ranks completed, all of them or none
  I5  is the world's: progress once everything is well. Here: a main thread that hangs holds nobody up; nobody gives up while a
      state is there to go on from, and no checkpoint is restored while somebody holds one, nor an old one while a newer one can
      be read
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keepstep.protocol.catch_up import Apply, Begin, Leave, LoadState, Order, Train
from keepstep.protocol.ids import Incarnation, Rank, Seq, Step
from keepstep.protocol.messages import Checkpoint, Decision, Kind, LedgerState, Report, Role, StateName
from keepstep.protocol.quorum import Halt
from keepstep.simulation.clock import MS, SECOND
from keepstep.simulation.disk import Published

if TYPE_CHECKING:
    from keepstep.simulation.fabric import Contribution
    from keepstep.simulation.life import Life
    from keepstep.simulation.rank import SimRank
    from keepstep.simulation.world import World

STEADY = 5 * SECOND
"""Who has been in touch for so long must be known to everybody."""


LATE = ("slow watch", "blind", "mute", "cut off", "store away", "store error", "late write", "freeze", "freeze rank")


class Violation(AssertionError):
    """A promise is broken."""


def committed(ledger: LedgerState, upto: int) -> set[int]:
    """The units below `upto` that a ledger calls committed: the words of its docstring, read once more."""
    if ledger.cursors:
        lanes = len(ledger.cursors)
        return {u for u in range(upto) if u // lanes < ledger.cursors[u % lanes]}
    return set(range(min(ledger.next_unit, upto))) - set(ledger.requeued)


class Judge:
    """Keeps the books of one world. Every method is an observation, and raises Violation if it can't be."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.plan = world.plan
        self.steps = 0  # commits seen, of any replica
        self.newest_at = 0  # when the newest was
        self.decisions: dict[Seq, Decision] = {}
        self.last: Decision | None = None
        self.parent: dict[StateName, StateName | None] = {}
        self.units: dict[StateName, tuple[int, ...]] = {}  # the history that a name stands for
        self.bases: set[StateName] = set()  # of decisions
        self.revoked: set[StateName] = set()
        self.rings: dict[int, tuple[Incarnation, ...]] = {}
        self.ring_runs: dict[int, Seq] = {}  # the newest decision of each ring
        self.contents: dict[tuple[StateName, Rank], int] = {}
        self.history: dict[int, tuple[int, ...]] = {}  # of a content
        self.sums: dict[tuple[Seq, Rank, int], int] = {}
        self.completed: dict[Seq, dict[tuple[Incarnation, Rank], set[int]]] = defaultdict(lambda: defaultdict(set))
        self.verdicts: dict[tuple[Incarnation, Seq], bool] = {}
        self.answered: dict[Incarnation, int] = {}
        self.said_at: dict[Incarnation, int] = {}  # when what it reports was last written
        self.orders: dict[tuple[Incarnation, int], object] = {}
        self.holds: dict[tuple[Incarnation, Rank], StateName | None] = {}

    # --- the store --------------------------------------------------------------------------------------------

    def on_decision(self, new: Decision) -> None:
        last, start = self.last, new.start
        above = 0 if new.restore is None else new.restore.state.lineage
        if new.seq != max(last.seq if last else 0, above) + 1:
            raise Violation(f"I4: decision {new.seq} follows {last and last.seq}")
        if last is not None and last.kind is Kind.END:
            raise Violation(f"I4: decision {new.seq} comes after the end")
        if new.restore is not None:
            self._restore(new, new.restore)
        elif new.base == new.seq:
            if new.step != 0 or (last is not None and last.step != 0):
                raise Violation(f"I4: decision {new.seq} starts the job again, at step {new.step}")
            self.parent[start], self.units[start] = None, ()
        else:
            assert last is not None
            self._go_back(last, start, new.seq)
        self._check_units(new)
        self._check_ring(new)
        if new.kind is Kind.END:
            self._check_nobody_is_left_behind(new)
            self._check_last_is_saved(new)
        self.bases.add(start)
        self.parent[new.outcome] = start
        self.units[new.outcome] = self.units[start] + tuple([u for m in new.members for u in m.units])
        self.decisions[new.seq] = self.last = new

    # --- checkpoints ------------------------------------------------------------------------------------------

    def on_beginning(self) -> None:
        """There may be a checkpoint of a job whose store is lost: it was trained with what its ledger says."""
        begun = self.plan.begun
        if begun is None:
            return
        state = StateName(step=Step(self.plan.begun_at), lineage=Seq(40))
        total = begun.next_unit + sum(begun.cursors)
        parts = tuple([hash((self.plan.seed, "begun", k)) for k in range(self.plan.ranks)])
        self.parent[state], self.units[state] = None, tuple(sorted(committed(begun, total)))
        for k, content in enumerate(parts):
            self.contents[state, Rank(k)], self.history[content] = content, self.units[state]
        self.bases.add(state)
        checkpoint = Checkpoint(name="40", state=state, ledger=begun)
        self.world.disk.published["40"] = Published(checkpoint=checkpoint, parts=parts, at=0)

    def on_checkpoint(self, checkpoint: Checkpoint, parts: Sequence[int]) -> None:
        """All ranks of a replica have written their parts, and they are published."""
        state = checkpoint.state
        if state not in self.bases:
            raise Violation(f"I4: {state} is saved, and no decision has named it as a base")
        if list(parts) != [self.contents.get((state, Rank(k))) for k in range(self.plan.ranks)]:
            raise Violation(f"I1: what is saved as {state} are other bits")
        self._check_ledger(checkpoint.ledger, self.units[state], f"checkpoint {checkpoint.name}")

    def _restore(self, new: Decision, restored: Checkpoint) -> None:
        found = self.world.disk.published.get(restored.name)
        if found is None or found.checkpoint != restored or new.ledger != restored.ledger:
            raise Violation(f"I1: decision {new.seq} restores {restored}, on the disk is {found}")
        if new.base != new.seq or new.step != restored.state.step or new.kind is not Kind.GATHER or new.workers:
            raise Violation(f"I4: decision {new.seq} restores {restored} as {new.start}")
        holder = self._holder(None, self.plan.policy.restore_wait_ns * 3 // 4)  # clocks run differently
        if holder is not None:
            raise Violation(f"I5: decision {new.seq} restores a checkpoint, but {holder}")
        newer = self._readable(restored.state)
        if newer is not None and not any(fault.kind in LATE for fault in self.plan.faults):
            raise Violation(f"I5: decision {new.seq} restores {restored.name}, but {newer} is newer")
        at = None if self.last is None else self.last.outcome
        while at is not None:
            self.revoked.add(at)
            at = self.parent[at]
        self.parent[new.start], self.units[new.start] = None, self.units[restored.state]
        for k, content in enumerate(found.parts):
            self.contents[new.start, Rank(k)] = content

    def _readable(self, than: StateName | None) -> str | None:
        """A checkpoint, newer than this one, that everybody must have seen by now and that can be read."""
        for name, each in self.world.disk.published.items():
            state = each.checkpoint.state
            newer = than is None or (state.lineage, state.step) > (than.lineage, than.step)
            if newer and not each.rotten and self.world.clock.now - each.at > STEADY:
                return name
        return None

    def _go_back(self, last: Decision, start: StateName, seq: Seq) -> None:
        """`start` must be on the way from the outcome of `last` to the beginning; what is newer is revoked."""
        if start in self.revoked:
            raise Violation(f"I4: decision {seq} starts from {start}, which was revoked")
        at: StateName | None = last.outcome if last.kind is Kind.TRAIN else last.start
        while at != start:
            if at is None:
                raise Violation(f"I4: decision {seq} starts from {start}, which is not in the history of {last.seq}")
            self.revoked.add(at)
            at = self.parent[at]

    def _check_units(self, new: Decision) -> None:
        issued = [u for m in new.members for u in m.units]
        done = self.units[new.start]
        if len(set(issued)) != len(issued) or set(issued) & set(done):
            raise Violation(f"I2: decision {new.seq} issues {issued} after {done}")
        if any(m.units for m in new.members if m.role is not Role.WORKER):
            raise Violation(f"I2: decision {new.seq} gives units to a replica that catches up")
        if new.ledger is not None:
            self._check_ledger(new.ledger, done, f"decision {new.seq}")
        if new.kind is Kind.TRAIN and not (issued and len(new.workers) >= self.plan.policy.min_replicas):
            raise Violation(f"I2: decision {new.seq} trains nothing, or with too few: {new}")
        may_end = self._is_final(new.start) or (new.stopped and self.world.stopping)
        if new.kind is Kind.END and not (may_end and new.workers == new.members):
            raise Violation(f"I2: decision {new.seq} ends the job at {new.start} after {done}")

    def _is_final(self, state: StateName) -> bool:
        if self.plan.max_steps is not None and state.step >= self.plan.max_steps:
            return True
        total = self.plan.ledger.total
        return total is not None and sorted(self.units[state]) == list(range(total))

    def _check_ledger(self, ledger: LedgerState, units: tuple[int, ...], whose: str) -> None:
        upto = max((ledger.next_unit, *[c * len(ledger.cursors) + len(ledger.cursors) for c in ledger.cursors]))
        if committed(ledger, upto) != set(units):
            raise Violation(f"I2: {whose} says {ledger}, but trained were {sorted(units)}")

    def _check_nobody_is_left_behind(self, end: Decision) -> None:
        for life in self.world.lives:
            answers = self.answered.get(life.incarnation, -1) == end.seq - 1 and self._is_known(life)
            leaves = end.stopped or life.replica_id in self.world.asked
            if answers and not leaves and end.member(life.replica_id, life.incarnation) is None:
                raise Violation(f"I5: the job ends without {life.incarnation}, which is alive")

    def _check_last_is_saved(self, end: Decision) -> None:
        """Where states are saved, the one that a job is stopped at is, too."""
        if not (end.stopped and end.step and self.plan.policy.checkpoint_every):
            return
        full = any(fault.kind == "disk full" for fault in self.plan.faults)
        last, published = self.last, self.world.disk.published.values()
        read = last is not None and last.restore is not None and last.start == end.start
        if not full and not read and all(each.checkpoint.state != end.start for each in published):
            raise Violation(f"I2: the job stops at {end.start}, which has not been saved")

    def _is_known(self, life: "Life") -> bool:
        """What it reports was written so long ago that everybody must have read it, in a world where news are never late."""
        said_at = self.said_at.get(life.incarnation)
        if said_at is None or not life.in_touch or any(fault.kind in LATE for fault in self.plan.faults):
            return False
        return self.world.clock.now - said_at > (15 * MS if self.world.healed else 150 * MS)

    def _check_ring(self, new: Decision) -> None:
        lives = tuple([m.incarnation for m in new.members])
        if self.rings.setdefault(new.quorum_id, lives) != lives:
            raise Violation(f"I3: quorum_id {new.quorum_id} names {self.rings[new.quorum_id]} and {lives}")
        if new.kind is not Kind.TRAIN:
            return
        before = self.ring_runs.get(new.quorum_id)
        self.ring_runs[new.quorum_id] = new.seq
        if before is not None and any(not self._all_ranks_completed(life, before) for life in lives):
            raise Violation(f"I3: ring {new.quorum_id} goes on, but not everybody completed decision {before}")

    def on_report(self, report: Report) -> None:
        """It has been written."""
        self.said_at[report.incarnation] = self.world.clock.now
        if self.world.talks:
            self.world.say(report.replica_id, f"reports {_named(report)}")
        if report.state is None:
            return
        if report.ledger is None or report.state not in self.units:
            raise Violation(f"I1: {report} is about a state that was never decided on")
        self._check_ledger(report.ledger, self.units[report.state], f"the report of {report.incarnation}")
        if report.finished and not self._is_final(report.state):
            raise Violation(f"I2: {report.incarnation} calls {report.state} final")

    # --- rings ------------------------------------------------------------------------------------------------

    def on_contribution(self, rank: "SimRank", seq: Seq, given: "Contribution") -> None:
        life, decision = rank.life.incarnation, self.decisions[seq]
        me = next((m for m in decision.members if m.incarnation == life), None)
        if me is None:
            raise Violation(f"I3: {life} takes part in decision {seq}, which does not name it")
        if given.units != me.units:
            raise Violation(f"I2: {life} gives units {given.units} to decision {seq}, which wants {me.units}")
        if given.units and given.computed_from != self.contents.get((decision.start, rank.number)):
            raise Violation(f"I1: {life} computed its part of decision {seq} from other bits than {decision.start}")

    def on_sum(self, rank: "SimRank", seq: Seq, number: int, parts: Sequence["Contribution"], content: int) -> None:
        life, decision = rank.life.incarnation, self.decisions[seq]
        lives, units = [part.life for part in parts], [part.units for part in parts]
        if lives != [m.incarnation for m in decision.members] or units != [m.units for m in decision.members]:
            raise Violation(f"I3: the sum of decision {seq} at {life} is of {lives} with units {units}")
        if self.sums.setdefault((seq, rank.number, number), content) != content:
            raise Violation(f"I1: {life} has another sum of decision {seq} than somebody else")
        self.completed[seq][life, rank.number].add(number)

    def _all_ranks_completed(self, life: Incarnation, seq: Seq) -> bool:
        done = self.completed[seq]
        return all(len(done[life, Rank(k)]) == self.plan.exchanges for k in range(self.plan.ranks))

    # --- inside a replica -------------------------------------------------------------------------------------

    def on_answer(self, report: Report) -> None:
        """A leader has decided to say this."""
        life = report.incarnation
        if report.answers < self.answered.get(life, 0):
            raise Violation(f"I4: {life} answers {report.answers} after {self.answered[life]}")
        self.answered[life] = report.answers

    def on_verdict(self, life: "Life", seq: Seq, commit: bool, reason: str) -> None:
        who = life.incarnation
        if self.verdicts.setdefault((who, seq), commit) != commit:
            raise Violation(f"I4: {who} has two verdicts on decision {seq}")
        if not commit:
            self.world.say(life.replica_id, f"gives decision {seq} up: {reason}")
            return
        if self.world.talks:
            self.world.say(life.replica_id, f"commits decision {seq}")
        self.steps, self.newest_at = self.steps + 1, self.world.clock.now
        if self.answered.get(who, 0) >= seq:
            raise Violation(f"I4: {who} completes decision {seq}, which it has answered")
        if not self._all_ranks_completed(who, seq):
            raise Violation(f"I4: {who} commits decision {seq}, which not all its ranks completed")

    def on_hung(self, ranks: Sequence["SimRank"]) -> None:
        """Main threads go on that have hung so far. If nothing else went wrong, and others hold the state and may train all that
        is left, these went on without them."""
        plan, last, now = self.plan, self.last, self.world.clock.now
        if ranks[0].life.over:  # its life was ended for it meanwhile
            return
        if len(plan.faults) > 1 or plan.lasting is not None or plan.ledger.cursors:
            return
        if last is None or last.kind is not Kind.TRAIN or self._is_final(last.outcome):
            return
        quick = [life for life in self.world.lives if life is not ranks[0].life]
        if sum(self._held_by_all(life) == last.start for life in quick) < plan.policy.min_replicas:
            return
        computed = max(rank.computed_at for life in quick for rank in life.ranks) - self.newest_at
        asked = max(computed, *(rank.pace.threshold for rank in ranks))
        said = 2 * asked  # it is said again, in time, once others have computed
        if now - self.newest_at > 1.3 * said + STEADY:
            raise Violation(f"I5: nobody went on without {ranks[0].life.incarnation}, whose main thread hangs")

    def on_order(self, rank: "SimRank", index: int, order: Order) -> None:
        """Main threads meet in collectives: all ranks of a replica must be told the same things in the same order."""
        match order:
            case Begin():
                key: object = ("begin", order.state)
            case Train():
                key = ("train", order.attempt, order.start, order.units)
            case Apply():
                key = ("apply", order.decision.seq)
            case LoadState():
                key = ("load", order.state)
            case _:
                key = "leave"
        if self.orders.setdefault((rank.life.incarnation, index), key) != key:
            raise Violation(f"I4: order {index} of {rank.life.incarnation} is {key} and {self.orders}")

    def on_apply(self, rank: "SimRank", seq: Seq, sums: Sequence[int | None]) -> None:
        life = rank.life.incarnation
        if self.verdicts.get((life, seq)) is not True:
            raise Violation(f"I4: {life} applies decision {seq}, which it did not commit")
        wanted = [self.sums.get((seq, rank.number, i)) for i in range(self.plan.exchanges)]
        if list(sums) != wanted:
            raise Violation(f"I1: {life} applies {sums} as decision {seq}, whose sum is {wanted}")
        self.holds[life, rank.number] = None

    def on_state(
        self, rank: "SimRank", name: StateName, content: int, ledger: LedgerState, *,
        before: int | None = None, units: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """The tensors of a rank have become what it calls `name`, by applying a sum to `before`, or by loading."""
        life = rank.life.incarnation
        self.holds[life, rank.number] = name
        if self.contents.setdefault((name, rank.number), content) != content:
            raise Violation(f"I1: {life} holds other bits under the name {name} than somebody else")
        if before is not None:
            self.history[content] = self.history.get(before, ()) + units
        trained = self.history.get(content, ())
        if len(set(trained)) != len(trained) or sorted(trained) != sorted(self.units[name]):
            raise Violation(f"I2: {life} at {name} was trained with {trained}, its name stands for {self.units[name]}")
        self._check_ledger(ledger, trained, f"{life} at {name}")

    def on_initial(self, rank: "SimRank", name: StateName, content: int) -> None:
        """A process takes the tensors that it was born with for the state of this name."""
        self.holds[rank.life.incarnation, rank.number] = name
        if self.contents.setdefault((name, rank.number), content) != content:
            raise Violation(f"I1: {rank.life.incarnation} begins with other bits than {name}")

    # --- ends -------------------------------------------------------------------------------------------------

    def on_death(self, life: "Life") -> None:
        for k in range(self.plan.ranks):
            self.holds.pop((life.incarnation, Rank(k)), None)

    def _held_by_all(self, life: "Life") -> StateName | None:
        """The state that every rank holds, if it is one."""
        held = {self.holds.get((life.incarnation, Rank(k))) for k in range(self.plan.ranks)}
        return held.pop() if len(held) == 1 else None

    def on_left(self, life: "Life", order: Leave) -> bool:
        """Every main thread has left the loop. Whether with the last state of the job."""
        if order.error:
            return False
        last, holds = self.last, self._held_by_all(life)
        if order.left and not (life.replica_id in self.world.asked or (last is not None and last.stopped)):
            raise Violation(f"I5: {life.incarnation} leaves, and nobody has asked it to")
        if order.left and holds is None:
            return False
        assert last is not None
        if order.left and last.member(life.replica_id, life.incarnation) is None:
            begun = last.step > 0  # else the job starts again, as from anybody
            if begun and not last.workers and last.restore is None:
                raise Violation(f"I5: {life.incarnation} may leave, and nobody else holds a state")
            return False
        if last.kind is not Kind.END or holds != last.start:
            raise Violation(f"I2: {life.incarnation} leaves with {holds}, not with the final state")
        return True

    def on_halt(self, life: "Life", halt: Halt) -> None:
        """A leader gives up."""
        if halt.misfits:
            raise Violation(f"all replicas fit together, but: {halt.reason}")
        if self.last is None and self.world.stopping:
            return
        if self.last is None:
            raise Violation("I5: nothing has been decided yet, and already somebody gives up")
        readable = None if self.world.stopping else self._readable(None)  # who is to stop restores nothing for it
        if readable is not None and self.world.clock.now - life.steady_since > STEADY:
            raise Violation(f"I5: {life.incarnation} gives up, but checkpoint {readable} can be read")
        patience = 0 if self.world.stopping else self.plan.policy.lost_wait_ns * 3 // 4  # clocks run differently
        holder = self._holder(life, patience)
        if holder is not None:
            raise Violation(f"I5: {life.incarnation} gives up, but {holder}")

    def _holder(self, life: "Life | None", cut_off_for: int = 0) -> str | None:
        """Who holds a state to go on from: `life`, somebody who must be known to everybody, or who was so a moment ago."""
        if self.last is None:
            return None
        memory, at = self.plan.policy.ancestry_max, self.last.outcome
        alive: set[StateName] = {at}
        while (before := self.parent[at]) is not None and len(alive) < memory:
            alive.add(before)
            at = before
        for other in self.world.lives:
            steady = other.in_touch and self.world.clock.now - other.steady_since > STEADY
            waited_for = not other.in_touch and self.world.clock.now - other.out_since < cut_off_for
            whole = all(rank.process.alive for rank in other.ranks)  # else its part of the state is gone, known or not
            if whole and (steady or waited_for or other is life) and self._held_by_all(other) in alive:
                return f"{other.incarnation} holds {self._held_by_all(other)}"
        return None

    def on_end(self, ending: str) -> None:
        """The world is over, and well."""
        if ending != "end":
            return
        finished = [life for life in self.world.lives if life.finished]
        assert self.last is not None
        if len({self._held_by_all(life) for life in finished}) != 1 or not (
            self._is_final(self.last.start) or self.last.stopped
        ):
            raise Violation("I2: the job has ended without the final state")


def _named(report: Report) -> str:
    held = "no state" if report.state is None else f"state {report.state.step}/{report.state.lineage}"
    pending = "" if report.materialized or report.state is None else ", not complete yet"
    broken = ", ring broken" if report.broken else ""
    return f"{held}{pending}{broken}, answering {report.answers}"
