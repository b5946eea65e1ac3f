"""The transfer plan against chaos: every byte once, or a list of reasons."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.protocol.errors import LocalProtocolError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.transfer import Transfer

SOURCES = [ReplicaId(i) for i in range(3)]


@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(0, 100),
    range_bytes=st.integers(1, 30),
    data=st.data(),
)
def test_every_byte_is_delivered_once_or_all_sources_failed(total: int, range_bytes: int, data: st.DataObject) -> None:
    transfer = Transfer(total, SOURCES, range_bytes=range_bytes)
    delivered = [0] * total
    asked: list[tuple[ReplicaId, tuple[int, int]]] = []
    gone: set[ReplicaId] = set()
    while not transfer.complete and not transfer.exhausted:
        for source in SOURCES:
            if sum(s == source for s, _ in asked) < 2 and (part := transfer.next_range(source)) is not None:
                assert source not in gone
                asked.append((source, part))
        assert asked, "stuck: neither complete nor exhausted, and nothing on its way"
        source, part = asked.pop(data.draw(st.integers(0, len(asked) - 1)))
        if data.draw(st.integers(0, 9)) == 0:
            transfer.failed(source, "it died")
            gone.add(source)
            if data.draw(st.booleans()):  # else what was on its way from it still comes, late
                asked = [(s, p) for s, p in asked if s != source]
        elif transfer.done(source, part):
            for i in range(*part):
                delivered[i] += 1
        assert transfer.missing == total - sum(delivered)
    if transfer.complete:
        assert delivered == [1] * total
        assert sum(transfer.bytes_from.values()) == total
    else:
        assert gone == set(SOURCES)
        assert "replica 0: it died" in transfer.why
    assert max(delivered, default=1) <= 1


def test_all_sources_are_used() -> None:
    transfer = Transfer(90, SOURCES, range_bytes=10)
    while not transfer.complete:
        for source in SOURCES:
            if (part := transfer.next_range(source)) is not None:
                transfer.done(source, part)
    assert set(transfer.bytes_from.values()) == {30}


def test_an_idle_source_repeats_what_a_slow_one_owes() -> None:
    transfer = Transfer(20, SOURCES[:2], range_bytes=10)
    assert transfer.next_range(SOURCES[0]) == (0, 10)
    assert transfer.next_range(SOURCES[1]) == (10, 20)
    assert transfer.done(SOURCES[1], (10, 20))
    assert transfer.next_range(SOURCES[1]) == (0, 10)
    assert transfer.next_range(SOURCES[1]) is None, "once is enough"
    assert transfer.done(SOURCES[1], (0, 10))
    assert not transfer.done(SOURCES[0], (0, 10)), "too late"
    assert transfer.complete


def test_nobody_to_ask() -> None:
    assert Transfer(1, [], range_bytes=1).exhausted
    assert Transfer(0, [], range_bytes=1).complete
    with pytest.raises(LocalProtocolError):
        Transfer(1, [], range_bytes=1).failed(SOURCES[0], "who?")
    with pytest.raises(ValueError, match="range_bytes"):
        Transfer(1, SOURCES, range_bytes=0)


def test_what_a_failed_source_owed_goes_to_the_others_and_counts_once() -> None:
    transfer = Transfer(30, SOURCES[:2], range_bytes=10)
    assert transfer.next_range(SOURCES[0]) == (0, 10)
    transfer.failed(SOURCES[0], "it let the state go")
    transfer.failed(SOURCES[0], "and its connection ended")
    assert transfer.why == "replica 0: it let the state go", "the first reason is the cause"
    assert transfer.next_range(SOURCES[0]) is None
    assert transfer.next_range(SOURCES[1]) == (0, 10), "what was lost comes first"
    assert transfer.done(SOURCES[0], (0, 10)), "late, but whole"
    assert not transfer.done(SOURCES[1], (0, 10))
    assert transfer.bytes_from == {SOURCES[0]: 10, SOURCES[1]: 0}
    assert transfer.missing == 20
    transfer.failed(SOURCES[1], "it died")
    assert transfer.exhausted


def test_only_a_source_that_owes_nothing_repeats_and_the_least_asked_range_first() -> None:
    transfer = Transfer(40, SOURCES, range_bytes=10)
    slow, other, third = SOURCES
    assert [transfer.next_range(slow) for _ in range(2)] == [(0, 10), (10, 20)]
    assert transfer.next_range(other) == (20, 30)
    assert transfer.next_range(third) == (30, 40)
    assert transfer.next_range(other) is None, "it still owes a range itself"
    assert transfer.done(other, (20, 30))
    assert transfer.done(third, (30, 40))
    assert transfer.next_range(other) == (0, 10)
    assert transfer.next_range(third) == (10, 20), "not the one that somebody repeats already"


def test_a_source_may_damage_one_range() -> None:
    transfer = Transfer(20, SOURCES[:1], range_bytes=10)
    for part in ((0, 10), (10, 20)):
        assert transfer.next_range(SOURCES[0]) == part
    transfer.damaged(SOURCES[0], (0, 10), "its checksum is wrong")
    assert transfer.next_range(SOURCES[0]) == (0, 10)
    transfer.damaged(SOURCES[0], (10, 20), "its checksum is wrong")
    assert transfer.exhausted
    assert transfer.why == "replica 0: its checksum is wrong"
