"""Which process of a replica is connected to which: a tree of hosts, and under each host's first rank the others of that host.

    ranks lo..hi-1, below rank lo        lo is the first rank of its host
      lo+1 .. end of its host            a child each
      the hosts after it                 cut into at most `fan_out` equal runs; the first rank of each run is a child

So everything below a rank is one run of ranks: what goes down is cut into slices, not sorted. Between two hosts there is one
message for all ranks of a host. Pure.
"""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """The same in every process of a replica. `group`: ranks on a host; host h has the ranks h * group and following."""

    size: int
    group: int
    fan_out: int

    def children(self, below: range, holds: int = 1) -> list[range]:
        """The runs below each child of rank `below.start`, whose process holds `holds` ranks."""
        lo, hi, group = below.start, below.stop, self.group
        if lo % group:
            return []
        end = min(hi, lo + group)
        children = [range(rank, rank + 1) for rank in range(lo + holds, end)]
        hosts = -(-(hi - end) // group)
        runs = min(hosts, self.fan_out)
        cuts = [min(hi, end + (n * hosts // runs) * group) for n in range(runs + 1)] if runs else []
        return children + [range(a, b) for a, b in pairwise(cuts)]

    def place(self, rank: int) -> tuple[int, range]:
        """The rank's parent (-1: it is rank 0), and the run of ranks that begins with it and ends with the last one below it."""
        parent, below = -1, range(self.size)
        while below.start != rank:
            parent, below = below.start, next(run for run in self.children(below) if rank in run)
        return parent, below
