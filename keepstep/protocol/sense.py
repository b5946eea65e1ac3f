"""Whether a message that has the right form can be meant: what everything else takes for granted about reports and decisions.

A reader of the store asks before it believes a value: another version, a bug or a stranger may have written it. Otherwise a
wrong number would surface in the middle of `quorum.decide`, on every leader at once. An empty answer means that it makes sense,
not that it is true. Pure.
"""

from collections.abc import Iterable

from keepstep.protocol.errors import InvariantViolation
from keepstep.protocol.ledger import commit, ill_formed
from keepstep.protocol.messages import Decision, Kind, LedgerState, Report, StateName

NUMBER_MAX = 1 << 62  # of steps, decisions, units
AHEAD_MAX = 1 << 16  # units beyond those that are committed: `commit` counts what lies between


def problem_of_report(report: Report) -> str:
    """What cannot be meant about it, in words; empty: nothing."""
    numbers = [report.replica_id, report.answers, *report.cut_off, *_of_state(report.state)]
    if report.checkpoint is not None:
        numbers += _of_state(report.checkpoint.state)
    if not _all_numbers(numbers):
        return "a number in it is negative or absurd"
    problem = "" if report.checkpoint is None else _of_ledger(report.checkpoint.ledger, ())
    if problem:
        return f"of its checkpoint: {problem}"
    if report.ledger is None:
        return "it has a state and no ledger" if report.state is not None or report.materialized else ""
    if report.materialized and report.state is None:
        return "it holds a state that has no name"
    return _of_ledger(report.ledger, report.held_units)


def problem_of_decision(decision: Decision) -> str:
    """The same about a decision."""
    members = decision.members
    numbers = [decision.seq, decision.quorum_id, decision.step, decision.base, *(m.replica_id for m in members)]
    numbers += [replica for replica, _ in decision.away]
    numbers += [n for a in decision.apart for n in (a.failures, a.until)]
    for state in decision.ancestry:
        numbers += _of_state(state)
    if decision.restore is not None:
        numbers += _of_state(decision.restore.state)
    if not _all_numbers(numbers) or decision.seq == 0:
        return "a number in it is negative or absurd"
    if len({m.replica_id for m in members}) != len(members):
        return "it has a member twice"
    if decision.num_replicas < 1:
        return "it is for no replicas"
    if decision.ledger is None:
        return "it trains units and has no ledger" if decision.kind is Kind.TRAIN else ""
    if decision.saver is not None and decision.saver not in {m.replica_id for m in decision.workers}:
        return "it tells somebody to save a state who is no member that holds it"
    restore = decision.restore
    if restore is not None and (decision.kind is not Kind.GATHER or decision.ledger != restore.ledger):
        return "it restores a checkpoint and is for something else"
    units = [u for m in members for u in m.units]
    problem = _of_ledger(decision.ledger, units)
    if problem or decision.kind is not Kind.TRAIN:
        return problem
    try:
        commit(decision.ledger, units)
    except InvariantViolation as error:
        return str(error)
    return ""


def _of_state(state: StateName | None) -> tuple[int, ...]:
    return () if state is None else (state.step, state.lineage)


def _all_numbers(numbers: Iterable[int]) -> bool:
    return all(0 <= n < NUMBER_MAX for n in numbers)


def _of_ledger(ledger: LedgerState, units: Iterable[int]) -> str:
    if not _all_numbers([ledger.next_unit, ledger.total or 0, *ledger.cursors]):
        return "a number in its ledger is negative or absurd"
    problem = ill_formed(ledger)
    if problem:
        return f"its ledger is ill-formed, {problem}"
    lanes = max(1, len(ledger.cursors))
    beyond = max(ledger.next_unit, lanes * max(ledger.cursors, default=0)) + AHEAD_MAX
    return "" if all(0 <= u < beyond for u in units) else "it names units far from those that are committed"
