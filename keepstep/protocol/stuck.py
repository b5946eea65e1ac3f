"""When a life whose main thread hangs is ended, so that another one begins.

Time alone does not say: all replicas may evaluate for an hour, or read from a file system that stands still, and to end
them all would lose the state. So it is ended only if it is past the straggler policy, and

  * the newest decision does not count on it: others train without it, or it catches up and does not; or
  * somebody has computed what it has not, and cannot go on without it (`min_replicas`).

Pure.
"""

from collections.abc import Collection

from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.messages import Lags, Role
from keepstep.protocol.quorum import View
from keepstep.protocol.reasons import names


def of_no_use(replica_id: ReplicaId, incarnation: Incarnation, stuck: Collection[Lags], view: View) -> str:
    """Why this life is over, or "". `stuck`: what its ranks have said that are past the straggler policy."""
    last = view.last
    if not stuck or last is None:
        return ""
    me = last.member(replica_id, incarnation)
    waiting = sorted(
        i
        for i, seen in view.reports.items()
        if i != replica_id and seen.report.incarnation not in view.dead
        if seen.report.waits and seen.report.state == last.start
    )
    counted_on = me is not None and me.role is Role.WORKER
    if counted_on and not waiting:
        return ""
    said = min(stuck, key=lambda lags: (lags.waits, lags.rank))
    others = f"{names(waiting)} waiting for it" if counted_on else "the others going on without it"
    return f"rank {said.rank}: {said.reason}, with {others}"
