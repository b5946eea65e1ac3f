"""The ledger against sets: a job is run to its end under random deaths, and every answer is compared with a set."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.ids import ReplicaId, UnitId
from keepstep.protocol.ledger import assign, commit, committed_count, complete, digest_text, is_committed, remaining
from keepstep.protocol.messages import LedgerState


class Sets:
    """The deliberately dumb ledger: every unit is a member of a set."""

    def __init__(self, total: int, streams: int) -> None:
        self.total, self.streams = total, streams
        self.committed: set[int] = set()

    def open_for(self, replica: int) -> list[int]:
        """What a replica may be given, best first: the oldest units that are not committed."""
        mine = [u for u in range(self.total) if not self.streams or u % self.streams == replica % self.streams]
        return [u for u in mine if u not in self.committed]

    def assign(self, workers: list[tuple[int, list[int]]], per_worker: int) -> dict[int, list[int]]:
        given: dict[int, list[int]] = {replica: [] for replica, _ in workers}
        for replica, held in workers:
            # a stream may run ahead by no more than its owners can commit at once
            owners = sum(1 for r, _ in workers if self.streams and r % self.streams == replica % self.streams)
            window = self.open_for(replica)[: owners * per_worker] if self.streams else self.open_for(replica)
            for unit in held:
                taken = [u for units in given.values() for u in units]
                if unit in window and unit not in taken and len(given[replica]) < per_worker:
                    given[replica].append(unit)
        for replica, _ in workers:
            for unit in self.open_for(replica):
                taken = [u for units in given.values() for u in units]
                if unit not in taken and len(given[replica]) < per_worker:
                    given[replica].append(unit)
        return given


@pytest.mark.parametrize("seed", range(200))
def test_a_job_equals_its_sets_until_the_end(seed: int) -> None:
    rng = random.Random(seed)
    replicas, total, per_worker = rng.randint(1, 4), rng.randint(1, 25), rng.randint(1, 3)
    streams = rng.choice([0, replicas])
    ledger = LedgerState(policy="stream" if streams else "pool", cursors=(0,) * streams, total=total)
    sets = Sets(total, streams)
    held: dict[int, list[int]] = {r: [] for r in range(replicas)}
    for _ in range(200):
        if complete(ledger):
            break
        everyone = range(replicas)
        ring = rng.sample(everyone, rng.randint(1, replicas)) if rng.random() < 0.5 else everyone
        claims = [(ReplicaId(r), tuple(UnitId(u) for u in held[r])) for r in ring]
        given_out = assign(ledger, claims, per_worker)
        assert {r: list(u) for r, u in given_out.items()} == sets.assign([(r, held[r]) for r in ring], per_worker)
        issued = [u for units in given_out.values() for u in units]
        held = {r: list(given_out.get(ReplicaId(r), held[r])) for r in range(replicas)}
        if rng.random() < 0.25:  # the step failed: units stay held, or their holder dies
            held[rng.randrange(replicas)] = []
            continue
        ledger = commit(ledger, issued)
        sets.committed |= set(issued)
        assert {u for u in range(total) if is_committed(ledger, UnitId(u))} == sets.committed
        assert committed_count(ledger) == len(sets.committed)
        assert remaining(ledger) == total - len(sets.committed)
    assert sets.committed == set(range(total))


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_the_order_of_commits_does_not_matter(one: set[int], other: set[int]) -> None:
    start = LedgerState(total=31)
    first, second = [UnitId(u) for u in one], [UnitId(u) for u in other - one]
    a = commit(commit(start, first), second)
    b = commit(commit(start, second), first)
    assert a == b == commit(start, first + second)
    assert digest_text(a) == digest_text(b)
