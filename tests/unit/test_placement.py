"""Placement against counting, and against the smallest place that could do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.placement import Host, Placement, common_label, place_replicas
from keepstep.protocol.topology import place, ring_order

letters = st.sampled_from("ab")
clusters = st.lists(
    st.tuples(st.tuples(letters, letters, letters).map("/".join), st.integers(0, 8)), min_size=1, max_size=12
).map(lambda rows: [Host(name=f"h{i:02}", label=label, slots=slots) for i, (label, slots) in enumerate(rows)])


def hosts_of(placement: Placement, replica: int) -> dict[str, int]:
    return {seat.host: seat.count for seat in placement.seats[ReplicaId(replica)]}


def cluster(*racks: tuple[str, int], slots: int = 8) -> list[Host]:
    return [Host(name=f"{label}-{i}", label=label, slots=slots) for label, count in racks for i in range(count)]


@given(clusters, st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
def test_everybody_has_a_seat_and_no_host_has_too_many(
    hosts: list[Host], replicas: int, ranks: int, rng: object
) -> None:
    if sum(host.slots for host in hosts) < replicas * ranks:
        with pytest.raises(ConfigError, match=f"need {replicas * ranks} slots"):
            place_replicas(hosts, replicas=replicas, ranks=ranks)
        return
    found = place_replicas(hosts, replicas=replicas, ranks=ranks)
    assert sorted(found.seats) == list(range(replicas))
    for seats in found.seats.values():
        assert [r for seat in seats for r in range(seat.first, seat.first + seat.count)] == list(range(ranks))
    for host in hosts:
        used = sum(seat.count for seats in found.seats.values() for seat in seats if seat.host == host.name)
        assert found.free[host.name] == host.slots - used >= 0
    assert found.ring == ring_order(found.seats, found.labels)
    rng.shuffle(hosts)  # type: ignore[attr-defined]
    assert place_replicas(hosts, replicas=replicas, ranks=ranks) == found


@given(clusters, st.integers(1, 12))
def test_one_replica_lies_in_the_smallest_place_that_has_room(hosts: list[Host], ranks: int) -> None:
    room: dict[tuple[str, ...], int] = {}
    for host in hosts:
        for depth in range(5):
            key = (*place(host.label), host.name)[:depth]
            room[key] = room.get(key, 0) + host.slots
    if room[()] < ranks:
        return
    (seats,) = place_replicas(hosts, replicas=1, ranks=ranks).seats.values()
    chosen = [(*place(host.label), host.name) for host in hosts if host.name in {seat.host for seat in seats}]
    depth = max(d for d in range(5) if len({key[:d] for key in chosen}) == 1)
    assert depth == max(len(key) for key, slots in room.items() if slots >= ranks)


@given(clusters, st.integers(1, 4), st.integers(1, 8))
def test_replicas_share_a_host_only_if_they_must(hosts: list[Host], replicas: int, ranks: int) -> None:
    if sum(host.slots >= ranks for host in hosts) < replicas:
        return
    found = place_replicas(hosts, replicas=replicas, ranks=ranks)
    names = [seat.host for seats in found.seats.values() for seat in seats]
    assert len(names) == len(set(names))


@given(clusters, st.integers(1, 4), st.integers(1, 8), st.data())
def test_what_runs_stays_where_it_is(hosts: list[Host], replicas: int, ranks: int, data: st.DataObject) -> None:
    if sum(host.slots for host in hosts) < replicas * ranks:
        return
    before = place_replicas(hosts, replicas=replicas, ranks=ranks)
    kept = {r: hosts_of(before, r) for r in before.seats}
    assert place_replicas(hosts, replicas=replicas, ranks=ranks, kept=kept) == before
    lost = data.draw(st.sampled_from(hosts))
    left = [host for host in hosts if host.name != lost.name]
    if sum(host.slots for host in left) < replicas * ranks:
        return
    after = place_replicas(left, replicas=replicas, ranks=ranks, kept=kept)
    for r in before.seats:
        assert all(hosts_of(after, r)[name] >= n for name, n in hosts_of(before, r).items() if name != lost.name)


def test_each_replica_in_a_zone_and_the_ring_crosses_each_building_once() -> None:
    hosts = cluster(("b1/z1/r1", 2), ("b1/z2/r1", 2), ("b2/z1/r1", 1), ("b2/z1/r2", 1), ("b2/z2/r1", 2))
    found = place_replicas(hosts, replicas=4, ranks=16)
    assert found.labels == {0: "b1/z1/r1", 1: "b1/z2/r1", 2: "b2/z2/r1", 3: "b2/z1"}
    assert found.ring == (0, 1, 3, 2)
    assert not any(found.free.values())


def test_small_holes_are_filled_first() -> None:
    hosts = cluster(("b1/z1/r1", 4), ("b1/z2/r1", 1))
    found = place_replicas(hosts, replicas=2, ranks=8)
    assert hosts_of(found, 0) == {"b1/z2/r1-0": 8}
    assert found.labels[ReplicaId(1)] == "b1/z1/r1"


def test_a_lost_host_is_replaced_by_the_nearest_one() -> None:
    hosts = cluster(("b1/z1/r1", 2), ("b1/z1/r2", 1), ("b2/z1/r1", 3))
    kept = {ReplicaId(0): {"b1/z1/r1-0": 8, "gone": 8}, ReplicaId(1): {"b1/z1/r1-1": 8, "b2/z1/r1-0": 8}}
    found = place_replicas(hosts, replicas=2, ranks=16, kept=kept)
    assert hosts_of(found, 0) == {"b1/z1/r1-0": 8, "b1/z1/r2-0": 8}
    assert hosts_of(found, 1) == kept[ReplicaId(1)]


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="2 replicas of 8 ranks need 16 slots, and the 1 hosts have 8"):
        place_replicas(cluster(("b/z/r", 1)), replicas=2, ranks=8)
    with pytest.raises(ConfigError, match="a name of its own"):
        place_replicas(cluster(("b/z/r", 1)) * 2, replicas=1, ranks=8)
    with pytest.raises(ConfigError, match="cannot keep 9"):
        place_replicas(cluster(("b/z/r", 2)), replicas=1, ranks=8, kept={ReplicaId(0): {"b/z/r-0": 9}})
    with pytest.raises(ConfigError, match="do not fit"):
        place_replicas(
            cluster(("b/z/r", 2)),
            replicas=2,
            ranks=8,
            kept={ReplicaId(r): {"b/z/r-0": 5} for r in range(2)},
        )
    with pytest.raises(ConfigError, match="at least one replica"):
        place_replicas([], replicas=0, ranks=1)


def test_the_common_place() -> None:
    assert common_label(["b1/z1/r1", "b1/z1/r2"]) == "b1/z1"
    assert common_label(["b1/z1/r1", "b2/z1/r1"]) == ""
    assert common_label(["b1/z1/r1"]) == "b1/z1/r1"
    assert common_label(["b1", "b1"]) == "b1"


def test_a_hundred_thousand_gpus_of_four_buildings() -> None:
    """98,304 GPUs, 12 replicas of 8,192, as in the paper: three replicas to a building, none of them split."""
    hosts = cluster(*((f"b{b}/z{z}/r{r:03}", 2) for b in range(4) for z in range(3) for r in range(512)))
    found = place_replicas(hosts, replicas=12, ranks=8192)
    assert sorted(found.labels.values()) == sorted(f"b{b}/z{z}" for b in range(4) for z in range(3))
    buildings = [found.labels[r][:2] for r in found.ring]
    assert buildings == sorted(buildings)
