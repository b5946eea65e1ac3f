"""Exactly-once accounting of units: pure functions on `LedgerState` (FT-HSDP section 6, "data loading").

A unit is unissued, issued (it stands in the decision that is running), requeued or committed, and in one of these only.
The ledger of a state records what is *committed* up to that state, which is all that must survive; "issued" is not stored,
it is read off the running decision, so a decision that is never completed costs the ledger nothing.

Two policies:

* `pool`: any WORKER may train any unit. Committed = {u < next_unit} minus `requeued`. When a WORKER dies, its unit becomes a
  hole, which the next decisions hand out first.
* `stream`: unit u belongs to stream u % len(cursors), and replica r trains stream r % len(cursors) only. Committed = the
  first `cursors[s]` units of each stream s. A dead replica's stream stands still and resumes where it stopped.

Invariants: no unit is committed twice; `assign` gives no unit to two replicas and none that is committed; both are functions
of their arguments alone, so that every replica gets the same ledger from the same decision. A broken one is a bug of
ours and raises `InvariantViolation`: the replica crashes rather than train a sample twice.

Departs from the paper: it has streams only; the pool loses no data to a replica that never comes back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from keepstep.protocol.errors import InvariantViolation
from keepstep.protocol.ids import ReplicaId, UnitId
from keepstep.protocol.messages import LedgerState

POOL = "pool"
STREAM = "stream"

Claim = tuple[ReplicaId, tuple[UnitId, ...]]
"""A WORKER and the units whose gradients it holds or has begun, dearest first."""


def check(ledger: LedgerState) -> None:
    """Raises `InvariantViolation` unless the ledger is well formed."""
    problem = ill_formed(ledger)
    if problem:
        raise InvariantViolation(f"ill-formed ledger, {problem}: {digest_text(ledger)}")


def ill_formed(ledger: LedgerState) -> str:
    """What is wrong with the ledger, in words; empty: nothing."""
    if ledger.total is not None and ledger.total < 0:
        return "its total is negative"
    if ledger.policy == POOL:
        if ledger.cursors:
            return "a pool has no cursors"
        if list(ledger.requeued) != sorted(set(ledger.requeued)):
            return "requeued units must be sorted and distinct"
        if any(not 0 <= u < ledger.next_unit for u in ledger.requeued):
            return "requeued units must lie below next_unit"
        if ledger.total is not None and ledger.next_unit > ledger.total:
            return "next_unit is beyond the total"
        return "" if ledger.next_unit >= 0 else "next_unit is negative"
    if ledger.policy == STREAM:
        if not ledger.cursors:
            return "streams need at least one cursor"
        if ledger.requeued or ledger.next_unit:
            return "streams neither requeue nor count next_unit"
        for stream, cursor in enumerate(ledger.cursors):
            if cursor < 0 or (ledger.total is not None and cursor > _stream_length(ledger, stream)):
                return f"the cursor of stream {stream} is outside its data"
        return ""
    return f"unknown policy {ledger.policy!r}"


def assign(ledger: LedgerState, workers: Sequence[Claim], per_worker: int) -> dict[ReplicaId, tuple[UnitId, ...]]:
    """Units of the next step for each WORKER, at most `per_worker` each; fewer, or none, when the data runs out.

    `workers` stand in ring order. First everybody keeps what it holds and what is still uncommitted (two claim one: the
    earlier wins); then the free units, requeued ones first, are dealt out in ring order.
    """
    check(ledger)
    if per_worker < 1:
        raise InvariantViolation(f"per_worker must be at least 1, got {per_worker}")
    if ledger.policy == POOL:
        return _deal_pool(ledger, workers, per_worker)
    dealt: dict[ReplicaId, tuple[UnitId, ...]] = {replica: () for replica, _ in workers}
    for stream in range(len(ledger.cursors)):
        owners = [claim for claim in workers if claim[0] % len(ledger.cursors) == stream]
        dealt |= _deal_stream(ledger, stream, owners, per_worker)
    return dealt


def _deal_pool(ledger: LedgerState, workers: Sequence[Claim], per_worker: int) -> dict[ReplicaId, tuple[UnitId, ...]]:
    taken: set[UnitId] = set()
    kept: dict[ReplicaId, list[UnitId]] = {}
    for replica, held in workers:
        kept[replica] = _first(per_worker, (u for u in held if u not in taken and _is_open(ledger, u)))
        taken.update(kept[replica])
    requeued = [u for u in ledger.requeued if u not in taken]
    fresh = int(ledger.next_unit)
    for replica, _ in workers:
        while len(kept[replica]) < per_worker:
            if requeued:
                kept[replica].append(requeued.pop(0))
                continue
            while UnitId(fresh) in taken:
                fresh += 1
            if ledger.total is not None and fresh >= ledger.total:
                break
            kept[replica].append(UnitId(fresh))
            fresh += 1
    return {replica: tuple(units) for replica, units in kept.items()}


def _deal_stream(
    ledger: LedgerState, stream: int, owners: Sequence[Claim], per_worker: int
) -> dict[ReplicaId, tuple[UnitId, ...]]:
    """A stream advances without holes: only its next len(owners) x per_worker units can be dealt."""
    lanes, first = len(ledger.cursors), ledger.cursors[stream]
    window = [UnitId(stream + lanes * i) for i in range(first, first + per_worker * len(owners))]
    free = [u for u in window if ledger.total is None or u < ledger.total]
    kept: dict[ReplicaId, list[UnitId]] = {}
    for replica, held in owners:
        kept[replica] = _first(per_worker, (u for u in held if u in free))
        free = [u for u in free if u not in kept[replica]]
    for replica, _ in owners:
        missing = per_worker - len(kept[replica])
        kept[replica] += free[:missing]
        free = free[missing:]
    return {replica: tuple(units) for replica, units in kept.items()}


def _first(most: int, units: Iterable[UnitId]) -> list[UnitId]:
    """The first `most` distinct units."""
    return list(dict.fromkeys(units))[:most]


def commit(ledger: LedgerState, units: Iterable[UnitId]) -> LedgerState:
    """The ledger after `units` are committed, in any order.

    Raises `InvariantViolation` for a unit that is committed already, named twice, beyond the data, or out of its stream's
    order.
    """
    check(ledger)
    new = sorted(units)
    if len(set(new)) != len(new):
        raise InvariantViolation(f"a unit is named twice in one commit: {new}")
    for unit in new:
        if unit < 0 or (ledger.total is not None and unit >= ledger.total):
            raise InvariantViolation(f"unit {unit} is not one of the job's {ledger.total} units")
        if is_committed(ledger, unit):
            raise InvariantViolation(f"unit {unit} is committed already: {digest_text(ledger)}")
    if not new:
        return ledger
    if ledger.policy == POOL:
        next_unit = max(ledger.next_unit, UnitId(new[-1] + 1))
        holes = set(ledger.requeued) | {UnitId(u) for u in range(ledger.next_unit, next_unit)}
        return replace(ledger, next_unit=next_unit, requeued=tuple(sorted(holes - set(new))))
    cursors = list(ledger.cursors)
    for unit in new:
        index, stream = divmod(unit, len(cursors))
        if index != cursors[stream]:
            raise InvariantViolation(
                f"unit {unit} is number {index} of stream {stream}, which stands at {cursors[stream]}: streams have no holes"
            )
        cursors[stream] += 1
    return replace(ledger, cursors=tuple(cursors))


def is_committed(ledger: LedgerState, unit: UnitId) -> bool:
    """Whether `unit` has contributed to the state."""
    if ledger.policy == POOL:
        return 0 <= unit < ledger.next_unit and unit not in ledger.requeued
    index, stream = divmod(unit, len(ledger.cursors))
    return unit >= 0 and index < ledger.cursors[stream]


def committed_count(ledger: LedgerState) -> int:
    """How many units are committed."""
    return ledger.next_unit - len(ledger.requeued) if ledger.policy == POOL else sum(ledger.cursors)


def remaining(ledger: LedgerState) -> int | None:
    """How many units are still to be committed; None: endless."""
    return None if ledger.total is None else ledger.total - committed_count(ledger)


def complete(ledger: LedgerState) -> bool:
    """Whether every unit of the job is committed."""
    return remaining(ledger) == 0


def digest_text(ledger: LedgerState) -> str:
    """One line that two ledgers share iff they are equal. Readable, and short unless many units are requeued."""
    total = "endless" if ledger.total is None else str(ledger.total)
    where = (
        f"next={ledger.next_unit} requeued={_list(ledger.requeued)}"
        if ledger.policy != STREAM
        else f"cursors={_list(ledger.cursors)}"
    )
    return f"{ledger.policy} data={ledger.fingerprint} total={total} {where}"


def _list(numbers: Iterable[int]) -> str:
    return ",".join(str(n) for n in numbers) or "-"


def _is_open(ledger: LedgerState, unit: UnitId) -> bool:
    """Whether the unit exists and is not committed."""
    return unit >= 0 and (ledger.total is None or unit < ledger.total) and not is_committed(ledger, unit)


def _stream_length(ledger: LedgerState, stream: int) -> int:
    """Number of units of one stream of a finite job."""
    assert ledger.total is not None
    lanes = len(ledger.cursors)
    return max(0, -(-(ledger.total - stream) // lanes))
