"""The ledger, case by case. Against a model of sets: tests/properties/test_ledger_sets.py."""

from dataclasses import replace

import pytest

from keepstep.protocol.errors import InvariantViolation
from keepstep.protocol.ids import ReplicaId, UnitId
from keepstep.protocol.ledger import (
    assign,
    check,
    commit,
    committed_count,
    complete,
    digest_text,
    is_committed,
    remaining,
)
from keepstep.protocol.messages import LedgerState

POOL = LedgerState(fingerprint="f", total=10)
STREAM = LedgerState(policy="stream", fingerprint="f", total=8, cursors=(0, 0, 0))


def us(*units: int) -> tuple[UnitId, ...]:
    return tuple(UnitId(u) for u in units)


def deal(ledger: LedgerState, held: dict[int, tuple[int, ...]], per_worker: int = 1) -> dict[int, tuple[int, ...]]:
    return dict(assign(ledger, [(ReplicaId(i), us(*h)) for i, h in held.items()], per_worker))


def test_fresh_units_go_out_in_ring_order() -> None:
    assert deal(POOL, {2: (), 0: (), 1: ()}) == {2: (0,), 0: (1,), 1: (2,)}
    assert deal(POOL, {2: (), 0: ()}, per_worker=2) == {2: (0, 1), 0: (2, 3)}


def test_a_dead_workers_unit_becomes_a_hole_and_goes_out_first() -> None:
    ledger = commit(POOL, us(2, 0))
    assert ledger == replace(POOL, next_unit=UnitId(3), requeued=us(1))
    assert deal(ledger, {0: (), 2: ()}) == {0: (1,), 2: (3,)}
    assert commit(ledger, us(3, 1)) == replace(POOL, next_unit=UnitId(4))


def test_held_units_are_kept_and_the_earlier_of_two_claims_wins() -> None:
    assert deal(POOL, {0: (), 1: (1,), 2: (1,)}) == {0: (0,), 1: (1,), 2: (2,)}
    assert deal(POOL, {0: (5, 5, 6, 7)}, per_worker=2) == {0: (5, 6)}


def test_committed_and_impossible_units_are_not_kept() -> None:
    ledger = replace(POOL, next_unit=UnitId(3), requeued=us(1))
    assert deal(ledger, {0: (0,), 1: (99,), 2: (-1,)}) == {0: (1,), 1: (3,), 2: (4,)}


def test_when_the_data_runs_out_some_get_nothing() -> None:
    ledger = replace(POOL, next_unit=UnitId(9))
    assert deal(ledger, {0: (), 1: ()}) == {0: (9,), 1: ()}
    done = commit(ledger, us(9))
    assert complete(done)
    assert remaining(done) == 0
    assert deal(done, {0: (9,)}) == {0: ()}


def test_an_endless_job_is_never_complete() -> None:
    endless = replace(POOL, total=None, next_unit=UnitId(10**9))
    assert remaining(endless) is None
    assert not complete(endless)
    assert deal(endless, {0: ()}) == {0: (10**9,)}


def test_streams_belong_to_replicas_and_resume_where_they_stopped() -> None:
    ledger = commit(STREAM, us(0, 2, 3))
    assert ledger.cursors == (2, 0, 1)
    assert deal(ledger, {0: (), 1: (), 2: ()}) == {0: (6,), 1: (1,), 2: (5,)}
    assert deal(ledger, {4: (), 2: ()}) == {4: (1,), 2: (5,)}  # replica 4 owns stream 4 % 3
    assert committed_count(ledger) == 3
    assert [u for u in range(8) if is_committed(ledger, UnitId(u))] == [0, 2, 3]


def test_two_owners_of_one_stream_leave_no_hole() -> None:
    assert deal(STREAM, {0: (), 3: (3,), 6: (9,)}) == {0: (0,), 3: (3,), 6: (6,)}
    assert deal(STREAM, {3: (3,)}) == {3: (0,)}  # 3 is out of turn
    assert deal(replace(STREAM, cursors=(2, 0, 0)), {0: (), 3: ()}) == {0: (6,), 3: ()}


@pytest.mark.parametrize(
    ("ledger", "units", "message"),
    [
        (replace(POOL, next_unit=UnitId(3)), (2,), "committed already"),
        (replace(STREAM, cursors=(1, 0, 0)), (0,), "committed already"),
        (POOL, (1, 1), "named twice"),
        (POOL, (10,), "not one of the job's 10 units"),
        (POOL, (-1,), "not one of the job's 10 units"),
        (STREAM, (3,), "stands at 0: streams have no holes"),
    ],
)
def test_a_wrong_commit_is_loud(ledger: LedgerState, units: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvariantViolation, match=message):
        commit(ledger, us(*units))


@pytest.mark.parametrize(
    ("ledger", "message"),
    [
        (replace(POOL, policy="heap"), "unknown policy 'heap'"),
        (replace(POOL, next_unit=UnitId(3), requeued=us(2, 1)), "sorted"),
        (replace(POOL, next_unit=UnitId(3), requeued=us(1, 1)), "distinct"),
        (replace(POOL, requeued=us(0)), "below next_unit"),
        (replace(POOL, next_unit=UnitId(11)), "beyond the total"),
        (replace(POOL, next_unit=UnitId(-1)), "negative"),
        (replace(POOL, total=-1), "negative"),
        (replace(POOL, cursors=(0,)), "no cursors"),
        (replace(STREAM, cursors=()), "at least one cursor"),
        (replace(STREAM, cursors=(4, 0, 0)), "stream 0 is outside"),
        (replace(STREAM, cursors=(0, 0, 3)), "stream 2 is outside"),
        (replace(STREAM, next_unit=UnitId(1)), "neither requeue nor count"),
    ],
)
def test_an_ill_formed_ledger_is_loud(ledger: LedgerState, message: str) -> None:
    with pytest.raises(InvariantViolation, match=message):
        check(ledger)


def test_nobody_trains_zero_units_on_purpose() -> None:
    with pytest.raises(InvariantViolation, match="per_worker"):
        assign(POOL, [(ReplicaId(0), ())], 0)


def test_committing_nothing_changes_nothing() -> None:
    assert commit(POOL, ()) == POOL


def test_equal_ledgers_have_equal_digests_and_others_differ() -> None:
    variants = [
        POOL,
        STREAM,
        replace(POOL, total=None),
        replace(POOL, fingerprint="g"),
        replace(POOL, next_unit=UnitId(3)),
        replace(POOL, next_unit=UnitId(3), requeued=us(1)),
        replace(POOL, next_unit=UnitId(3), requeued=us(1, 2)),
        replace(STREAM, cursors=(1, 0, 0)),
    ]
    assert len({digest_text(v) for v in variants}) == len(variants)
    assert digest_text(commit(POOL, us(1))) == "pool data=f total=10 next=2 requeued=0"
