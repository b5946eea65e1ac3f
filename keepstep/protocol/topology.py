"""Where replicas stand, and the ring order that crosses the fewest expensive links (FT-HSDP section 7).

A label is "building/zone/rack". Cost of a link, by the nearest thing its ends share (latencies the paper measured):

    same rack 1    same zone 7    same building 15    nothing 30

Labels form a tree, so visiting it depth first (all of a building, in it all of a zone, in it all of a rack) enters and leaves
every group once, which no ring can beat: sorting is optimal. A missing label or part of one counts as a place of its own
name (""): replicas without labels stand together.

Pure and deterministic: all deciders get the same order. It cannot fail.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from keepstep.protocol.ids import ReplicaId

Place = tuple[str, str, str]


class Tier(NamedTuple):
    """How near the ends of a link are, and its latency beside that of a link inside a rack."""

    name: str
    cost: int


SAME_RACK = Tier("same rack", 1)
SAME_ZONE = Tier("same zone", 7)
SAME_BUILDING = Tier("other zone", 15)
OTHER_BUILDING = Tier("other building", 30)


def place(label: str) -> Place:
    """(building, zone, rack) of a label; what is missing is "". Anything after the second "/" belongs to the rack."""
    parts = [part.strip() for part in label.split("/", 2)]
    parts += [""] * (3 - len(parts))
    return parts[0], parts[1], parts[2]


def ring_order(replica_ids: Collection[ReplicaId], labels: Mapping[ReplicaId, str]) -> tuple[ReplicaId, ...]:
    """The cheapest ring, ties by replica_id. Leaving some replicas out does not reorder the others."""
    return tuple(sorted(replica_ids, key=lambda replica: (place(labels.get(replica, "")), replica)))


def tier(a: Place, b: Place) -> Tier:
    """Of a link between two places."""
    if a[0] != b[0]:
        return OTHER_BUILDING
    if a[1] != b[1]:
        return SAME_BUILDING
    return SAME_ZONE if a[2] != b[2] else SAME_RACK
