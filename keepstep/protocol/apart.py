"""Two replicas that both live and speak to the quorum, but cannot exchange with each other: which stands aside, for how long.

A switch, a route or a firewall may come between two hosts while both reach the store. A ring that holds both can never be
completed, so the decision after it would be the same, for ever. Each report says to or from which neighbours *its own* links
failed; a decision carries what it learned of that to the next one (`Decision.apart`), so every decider judges alike.

    fails once                both are tried again: a reset connection is no reason to lose a replica
    fails FAILURES in a row   one of the two is left out of the next FIRST_PAUSE decisions that train
    fails then, too           twice as many, and so on: what was left out comes back after at most as long again as it was cut off
    completes                 forgotten

The one that is left out is alive: it reports, falls behind, and catches up when it is tried again. The final state it fetches
like everybody else, since fetching needs no ring. Safety does not rest on this: a decision may name any members.

Pure and total: it cannot fail. The paper has nothing of the kind: its replicas lie in buildings that reach each other or do not.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from keepstep.protocol.ids import Incarnation, ReplicaId, Seq
from keepstep.protocol.messages import Apart, Decision, Kind, Report

FAILURES = 2
FIRST_PAUSE = 16  # decisions
LONGEST_PAUSE = 4096


def learn(
    last: Decision, answers: Collection[Report], live: Collection[Incarnation], *, completed: bool
) -> tuple[Apart, ...]:
    """What is known of such pairs after decision `last`. `completed`: somebody who answers it has completed it.

    A complaint counts if both have answered in the life in which they were members, and neither is slow: the dead and the silent
    are other cases, and a slow member has broken the ring itself.
    """
    known = {a.lives: a for a in last.apart if all(life in live for life in a.lives)}
    if last.kind is not Kind.TRAIN:
        return tuple(known.values())
    members = {m.replica_id: m.incarnation for m in last.members}
    if completed:
        whole = set(members.values())
        return tuple(a for lives, a in known.items() if not whole.issuperset(lives))
    present = {r.incarnation for r in answers if members.get(r.replica_id) == r.incarnation and not r.slow}
    pairs = {
        _pair(r.incarnation, members[other])
        for r in answers
        if r.incarnation in present
        for other in r.cut_off
        if other != r.replica_id and members.get(other) in present
    }
    for lives in sorted(pairs):
        failures = 1 + (known[lives].failures if lives in known else 0)
        known[lives] = Apart(lives=lives, failures=failures, until=Seq(last.seq + 1 + _pause(failures)))
    return tuple(known[lives] for lives in sorted(known))


def _pair(one: Incarnation, other: Incarnation) -> tuple[Incarnation, Incarnation]:
    return (one, other) if one < other else (other, one)


def _pause(failures: int) -> int:
    if failures < FAILURES:
        return 0
    return min(LONGEST_PAUSE, FIRST_PAUSE << min(failures - FAILURES, 32))


def aside(
    apart: Iterable[Apart],
    seq: Seq,
    holders: Sequence[Report],
    others: Sequence[Report],
    fewest: int,
    idle: Collection[ReplicaId] = (),
) -> Mapping[ReplicaId, ReplicaId]:
    """Who is left out of decision `seq`, each with the one it cannot exchange with; of `holders`, `fewest` stay.

    The `idle`, who have nothing to train, go first, then whoever is in most pairs, then those who catch up, then the highest
    replica_id. Where too few would be left, the others are tried again.
    """
    place = {r.incarnation: r for r in [*holders, *others]}
    catching_up = {r.incarnation for r in others}
    pairs = [a.lives for a in apart if a.until > seq and all(life in place for life in a.lives)]
    left, out = len(holders), dict[ReplicaId, ReplicaId]()
    while pairs:
        most = Counter(life for pair in pairs for life in pair)
        able = [life for life in most if life in catching_up or left > max(1, fewest)]
        if not able:
            break
        gone = max(
            able,
            key=lambda life: (place[life].replica_id in idle, most[life], life in catching_up, place[life].replica_id),
        )
        left -= gone not in catching_up
        first = next(pair for pair in pairs if gone in pair)
        out[place[gone].replica_id] = place[first[first[0] == gone]].replica_id
        pairs = [pair for pair in pairs if gone not in pair]
    return out
