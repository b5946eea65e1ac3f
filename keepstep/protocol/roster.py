"""Which host keeps which replica, while hosts come and go (FT-HSDP section 5.4: spares and reallocation).

Nobody is in charge. Each host has an agent, and every agent sees the same: the plan (what is to be run), the hosts in the pool,
the seats (which host keeps which replica), and what has become of replicas. Any of them may compute new seats, and one
compare-and-swap lets exactly one win, as among leaders (`protocol.deciding`).

    no seats yet              wait until there is room for every replica; a while longer if some would share a host
    a host is gone            its replicas stay for `replace_after`: if it comes back, they go on in the same life.
                              Then they go to hosts with room; the others stay where they are
    its agent is a new one    its replicas are seated there again at once, for they died with the agent before
    a host is drained         its replicas leave at a step boundary, and then go to hosts with room
    a replica has an outcome  it is not seated again, until it is asked back (`keepstep add`)

A replica lies within one host: `ranks` slots of it. Replicas stand as far apart as they can (host, building, zone, rack), so that
whatever fails takes few of them. Two lives of one replica, on a host that was cut off and on another, are harmless
(docs/protocol.md), and the older one ends as soon as it hears of the newer.

Pure. `now` is nanoseconds of one agent's monotonic clock. It cannot fail: what cannot be done is a wait, with its reason.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.messages import Request
from keepstep.protocol.reasons import names
from keepstep.protocol.topology import place

SPREAD_NS = 10_000_000_000  # so long more hosts are waited for, before replicas share one


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run: the same for every agent, and for as long as the job lives."""

    script: str  # the same path on every host
    args: tuple[str, ...]
    replicas: int
    ranks: int
    min_replicas: int
    checkpoint_dir: str | None
    checkpoint_every: int
    keep_checkpoints: int
    replace_after_s: float  # a host may be gone for so long
    join_wait_s: float | None = None  # for these, None is the default of the ranks
    straggler_s: float | None = None
    slow_floor_s: float | None = None
    slow_ceiling_s: float | None = None
    max_restarts: int = 20  # of one replica, on whatever hosts, within
    restart_window_s: float = 3600.0
    faults: tuple[str, ...] = ()  # that are rehearsed

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.ranks < 1:
            raise ValueError("a plan has at least one replica, of at least one rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHost:
    """A host, and one life of its agent."""

    name: str
    agent: str  # a fresh random id at each start
    slots: int
    label: str  # "building/zone/rack"
    about: str  # which process that is, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a replica is kept."""

    host: str
    agent: str
    number: int  # how often this replica has been seated; 1 the first time


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """The places of all replicas that have one. Replaced by compare-and-swap only."""

    places: dict[ReplicaId, Place]
    reason: str  # in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a life of a replica ended."""

    cause: str
    killed: bool  # by a signal from outside, or with its host: it says little of the replica
    trained: bool
    at_s: float  # seconds of some clock; told to others, of the wall clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The newest life of a replica. Replaced by compare-and-swap only, and before anything of that life is started."""

    incarnation: Incarnation
    number: int  # of its place
    life: int  # how many the replica has had
    host: str = ""
    failures: tuple[Failure, ...] = ()  # of the lives before, as far as they count for the next host too


class Became(StrEnum):
    """What has become of a replica."""

    DONE = "done"  # the job is complete
    LEFT = "left"  # it, or the job, was asked to leave
    MOVES = "moves"  # its host is drained: it goes on elsewhere
    GIVEN_UP = "given_up"
    MISTAKE = "mistake"  # the user's configuration cannot work


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why a replica does not go on where it was. Forgotten when its next life is claimed."""

    became: Became
    host: str
    number: int  # of the place it had
    reason: str = ""
    request_id: str = ""  # the newest request about this replica that was known then


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """What the store holds about the hosts of a job."""

    plan: Plan | None = None
    hosts: Mapping[str, PoolHost] = field(default_factory=dict)
    seats: Seats | None = None
    revision: int = 0  # of the seats; 0: there are none
    claims: Mapping[ReplicaId, Claim] = field(default_factory=dict)
    outcomes: Mapping[ReplicaId, Outcome] = field(default_factory=dict)
    drained: Mapping[str, Request] = field(default_factory=dict)  # hosts that are to keep no replica

    @property
    def places(self) -> Mapping[ReplicaId, Place]:
        return {} if self.seats is None else self.seats.places


@dataclass(frozen=True, slots=True, kw_only=True)
class TrySeats:
    """Publish these if the store still holds those of `revision`."""

    seats: Seats
    revision: int


@dataclass(frozen=True, slots=True)
class Unseated:
    """Somebody cannot be seated now; why, in words."""

    reason: str


Requests = Mapping[ReplicaId | None, Request]


# --- what has become of replicas, and of the job ---------------------------------------------------------------


def outcome_of(replica: ReplicaId, roster: Roster, requests: Requests) -> Outcome | None:
    """Its outcome, unless it was asked back since then, or that is of an earlier place: who was cut off there may say so late."""
    outcome, request, at = roster.outcomes.get(replica), requests.get(replica), roster.places.get(replica)
    if outcome is None or outcome.became is Became.DONE:
        return outcome
    if at is not None and outcome.number < at.number:
        return None
    asked_back = request is not None and not request.leave and request.request_id != outcome.request_id
    return None if asked_back else outcome


def moves(replica: ReplicaId, roster: Roster, requests: Requests) -> bool:
    """Whether it has left the place that it has, and waits for another."""
    outcome = outcome_of(replica, roster, requests)
    return outcome is not None and outcome.became is Became.MOVES


def runs(replica: ReplicaId, roster: Roster, requests: Requests) -> bool:
    """Whether it is to run at the place that it has."""
    return replica in roster.places and outcome_of(replica, roster, requests) is None


def failures_before(replica: ReplicaId, roster: Roster, *, wall_s: float) -> tuple[Failure, ...]:
    """What the host that takes it now must know of its earlier lives: a crash loop may wander over hosts, or end them.

    Who was given up or had left, and was asked back since, begins anew.
    """
    claim, outcome = roster.claims.get(replica), roster.outcomes.get(replica)
    if claim is None:
        return ()
    if outcome is None:
        lost = f"host {claim.host} was lost, or its agent"
        return (*claim.failures, Failure(cause=lost, killed=True, trained=True, at_s=wall_s))
    return claim.failures if outcome.became is Became.MOVES else ()


def is_ending(roster: Roster, requests: Requests) -> bool:
    """Whether nobody is seated any more: some replica is through, or the job was asked to stop."""
    return _stopped(requests) or any(o.became is Became.DONE for o in roster.outcomes.values())


def wanted(roster: Roster, requests: Requests) -> list[ReplicaId]:
    """The replicas that should have a place."""
    if roster.plan is None or is_ending(roster, requests):
        return []
    everyone = map(ReplicaId, range(roster.plan.replicas))
    outcomes = {r: outcome_of(r, roster, requests) for r in everyone}
    return [r for r, outcome in outcomes.items() if outcome is None or outcome.became is Became.MOVES]


def code_of_end(roster: Roster, requests: Requests, gone: Collection[str]) -> int | None:
    """The exit code of every agent once no replica goes on; None: the job is not over. `gone`: hosts that are not waited for."""
    if roster.plan is None:
        return None
    ending = is_ending(roster, requests)
    for replica in map(ReplicaId, range(roster.plan.replicas)):
        outcome, at = outcome_of(replica, roster, requests), roster.places.get(replica)
        if outcome is not None and (outcome.became is not Became.MOVES or ending):
            continue
        if not ending or (at is not None and at.host not in gone and not _began_again(roster, at)):
            return None  # it runs, or will
    kinds = {outcome.became for outcome in roster.outcomes.values()}
    if ending:
        return 0
    return 78 if Became.MISTAKE in kinds else 1


def _began_again(roster: Roster, at: Place) -> bool:
    """Whether the agent that kept this place has been followed by another one: what it kept has died with it."""
    return at.host in roster.hosts and roster.hosts[at.host].agent != at.agent


def _stopped(requests: Requests) -> bool:
    return None in requests and requests[None].leave


# --- who gets which place --------------------------------------------------------------------------------------


class Seating:
    """One agent's view over time: since when hosts are gone, and what it would publish."""

    def __init__(self) -> None:
        self._gone_since: dict[str, int] = {}  # hosts that keep replicas, or should
        self._room_since: int | None = None  # there was room for everybody, if some share a host
        self._delay = 0
        self._roster: Roster | None = None
        self._requests: Requests = {}
        self.waiting = ""  # for what, in words

    def on_view(self, roster: Roster, requests: Requests, *, now: int) -> TrySeats | None:
        """Something has changed, or the store is back (see `lost_sight`)."""
        self._roster, self._requests = roster, requests
        self._delay = 0 if roster.plan is None else int(roster.plan.replace_after_s * 1e9)
        keeping = {at.host for at in roster.places.values()}
        self._gone_since = {host: self._gone_since.get(host, now) for host in keeping - roster.hosts.keys()}
        return self._decide(now)

    def on_time(self, *, now: int) -> TrySeats | None:
        """`next_deadline` has come."""
        return self._decide(now)

    def lost_sight(self) -> None:
        """The store is away: what is missing when it is back was perhaps only missing with it."""
        self._roster = None
        self._gone_since.clear()

    def gone(self, *, now: int) -> frozenset[str]:
        """Hosts that keep replicas, and have been away for longer than is waited for them."""
        return frozenset(host for host, since in self._gone_since.items() if now >= since + self._delay)

    def next_deadline(self, *, now: int) -> int | None:
        """When the next host has been away for so long, or more hosts have been waited for."""
        times = [since + self._delay for since in self._gone_since.values()]
        times += [] if self._room_since is None else [self._room_since + SPREAD_NS]
        return min((at for at in times if now < at), default=None)

    def _decide(self, now: int) -> TrySeats | None:
        if self._roster is None:
            return None
        answer = new_seats(self._roster, self._requests, self.gone(now=now))
        shared = isinstance(answer, TrySeats) and self._roster.seats is None and _share(answer.seats)
        self._room_since = (now if self._room_since is None else self._room_since) if shared else None
        if self._room_since is not None and now < self._room_since + SPREAD_NS:
            self.waiting = "there is room for every replica; more hosts are waited for, so that none has to share one"
            return None
        self.waiting = answer.reason if isinstance(answer, Unseated) else ""
        return answer if isinstance(answer, TrySeats) else None


def _share(seats: Seats) -> bool:
    return len({at.host for at in seats.places.values()}) < len(seats.places)


def new_seats(roster: Roster, requests: Requests, gone: Collection[str]) -> TrySeats | Unseated | None:
    """None: everybody who should have a place has a good one."""
    plan, held = roster.plan, roster.places
    if plan is None:
        return Unseated("no agent has said yet what is to be run")
    everyone = wanted(roster, requests)
    usable = {h.name: h for h in roster.hosts.values() if h.name not in roster.drained}
    room = {name: host.slots // plan.ranks for name, host in usable.items()}  # replicas
    kept: dict[ReplicaId, Place] = {}
    for replica in everyone:
        stays = None if moves(replica, roster, requests) else _stays(held.get(replica), roster, room, gone)
        if stays is not None:
            kept[replica] = stays
            if stays.host in room:
                room[stays.host] -= 1
    homeless = [r for r in everyone if r not in kept]
    free = sum(room.values())
    places, stay_away = {**kept}, homeless[free:]
    if roster.seats is None and stay_away:
        return Unseated(_too_little(plan, homeless, free, roster))
    for replica in homeless[:free]:
        host = _farthest(usable, room, places.values())
        room[host.name] -= 1
        places[replica] = Place(host=host.name, agent=host.agent, number=1 + _number(replica, roster))
    places |= {r: held[r] for r in stay_away if r in held}  # if its host comes back first, it goes on there
    changed = {r: at for r, at in places.items() if held.get(r) != at}
    if not changed:
        return Unseated(_too_little(plan, homeless, free, roster)) if stay_away else None
    words = "; ".join(f"replica {r} on {changed[r].host}" for r in sorted(changed))
    return TrySeats(seats=Seats(places=dict(sorted(places.items())), reason=words), revision=roster.revision)


def _number(replica: ReplicaId, roster: Roster) -> int:
    """Of the last place that it had; 0: it had none. Who was given up has none now, but its last life was claimed for one."""
    at, claim = roster.places.get(replica), roster.claims.get(replica)
    return max(0 if at is None else at.number, 0 if claim is None else claim.number)


def _stays(at: Place | None, roster: Roster, room: Mapping[str, int], gone: Collection[str]) -> Place | None:
    """Where a replica stays; None if it needs another place."""
    if at is None:
        return None
    host = roster.hosts.get(at.host)
    if host is None:
        return None if at.host in gone else at  # it may come back
    if host.agent == at.agent and (host.name in roster.drained or room[host.name] > 0):
        return at  # of a drained host: until it has left
    if room.get(host.name, 0) > 0:
        return Place(host=host.name, agent=host.agent, number=at.number + 1)
    return None


def _farthest(usable: Mapping[str, PoolHost], room: Mapping[str, int], others: Iterable[Place]) -> PoolHost:
    """The host with room that shares least with the replicas that have a place; of several the fullest."""
    taken = [(at.host, usable[at.host].label) for at in others if at.host in usable]

    def shared(host: PoolHost) -> tuple[int, ...]:
        mine = place(host.label)
        by_depth = (sum(place(label)[:depth] == mine[:depth] for _, label in taken) for depth in (1, 2, 3))
        return sum(name == host.name for name, _ in taken), *by_depth, room[host.name]

    return min((h for name, h in usable.items() if room[name] > 0), key=lambda h: (shared(h), place(h.label), h.name))


def _too_little(plan: Plan, homeless: list[ReplicaId], free: int, roster: Roster) -> str:
    drained = sorted(roster.drained.keys() & roster.hosts.keys())
    out = f"; {', '.join(drained)} {'is' if len(drained) == 1 else 'are'} drained" if drained else ""
    one = len(roster.hosts) == 1
    hosts = f"{len(roster.hosts)} host{'' if one else 's'} in the pool {'has' if one else 'have'}"
    return (
        f"{names(homeless)} of {plan.ranks} ranks, each within one host, and the {hosts} room for {free} more{out}: start "
        "`keepstep agent` on more hosts"
    )


def differences(known: Plan, mine: Plan) -> str:
    """What two agents of one job do not agree on, in words; empty if they do."""
    return "; ".join(
        f"{name.replace('_', ' ')} is {getattr(known, name)!r} there, {getattr(mine, name)!r} here"
        for name in Plan.__dataclass_fields__
        if getattr(known, name) != getattr(mine, name)
    )
