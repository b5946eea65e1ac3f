"""The decision that everybody expects: the same members go on from what was just committed (design 4.1, rule 7).

A leader that finds it in the store tells its ranks only that, in a few bytes; each rank makes it from the decision before. It is
said only where it is exactly so, hence nothing is lost if this function expects something else. Pure.
"""

from dataclasses import replace

from keepstep.protocol.ids import Seq, Step
from keepstep.protocol.ledger import assign, commit, complete
from keepstep.protocol.messages import Decision, Kind


def for_ranks(decision: Decision) -> Decision:
    """Without what only those who decide need."""
    return replace(decision, ancestry=(), reason="", away=())


def follow(decision: Decision) -> Decision | None:
    """What comes after `decision` (as `for_ranks`), if all commit it, none leaves and none fails, and whoever catches up is still
    at it; None: who knows."""
    if decision.kind is not Kind.TRAIN or decision.ledger is None:
        return None
    workers = decision.workers
    ledger = commit(decision.ledger, [unit for m in workers for unit in m.units])
    most = max((len(m.units) for m in workers), default=0)
    if most == 0 or complete(ledger):
        return None
    units = assign(ledger, [(m.replica_id, ()) for m in workers], most)
    members = tuple([replace(m, units=units.get(m.replica_id, ()), fetch=False) for m in decision.members])
    return replace(
        decision, seq=Seq(decision.seq + 1), step=Step(decision.step + 1), base=decision.seq, members=members, ledger=ledger,
        saver=None,
    )  # fmt: skip
