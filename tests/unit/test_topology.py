"""The ring order against every possible ring."""

import itertools
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.topology import place, ring_order, tier

parts = st.sampled_from(["a", "b", "c"])
labels = st.one_of(
    st.just(""), parts, st.tuples(parts, parts).map("/".join), st.tuples(parts, parts, parts).map("/".join)
)


def ring_cost(order: Sequence[ReplicaId], labels: Mapping[ReplicaId, str]) -> int:
    """Sum over the links of the ring, the closing one included. A ring of one has no link."""
    if len(order) < 2:
        return 0
    places = [place(labels.get(replica, "")) for replica in order]
    return sum(tier(a, b).cost for a, b in zip(places, places[1:] + places[:1], strict=True))


def ring(count: int) -> list[ReplicaId]:
    return [ReplicaId(i) for i in range(count)]


@given(st.lists(labels, min_size=1, max_size=6))
def test_no_ring_is_cheaper(places: list[str]) -> None:
    where = dict(zip(ring(len(places)), places, strict=True))
    order = ring_order(where, where)
    assert sorted(order) == ring(len(places))
    assert ring_cost(order, where) == min(ring_cost(p, where) for p in itertools.permutations(where))


@given(st.lists(labels, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_how_it_is_asked(places: list[str], rng: object) -> None:
    where = dict(zip(ring(len(places)), places, strict=True))
    shuffled = list(where)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ring_order(shuffled, where) == ring_order(where, where)
    without = [i for i in where if i != 0]
    assert ring_order(without, where) == tuple(i for i in ring_order(where, where) if i != 0)


def test_cost_tiers() -> None:
    here = place("b1/z1/r1")
    tiers = {"b1/z1/r1": 1, "b1/z1/r2": 7, "b1/z2/r1": 15, "b2/z1/r1": 30}
    assert {label: tier(here, place(label)).cost for label in tiers} == tiers


def test_labels_may_be_short_or_missing() -> None:
    assert place("") == ("", "", "")
    assert place("b1") == ("b1", "", "")
    assert place(" b1 / z1 /r/x") == ("b1", "z1", "r/x")


def test_without_labels_the_order_is_by_replica_id() -> None:
    assert ring_order({ReplicaId(2), ReplicaId(0), ReplicaId(11)}, {}) == (0, 2, 11)
    assert ring_cost(ring(3), {}) == 3
    assert ring_cost(ring(1), {}) == 0


def test_two_buildings_are_crossed_twice_only() -> None:
    where = {ReplicaId(i): f"building{i % 2}/z/r" for i in range(6)}
    assert ring_order(where, where) == (0, 2, 4, 1, 3, 5)
    assert ring_cost(ring_order(where, where), where) == 2 * 30 + 4 * 1
