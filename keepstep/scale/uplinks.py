"""What a ring sends out of a zone and out of a building, against what their uplinks carry (FT-HSDP: topology).

Each rank sends to the rank of the same number in the next replica. Where that one is elsewhere, the bytes share the uplink of
the place with all others that leave it; an uplink carries 1/oversubscription of what the place's GPUs could send together. The
slowest link sets the pace of the whole ring.

Pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.placement import Host, Placement
from keepstep.protocol.topology import Place, Tier, place, tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """One place's way out. `pace`: the part of its network's speed that each sending rank gets."""

    place: str
    gpus: int
    sending: int
    oversubscription: float

    @property
    def pace(self) -> float:
        return min(1.0, self.gpus / self.oversubscription / self.sending) if self.sending else 1.0


def uplinks(placement: Placement, hosts: Sequence[Host], *, zone: float, building: float) -> list[Uplink]:
    """Of each zone and each building; `zone` and `building` are their oversubscriptions."""
    gpus: Counter[str] = Counter()
    sending: Counter[str] = Counter()
    where = {host.name: place(host.label) for host in hosts}
    for host in hosts:
        for name in _above(where[host.name]):
            gpus[name] += host.slots
    for here, there in _links(placement, where):
        for name, other in zip(_above(here), _above(there), strict=True):
            sending[name] += name != other
    return [
        Uplink(
            place=name,
            gpus=gpus[name],
            sending=sending[name],
            oversubscription=zone if "/" in name else building,
        )
        for name in sorted(gpus)
    ]


def hops(placement: Placement, hosts: Iterable[Host]) -> list[tuple[ReplicaId, ReplicaId, Tier]]:
    """The ring's links between replicas, each with the worst tier that any rank has on it."""
    where = {host.name: place(host.label) for host in hosts}
    found = []
    for a, b in _pairs(placement):
        tiers = {tier(x, y) for x, y in zip(_ranks(placement, a, where), _ranks(placement, b, where), strict=True)}
        found.append((a, b, max(tiers, key=lambda t: t.cost)))
    return found


def exchange_s(gradient_bytes: float, replicas: int, bytes_per_s: float) -> float:
    """Seconds for a ring all-reduce of so many bytes a rank."""
    return 2 * (replicas - 1) / replicas * gradient_bytes / bytes_per_s


def _pairs(placement: Placement) -> list[tuple[ReplicaId, ReplicaId]]:
    ring = placement.ring
    return list(zip(ring, ring[1:] + ring[:1], strict=True)) if len(ring) > 1 else []


def _links(placement: Placement, where: Mapping[str, Place]) -> Iterable[tuple[Place, Place]]:
    for a, b in _pairs(placement):
        yield from zip(_ranks(placement, a, where), _ranks(placement, b, where), strict=True)


def _ranks(placement: Placement, replica: ReplicaId, where: Mapping[str, Place]) -> list[Place]:
    """Where each rank of a replica is."""
    return [where[seat.host] for seat in placement.seats[replica] for _ in range(seat.count)]


def _above(at: Place) -> tuple[str, str]:
    return at[0], f"{at[0]}/{at[1]}"
