"""Which host runs which ranks of which replica, and the ring between them (FT-HSDP: topology).

Inside a replica latency counts, so its ranks share the smallest place that has room for them: a host, else a rack, a zone, a
building. Replicas only sum gradients with each other, so they may be far apart. In this order:

    1. ranks that are running stay where they are (`kept`); what such a replica lacks comes as near to them as there is room
    2. replicas share no host while there are hosts enough: one host that dies takes one replica
    3. each replica in the smallest place with room; of several the fullest, so that large holes stay for the next ones
    4. the ring of all replicas crosses the fewest expensive links (`topology.ring_order`)

All replicas have the same size, so in shared hosts this fits in whenever it can be done at all.
Pure and deterministic: the same hosts in any order give the same placement. Fails: ConfigError if there is too little room.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.topology import place, ring_order

HOST = 4  # how deep it lies: building, zone, rack, host


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine that may run ranks."""

    name: str
    slots: int  # ranks that it has room for, one a GPU
    label: str = ""  # "building/zone/rack"

    def __post_init__(self) -> None:
        if self.slots < 0:
            raise ConfigError(f"host {self.name} cannot have {self.slots} slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Ranks `first` to `first + count - 1` of a replica run on this host."""

    host: str
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where everything goes."""

    seats: Mapping[ReplicaId, tuple[Seat, ...]]
    labels: Mapping[ReplicaId, str]  # the smallest place that holds all of the replica
    ring: tuple[ReplicaId, ...]
    free: Mapping[str, int]  # slots that nobody uses, by host


def place_replicas(
    hosts: Iterable[Host],
    *,
    replicas: int,
    ranks: int,
    kept: Mapping[ReplicaId, Mapping[str, int]] | None = None,
) -> Placement:
    """Seats for `replicas` x `ranks`; `kept` says how many ranks of a replica run on which host already."""
    if replicas < 1 or ranks < 1:
        raise ConfigError(f"a job has at least one replica of one rank, not {replicas} of {ranks}")
    ordered = sorted(hosts, key=lambda h: (place(h.label), h.name))
    known = {host.name: host for host in ordered}
    if len(known) < len(ordered):
        raise ConfigError("each host needs a name of its own")
    wanted = [ReplicaId(r) for r in range(replicas)]
    running = {r: {name: n for name, n in (kept or {}).get(r, {}).items() if name in known} for r in wanted}
    room = sum(host.slots for host in known.values())
    if room < replicas * ranks:
        raise ConfigError(
            f"{replicas} replicas of {ranks} ranks need {replicas * ranks} slots, and the {len(known)} hosts have {room}: "
            "add hosts or take fewer replicas"
        )
    for r, own in running.items():
        if sum(own.values()) > ranks:
            raise ConfigError(f"replica {r} of {ranks} ranks cannot keep {sum(own.values())}")
    found = _fill_all(known, running, ranks, shared=False) or _fill_all(known, running, ranks, shared=True)
    if found is None:
        raise ConfigError("the ranks that are kept do not fit on their hosts")
    labels = {r: common_label(known[name].label for name in own) for r, own in found.items()}
    return Placement(
        seats={r: _seats(known, own) for r, own in found.items()},
        labels=labels,
        ring=ring_order(wanted, labels),
        free={name: host.slots - sum(own.get(name, 0) for own in found.values()) for name, host in known.items()},
    )


def common_label(labels: Iterable[str]) -> str:
    """The smallest place that holds all of these: "b1/z2" for two racks of a zone, "" for two buildings."""
    places = [place(label) for label in labels]
    parts: list[str] = []
    for column in zip(*places, strict=True):
        if len(set(column)) > 1:
            break
        parts.append(column[0])
    return "/".join(parts).rstrip("/")


# --- filling -----------------------------------------------------------------------------------------------------

Key = tuple[str, ...]  # building, zone, rack, host: a prefix names a place
Room = Sequence[tuple[Key, int]]  # hosts and their free slots


def _fill_all(
    hosts: Mapping[str, Host], running: Mapping[ReplicaId, Mapping[str, int]], ranks: int, *, shared: bool
) -> dict[ReplicaId, dict[str, int]] | None:
    """Ranks by replica and host; None if it does not work out."""
    keys = {name: (*place(host.label), name) for name, host in hosts.items()}
    found = {r: dict(own) for r, own in running.items()}
    used = {name: sum(own.get(name, 0) for own in found.values()) for name in hosts}
    if any(used[name] > host.slots for name, host in hosts.items()):
        return None
    for own in found.values():
        need = ranks - sum(own.values())
        room = [
            (keys[name], host.slots - used[name])
            for name, host in hosts.items()
            if shared or used[name] == own.get(name, 0)  # nobody else is on it
        ]
        if need > _total(room):
            return None
        for name, count in _near(room, [keys[name] for name in own], need):
            own[name] = own.get(name, 0) + count
            used[name] += count
    return found


def _near(room: Room, around: Sequence[Key], need: int) -> list[tuple[str, int]]:
    """Takes `need` slots in the smallest place that has them and holds `around`."""
    if not need:
        return []
    groups = [_groups(room, depth) for depth in range(HOST + 1)]
    totals = {key: _total(group) for level in groups for key, group in level.items()}
    for depth in range(HOST, -1, -1):
        where = {key[:depth] for key in around}
        able = [
            ([totals[key[:d]] for d in range(depth, 0, -1)], key)  # how full it is, then what is around it
            for key in groups[depth]
            if where <= {key} and totals[key] >= need
        ]
        if able:
            return _take(groups[depth][min(able)[1]], need, depth)
    raise AssertionError("all hosts together have room: the caller has counted")


def _take(group: Room, need: int, depth: int) -> list[tuple[str, int]]:
    """From a place that has enough: the fullest of its parts that has enough; if none, all of the emptiest, and so on."""
    if depth == HOST:
        return [(group[0][0][-1], need)]
    parts = {key: (_total(part), part) for key, part in sorted(_groups(group, depth + 1).items())}
    taken: list[tuple[str, int]] = []
    while need:
        enough = [key for key, (total, _) in parts.items() if total >= need]
        key = min(enough, key=lambda k: parts[k][0]) if enough else max(parts, key=lambda k: parts[k][0])
        total, part = parts.pop(key)
        taken += _take(part, min(total, need), depth + 1)
        need -= min(total, need)
    return taken


def _groups(room: Room, depth: int) -> dict[Key, list[tuple[Key, int]]]:
    groups: dict[Key, list[tuple[Key, int]]] = {}
    for key, free in room:
        if free:
            groups.setdefault(key[:depth], []).append((key, free))
    return groups


def _total(room: Room) -> int:
    return sum(free for _, free in room)


def _seats(hosts: Mapping[str, Host], own: Mapping[str, int]) -> tuple[Seat, ...]:
    """Ranks numbered host by host, neighbours next to each other."""
    seats: list[Seat] = []
    for name in hosts:
        if own.get(name):
            first = seats[-1].first + seats[-1].count if seats else 0
            seats.append(Seat(host=name, first=first, count=own[name]))
    return tuple(seats)
