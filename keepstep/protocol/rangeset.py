"""A set of byte ranges [lo, hi), kept sorted and merged. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class RangeSet:
    """Disjoint, non-touching, half-open integer ranges."""

    def __init__(self) -> None:
        self._los: list[int] = []
        self._his: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._los, self._his, strict=True))

    def __repr__(self) -> str:
        return f"RangeSet({list(self)})"

    def add(self, lo: int, hi: int) -> None:
        """Adds [lo, hi); empty ranges are ignored."""
        if lo >= hi:
            return
        first, last = bisect_left(self._his, lo), bisect_right(self._los, hi)
        if first < last:
            lo, hi = min(lo, self._los[first]), max(hi, self._his[last - 1])
        self._los[first:last], self._his[first:last] = [lo], [hi]

    def covers(self, lo: int, hi: int) -> bool:
        """Whether all of [lo, hi) is in the set."""
        i = bisect_right(self._los, lo) - 1
        return lo >= hi or (i >= 0 and self._his[i] >= hi)

    def missing(self, total: int) -> list[tuple[int, int]]:
        """The ranges of [0, total) that are not in the set."""
        gaps, at = [], 0
        for lo, hi in self:
            if lo > at:
                gaps.append((at, min(lo, total)))
            at = hi
        if at < total:
            gaps.append((at, total))
        return gaps
