"""The reasons that `quorum.decide` gives, in words: every answer says which replicas it is about, and why.

Pure text; nothing is decided here.
"""

from collections.abc import Iterable, Mapping, Sequence

from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.messages import Decision, Kind, Member, Report, Role, StateName


def why(last: Decision, start: StateName, holders: Iterable[ReplicaId]) -> str:
    """Why the decision after `last` starts from `start`."""
    held = f"held by {names(holders)}"
    if last.kind is Kind.TRAIN and start == last.outcome:
        return f"step {start.step} follows decision {last.seq}, {held}"
    if last.kind is Kind.TRAIN and start == last.start:
        return f"step {start.step} is tried again, since no living replica completed decision {last.seq}; its start is {held}"
    if start == last.start:
        return f"step {start.step}, whose start is {held}"
    return f"back to step {start.step}: the newest state of the job that is alive is {held}"


def notes(
    last: Decision | None, on_chain: Sequence[StateName], members: Sequence[Member], reports: Sequence[Report]
) -> list[str]:
    """What else an operator wants to know: who catches up and why, who is gone since `last`."""
    found = []
    for member, report in zip(members, reports, strict=True):
        if member.role is Role.WORKER:
            continue
        if not member.fetch:
            cause = "its fetch goes on"
        elif report.state is None:
            cause = "it holds no state"
        else:
            cause = "it is behind" if report.state in on_chain else "its state was revoked"
        found.append(f"replica {member.replica_id} catches up ({cause})")
    if last is not None:
        lives = {m.incarnation for m in members}
        gone = [m.replica_id for m in last.members if m.incarnation not in lives]
        if gone:
            found.append(f"without {names(gone)} of decision {last.seq}")
    return found


def left_out(aside: Mapping[ReplicaId, ReplicaId]) -> list[str]:
    """Who stands aside, though it lives."""
    return [
        f"replica {out} stands aside for now: it and replica {other} do not reach each other"
        for out, other in aside.items()
    ]


def names(replica_ids: Iterable[ReplicaId]) -> str:
    """ "replica 3", or "replicas 0, 1 and 4"."""
    ids = [str(i) for i in sorted(replica_ids)]
    return f"replica {ids[0]}" if len(ids) == 1 else f"replicas {', '.join(ids[:-1])} and {ids[-1]}"
