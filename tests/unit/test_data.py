"""Units: which samples, whose share, and how they are weighted."""

import pytest
import torch

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import UnitId
from keepstep.training.data import Units


class Numbers:
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def units(length: int, unit_size: int, rank: int = 0, size: int = 1, **more: object) -> Units:
    return Units(Numbers(length), unit_size=unit_size, rank=rank, size=size, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "unit_size", "size"), [(64, 8, 2), (61, 8, 4), (3, 4, 4), (10, 4, 1)])
def test_an_epoch_is_every_sample_once(length: int, unit_size: int, size: int) -> None:
    total = units(length, unit_size).ledger.total
    assert total == -(-length // unit_size)
    seen = [
        i
        for unit in range(total)
        for rank in range(size)
        for i in units(length, unit_size, rank, size).share(UnitId(unit))
    ]
    assert sorted(seen) == list(range(length))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(("length", "unit_size", "size"), [(16, 8, 2), (13, 8, 4), (9, 8, 4)])
def test_scaled_means_over_ranks_and_pieces_are_the_mean_over_samples(
    length: int, unit_size: int, size: int, pieces: int
) -> None:
    last = UnitId(-(-length // unit_size) - 1)
    whole = units(length, unit_size).samples(last)
    per_rank = [units(length, unit_size, rank, size).batches([last], pieces) for rank in range(size)]
    assert len({len(batches) for batches in per_rank}) == 1, "the ranks meet in collectives"
    mean = sum(float(b.mean()) * scale for batches in per_rank for b, scale in batches) / size
    assert mean == pytest.approx(sum(whole) / len(whole))


def test_a_full_unit_weighs_one_and_a_short_one_less() -> None:
    u = units(10, 4)
    assert [u.weight([UnitId(i)]) for i in range(3)] == [1.0, 1.0, 0.5]


def test_two_epochs_are_shuffled_differently() -> None:
    u = units(64, 8, epochs=2)
    first, second = ([i for unit in range(a, a + 8) for i in u.samples(UnitId(unit))] for a in (0, 8))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"length": 0}, "empty"),
        ({"unit_size": 3, "size": 2}, "multiple of the replica's 2 ranks"),
        ({"unit_size": 0}, "positive multiple"),
        ({"epochs": 0}, "at least 1"),
        ({"policy": "pond"}, '"pool" or "stream"'),
    ],
)
def test_bad_input_is_one_sentence(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        units(**{"length": 16, "unit_size": 4, **change})  # type: ignore[arg-type]


def test_a_stream_without_a_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="map-style"):
        Units(iter([1]), unit_size=1, rank=0, size=1)  # type: ignore[arg-type]


def test_the_fingerprint_tells_data_sets_apart() -> None:
    base = units(16, 4).ledger.fingerprint
    assert base == units(16, 4, rank=1, size=2).ledger.fingerprint
    others = [units(17, 4), units(16, 8), units(16, 4, seed=1), units(16, 4, shuffle=False), units(16, 4, name="b")]
    assert len({base, *(o.ledger.fingerprint for o in others)}) == 6
