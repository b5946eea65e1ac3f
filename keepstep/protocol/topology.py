"""Where replicas stand, and the ring order that crosses the fewest expensive links (FT-HSDP section 7).

A label is "building/zone/rack". Cost of a link, by the nearest thing its ends share (latencies the paper measured):

    same rack 1    same zone 7    same building 15    nothing 30

Labels form a tree, so visiting it depth first (all of a building, in it all of a zone, in it all of a rack) enters and leaves
every group once, which no ring can beat: sorting is optimal. A missing label or part of one counts as a place of its own
name (""): replicas without labels stand together.

Pure and deterministic: all deciders get the same order. It cannot fail.
"""

from collections.abc import Collection, Mapping, Sequence

from keepstep.protocol.ids import ReplicaId

SAME_RACK = 1
SAME_ZONE = 7
SAME_BUILDING = 15
OTHER_BUILDING = 30

Place = tuple[str, str, str]


def place(label: str) -> Place:
    """(building, zone, rack) of a label; what is missing is "". Anything after the second "/" belongs to the rack."""
    parts = [part.strip() for part in label.split("/", 2)]
    parts += [""] * (3 - len(parts))
    return parts[0], parts[1], parts[2]


def link_cost(a: Place, b: Place) -> int:
    """The cost tier of a link between two places."""
    if a[0] != b[0]:
        return OTHER_BUILDING
    if a[1] != b[1]:
        return SAME_BUILDING
    return SAME_ZONE if a[2] != b[2] else SAME_RACK


def ring_cost(order: Sequence[ReplicaId], labels: Mapping[ReplicaId, str]) -> int:
    """Sum over the links of the ring, the closing one included. A ring of one has no link."""
    if len(order) < 2:
        return 0
    places = [place(labels.get(replica, "")) for replica in order]
    return sum(link_cost(a, b) for a, b in zip(places, places[1:] + places[:1], strict=True))


def ring_order(replica_ids: Collection[ReplicaId], labels: Mapping[ReplicaId, str]) -> tuple[ReplicaId, ...]:
    """The cheapest ring, ties by replica_id. Leaving some replicas out does not reorder the others."""
    return tuple(sorted(replica_ids, key=lambda replica: (place(labels.get(replica, "")), replica)))
