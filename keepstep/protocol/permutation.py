"""From a unit to the samples it holds: a pure, seeded permutation with O(1) look-up.

A loader that is restarted, moved to another replica or rewound needs no scan and no saved order: sample i of an epoch is
`Permutation(length, seed of the epoch)[i]`, the same bits in every process (FT-HSDP section 6).

How: a Feistel network is a bijection of 0..2^b - 1, whatever its round function. With b the smallest power that covers
`length`, walk on from any value that falls outside until one falls inside ("cycle walking"): a bijection of 0..length-1. As
2^b < 2 x length, fewer than two evaluations are needed on average.

It cannot fail; a wrong argument is a `ConfigError`. The order is part of the job's data: changing this module changes what a
running job reads, so the values are pinned by a test.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import UnitId

_ROUNDS = 8
_MASK64 = (1 << 64) - 1


class Permutation:
    """A seeded bijection of range(length): `Permutation(n, seed)[i]`. Immutable, any thread."""

    __slots__ = ("_keys", "_left_mask", "_right_bits", "_right_mask", "length")

    def __init__(self, length: int, seed: int, *, stream: int = 0) -> None:
        """`stream` separates permutations of one seed (an epoch number, say)."""
        if length < 1:
            raise ConfigError(f"a permutation needs at least one element, got length {length}")
        self.length = length
        bits = (length - 1).bit_length()
        self._right_bits = bits - bits // 2
        self._right_mask = (1 << self._right_bits) - 1
        self._left_mask = (1 << (bits // 2)) - 1
        text = f"keepstep permutation {length} {seed} {stream}".encode()
        material = hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest()
        self._keys = tuple(int.from_bytes(material[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} is outside 0..{self.length - 1}")
        value = self._once(index)
        while value >= self.length:
            value = self._once(value)
        return value

    def _once(self, value: int) -> int:
        left, right = value >> self._right_bits, value & self._right_mask
        for number, key in enumerate(self._keys):
            if number % 2:
                right ^= _mix(left ^ key) & self._right_mask
            else:
                left ^= _mix(right ^ key) & self._left_mask
        return left << self._right_bits | right


def _mix(x: int) -> int:
    """64 bits to 64 bits, every bit of the input spread over the output (the finalizer of splitmix64)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


_cached = lru_cache(maxsize=8)(Permutation)


def units_per_epoch(length: int, unit_size: int) -> int:
    """Units in one pass over `length` samples; the last one may be short."""
    if length < 1 or unit_size < 1:
        raise ConfigError(f"length and unit_size must be at least 1, got {length} and {unit_size}")
    return -(-length // unit_size)


def unit_samples(unit_id: UnitId, *, length: int, unit_size: int, seed: int, shuffle: bool) -> Sequence[int]:
    """Indices of the samples of a unit: each sample is in exactly one unit of each epoch. Each epoch has its own order."""
    if unit_id < 0:
        raise ConfigError(f"units are numbered from 0, got {unit_id}")
    epoch, number = divmod(unit_id, units_per_epoch(length, unit_size))
    places = range(number * unit_size, min((number + 1) * unit_size, length))
    if not shuffle:
        return places
    order = _cached(length, seed, stream=epoch)
    return tuple(order[place] for place in places)
