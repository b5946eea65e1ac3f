"""Which source sends which bytes: striping with failover (FT-HSDP section 5.6).

All healthy replicas hold the same bits, so a reader takes ranges from all of them at once: each source is asked for the next
range whenever it has delivered one, so fast sources serve more. A source that fails is not asked again, and what it owed goes to
the others. When nothing is left to hand out, a source that owes nothing itself repeats the range that the fewest others have been
asked for: a slow source costs one range, not the transfer, and healthy ones are hardly asked twice. Bytes that arrive
damaged are asked for again, once; a source that damages two ranges has failed.

    next_range(source) -> (lo, hi) | None;  done(...) | damaged(...) | failed(...);  until complete or exhausted

Invariant: a byte counts once; `missing` is always exactly what is not delivered. Pure; errors in use are LocalProtocolError.
"""

from collections import deque
from collections.abc import Sequence

from keepstep.protocol.errors import LocalProtocolError
from keepstep.protocol.ids import ReplicaId

Range = tuple[int, int]


class Transfer:
    """The plan of one fetch of `total` bytes."""

    def __init__(self, total: int, sources: Sequence[ReplicaId], *, range_bytes: int) -> None:
        if total < 0 or range_bytes < 1:
            raise ValueError("total must not be negative and range_bytes must be positive")
        self.total = total
        self._todo: deque[Range] = deque((lo, min(lo + range_bytes, total)) for lo in range(0, total, range_bytes))
        self._on_its_way: dict[Range, set[ReplicaId]] = {}  # oldest first
        self._sources = set(sources)
        self._damaged: set[ReplicaId] = set()  # sources that have sent one damaged range
        self.reasons: dict[ReplicaId, str] = {}
        self.bytes_from: dict[ReplicaId, int] = dict.fromkeys(sources, 0)

    @property
    def complete(self) -> bool:
        return not self._todo and not self._on_its_way

    @property
    def exhausted(self) -> bool:
        """Bytes are missing and nobody is left to ask."""
        return not self.complete and not self._sources

    @property
    def missing(self) -> int:
        """Number of bytes that are not delivered."""
        return sum(hi - lo for lo, hi in (*self._todo, *self._on_its_way))

    @property
    def why(self) -> str:
        """What became of the sources that failed, in words."""
        return "; ".join(f"replica {source}: {reason}" for source, reason in sorted(self.reasons.items()))

    def next_range(self, source: ReplicaId) -> Range | None:
        """What to ask `source` for now; None: nothing more for it."""
        if source not in self._sources:
            return None
        if self._todo:
            found = self._todo.popleft()
            self._on_its_way[found] = {source}
            return found
        if not self._on_its_way or any(source in asked for asked in self._on_its_way.values()):
            return None
        waited_for, asked = min(self._on_its_way.items(), key=lambda item: len(item[1]))  # of equals, the oldest
        asked.add(source)
        return waited_for

    def done(self, source: ReplicaId, part: Range) -> bool:
        """`source` delivered `part`, verified. False: another one was faster, throw it away."""
        if part not in self._on_its_way:
            return False
        del self._on_its_way[part]
        self.bytes_from[source] += part[1] - part[0]
        return True

    def damaged(self, source: ReplicaId, part: Range, reason: str) -> None:
        """`part` came from `source` and failed its checksum."""
        if source in self._damaged:
            self.failed(source, reason)
            return
        self._damaged.add(source)
        self._take_back(source, part)

    def failed(self, source: ReplicaId, reason: str) -> None:
        """`source` is not to be asked any more; what only it owed is handed out again."""
        if source not in self.bytes_from:
            raise LocalProtocolError(f"replica {source} is not a source of this transfer")
        self._sources.discard(source)
        self.reasons.setdefault(source, reason)
        for part in list(self._on_its_way):
            self._take_back(source, part)

    def _take_back(self, source: ReplicaId, part: Range) -> None:
        asked = self._on_its_way.get(part)
        if asked is not None:
            asked.discard(source)
            if not asked:
                del self._on_its_way[part]
                self._todo.appendleft(part)
