"""Units of a map-style data set: which samples a unit holds, and this rank's share of them, as a batch.

A unit is a pure function of (seed, unit_id): no scan, no state beyond the ledger (FT-HSDP section 6: every batch is trained
exactly once). Batches for the same unit are the same bits wherever and however often they are read.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from torch.utils.data import default_collate

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import UnitId
from keepstep.protocol.messages import LedgerState
from keepstep.protocol.permutation import unit_samples
from keepstep.version import __version__


class MapDataset(Protocol):
    """What `torch.utils.data.Dataset` with a length offers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Units:
    """The data of a job, cut into units of `unit_size` samples; each rank of a replica reads an equal slice of a unit."""

    def __init__(
        self,
        data: MapDataset,
        *,
        unit_size: int,
        rank: int,
        size: int,
        seed: int = 0,
        epochs: int | None = 1,
        shuffle: bool = True,
        policy: str = "pool",
        num_replicas: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        name: str = "",
    ) -> None:
        try:
            self.length = len(data)
        except TypeError:
            raise ConfigError(
                f"data must be a map-style data set with a length, got {type(data).__name__}: wrap a stream in one"
            ) from None
        if self.length < 1:
            raise ConfigError("the data set is empty")
        if unit_size < 1 or unit_size % size:
            raise ConfigError(
                f"unit_size is {unit_size}, but must be a positive multiple of the replica's {size} ranks: "
                "each rank trains an equal slice of a unit"
            )
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs must be at least 1, or None for endless, got {epochs}")
        if policy not in ("pool", "stream"):
            raise ConfigError(f'data_policy must be "pool" or "stream", got {policy!r}')
        self.data, self.unit_size, self.seed, self.shuffle = data, unit_size, seed, shuffle
        self.rank, self.size, self.epochs = rank, size, epochs
        self.collate = collate or default_collate
        per_epoch = -(-self.length // unit_size)
        self.ledger = LedgerState(
            policy=policy,
            fingerprint=self._fingerprint(name),
            total=None if epochs is None else per_epoch * epochs,
            cursors=(0,) * num_replicas if policy == "stream" else (),
        )

    def _fingerprint(self, name: str) -> str:
        facts = {
            "length": self.length,
            "unit_size": self.unit_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
            "name": name,
            "version": __version__,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def samples(self, unit: UnitId) -> Sequence[int]:
        """Indices of the samples of a unit, for the whole replica."""
        return unit_samples(unit, length=self.length, unit_size=self.unit_size, seed=self.seed, shuffle=self.shuffle)

    def share(self, unit: UnitId) -> Sequence[int]:
        """This rank's slice: contiguous, sizes differ by at most one, and only in the short last unit of an epoch."""
        indices = self.samples(unit)
        return indices[len(indices) * self.rank // self.size : len(indices) * (self.rank + 1) // self.size]

    def weight(self, units: Sequence[UnitId]) -> float:
        """How much a contribution counts: samples, in full units. 1.0 for one full unit."""
        return sum(len(self.samples(u)) for u in units) / self.unit_size

    def batches(self, units: Sequence[UnitId], pieces: int) -> list[tuple[Any, float]]:
        """This rank's share of `units` in `pieces` micro-batches, each with the factor its mean loss must be scaled by.

        Scaled so, the sum over the pieces of the mean over the ranks is the mean over all samples, however unevenly a short
        unit divides. A rank may get fewer pieces than asked for, never an empty one, unless the unit has
        fewer samples than the replica has ranks: then it reads one sample with factor 0.
        """
        indices = [i for u in units for i in self.share(u)]
        total = sum(len(self.samples(u)) for u in units)
        if not indices:
            first = self.samples(units[0])[0]
            return [(self.collate([self.data[first]]), 0.0)]
        smallest = sum(len(self.samples(u)) // self.size for u in units)
        pieces = max(1, min(pieces, smallest))
        cuts = [len(indices) * i // pieces for i in range(pieces + 1)]
        return [
            (self.collate([self.data[i] for i in indices[a:b]]), (b - a) * self.size / total) for a, b in pairwise(cuts)
        ]


def step_seed(seed: int, units: Sequence[int], rank: int) -> int:
    """What torch's generator is seeded with before `units` are computed on `rank`: dropout repeats when they are again."""
    text = f"{seed}/{list(units)}/{rank}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
