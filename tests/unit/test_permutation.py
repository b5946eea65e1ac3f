"""Units and their samples: bijections, stable values, no visible pattern."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import UnitId
from keepstep.protocol.permutation import Permutation, unit_samples, units_per_epoch


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70))
def test_is_a_bijection(length: int, seed: int) -> None:
    order = Permutation(length, seed)
    assert sorted(order[i] for i in range(length)) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 255, 256, 257])
def test_is_a_bijection_around_powers_of_two(length: int) -> None:
    order = Permutation(length, 0)
    assert sorted(order[i] for i in range(length)) == list(range(length))


@given(st.integers(10**9, 10**15), st.integers(0, 2**64))
def test_look_up_needs_no_scan(length: int, seed: int) -> None:
    order = Permutation(length, seed)
    values = [order[i] for i in (*range(20), length - 1)]
    assert len(set(values)) == 21
    assert all(0 <= v < length for v in values)


def test_every_order_of_four_is_about_equally_likely() -> None:
    """Chi-square over the 24 orders: 23 degrees of freedom, 60 has a chance of 4e-5; the seeds are fixed."""
    counts = Counter(tuple(Permutation(4, seed)[i] for i in range(4)) for seed in range(4800))
    assert len(counts) == 24
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 60


def test_neighbours_and_neighbouring_seeds_do_not_resemble_each_other() -> None:
    a, b = Permutation(1000, 1), Permutation(1000, 2)
    assert sum(a[i] == b[i] for i in range(1000)) < 10
    assert sum(a[i] == i for i in range(1000)) < 10
    assert sum(abs(a[i + 1] - a[i]) == 1 for i in range(999)) < 12


def test_values_are_pinned() -> None:
    """A running job depends on them: changing them is changing its data."""
    assert [Permutation(10, 0)[i] for i in range(10)] == [9, 3, 4, 8, 7, 2, 6, 1, 0, 5]
    assert unit_samples(UnitId(5), length=10, unit_size=4, seed=3, shuffle=True) == PINNED


PINNED = (0, 8)


def test_an_index_outside_is_refused() -> None:
    for index in (-1, 3):
        with pytest.raises(IndexError):
            Permutation(3, 0)[index]
    with pytest.raises(ConfigError):
        Permutation(0, 0)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("length", "unit_size"), [(10, 4), (12, 4), (3, 8), (1, 1), (97, 10)])
def test_each_epoch_reads_each_sample_once(length: int, unit_size: int, shuffle: bool) -> None:
    units = units_per_epoch(length, unit_size)
    epochs = []
    for epoch in range(3):
        read = [
            i
            for u in range(units * epoch, units * (epoch + 1))
            for i in unit_samples(UnitId(u), length=length, unit_size=unit_size, seed=5, shuffle=shuffle)
        ]
        assert sorted(read) == list(range(length))
        epochs.append(read)
    if not shuffle:
        assert epochs[0] == list(range(length))
    elif length > 3:
        assert epochs[0] != epochs[1] != epochs[2]


def test_the_last_unit_of_an_epoch_may_be_short() -> None:
    sizes = [len(unit_samples(UnitId(u), length=10, unit_size=4, seed=0, shuffle=True)) for u in range(6)]
    assert sizes == [4, 4, 2, 4, 4, 2]


@pytest.mark.parametrize(("unit", "length", "unit_size"), [(-1, 10, 2), (0, 0, 2), (0, 10, 0)])
def test_wrong_arguments_are_refused(unit: int, length: int, unit_size: int) -> None:
    with pytest.raises(ConfigError):
        unit_samples(UnitId(unit), length=length, unit_size=unit_size, seed=0, shuffle=True)
