"""What the keys of a job in etcd say, decoded as they change.

A value that cannot be read, is too large or makes no sense is ignored; the last good one stays in force. That is said, but not
every time. One asyncio loop; no I/O.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aetcd import rpc

from keepstep.protocol.errors import RemoteProtocolError
from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.messages import Decision, Report, Request
from keepstep.protocol.roster import Claim, Outcome, Plan, PoolHost, Roster, Seats
from keepstep.protocol.sense import problem_of_decision, problem_of_report
from keepstep.runtime.refusals import Refusals
from keepstep.runtime.wire import decode

MAX_VALUE = 8 << 20  # bytes; a report has some hundred, unless many units are requeued
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class KeyValue:
    """What the store holds at a key; without the value where nobody reads it, or where it is too large to be right."""

    key: bytes
    value: bytes
    mod_revision: int


def _value_of(name: bytes, value: bytes) -> Any:
    """What we read the key for; None: for its being there. Raises RemoteProtocolError."""
    if len(value) > MAX_VALUE:
        raise RemoteProtocolError(f"it has {len(value)} bytes, at most {MAX_VALUE} can be right")
    if name == b"decision":
        decision = decode(value, Decision)
        problem = problem_of_decision(decision)
        if problem:
            raise RemoteProtocolError(f"this decision cannot be meant: {problem}")
        return decision
    if name.startswith(b"reports/"):
        report = decode(value, Report)
        problem = problem_of_report(report) if name == b"reports/%d" % report.replica_id else "it is another replica's"
        if problem:
            raise RemoteProtocolError(f"this report cannot be meant: {problem}")
        return report
    if name.startswith((b"requests/", b"roster/drained/")):
        return decode(value, Request)
    if name.startswith(b"roster/hosts/"):
        host = decode(value, PoolHost)
        if name != b"roster/hosts/" + host.name.encode() or host.slots < 1:
            raise RemoteProtocolError("it is another host's, or has no slots")
        return host
    for where, kind in _ROSTER.items():
        if name.startswith(where):
            return decode(value, kind)
    return None


_ROSTER: dict[bytes, Any] = {
    b"roster/plan": Plan,
    b"roster/seats": Seats,
    b"roster/claims/": Claim,
    b"roster/outcomes/": Outcome,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """What one process sees of the job. Times are this process's monotonic nanoseconds."""

    last: Decision | None
    revision: int  # of the decision's key; 0: there is none
    last_seen_at: int
    reports: dict[ReplicaId, tuple[Report, int]]
    dead: frozenset[Incarnation]
    announced: frozenset[ReplicaId]
    connected: bool
    requests: Mapping[ReplicaId | None, Request] = field(default_factory=dict)  # None: of the whole job
    launched: bool = False  # a `keepstep run`, or an agent, lives that starts the replicas
    roster: Roster = field(default_factory=Roster)  # of a job that agents run


class Reading:
    """The keys of one job, decoded as they change."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._raw: dict[bytes, KeyValue] = {}
        self._values: dict[bytes, tuple[Any, int]] = {}  # readable report or decision; when this version was first seen
        self._base = 0  # the store's revision at the last full reading: no event up to it is news
        self.newest = 0
        self._refusals = Refusals("a value in the store")
        self.connected = False

    def replace_all(self, found: list[Any], revision: int) -> None:
        for key in self._raw.keys() - {kv.key for kv in found}:
            self._drop(key)
        for kv in found:
            self._put(kv)
        self._base = self.newest = revision

    def change(self, event: Any) -> None:
        revision = event.kv.mod_revision
        if revision <= self._base:
            return
        self.newest = revision
        if event.type == rpc.Event.DELETE:
            self._drop(event.kv.key)
        else:
            self._put(event.kv)

    def raw(self, key: bytes) -> KeyValue | None:
        """What the store holds there, or None if it is not known."""
        return self._raw.get(key)

    def _put(self, kv: Any) -> None:
        known, name = self._raw.get(kv.key), kv.key.removeprefix(self._root)
        read = name == b"decision" or name.startswith((b"reports/", b"endpoints/", b"requests/", b"roster/"))
        kept = kv.value if read and len(kv.value) <= MAX_VALUE else b""
        self._raw[kv.key] = KeyValue(kv.key, kept, kv.mod_revision)
        if known is not None and known.value == kept:
            return  # `seen_at` stays
        try:
            value = _value_of(name, kv.value) if read else None
        except RemoteProtocolError as error:  # what was there before stays in force
            where = kv.key.decode(errors="replace")
            self._refusals.note(where, error, where)
        else:
            if value is not None:
                self._values[name] = (value, time.monotonic_ns())

    def _drop(self, key: bytes) -> None:
        self._raw.pop(key, None)
        self._values.pop(key.removeprefix(self._root), None)

    def view(self) -> StoreView:
        last, seen = self._values.get(b"decision", (None, 0))
        decision = self._raw.get(self._root + b"decision")
        reports = {
            value.replica_id: (value, at) for name, (value, at) in self._values.items() if name.startswith(b"reports/")
        }
        return StoreView(
            last=last,
            revision=0 if decision is None else decision.mod_revision,
            last_seen_at=seen,
            reports=reports,
            dead=frozenset(Incarnation(name) for name in self._names(b"dead/")),
            announced=frozenset(
                ReplicaId(int(n))
                for name in self._names(b"announced/")
                if _NUMBER.fullmatch(n := name.partition("/")[0])
            ),
            connected=self.connected,
            requests=self._requests(),
            launched=self._root + b"launcher" in self._raw or bool(self._names(b"roster/hosts/")),
            roster=self._roster(),
        )

    def _roster(self) -> Roster:
        below, by_replica = self._below, self._by_replica
        seats = self._raw.get(self._root + b"roster/seats")
        return Roster(
            plan=self._values.get(b"roster/plan", (None, 0))[0],
            hosts=below(b"roster/hosts/"),
            seats=self._values.get(b"roster/seats", (None, 0))[0],
            revision=0 if seats is None else seats.mod_revision,
            claims=by_replica(b"roster/claims/"),
            outcomes=by_replica(b"roster/outcomes/"),
            drained=below(b"roster/drained/"),
        )

    def _below(self, folder: bytes) -> dict[str, Any]:
        """The readable values of a folder, by name."""
        return {
            name.removeprefix(folder).decode(errors="replace"): value
            for name, (value, _) in self._values.items()
            if name.startswith(folder)
        }

    def _by_replica(self, folder: bytes) -> dict[ReplicaId, Any]:
        return {ReplicaId(int(n)): value for n, value in self._below(folder).items() if _NUMBER.fullmatch(n)}

    def _requests(self) -> dict[ReplicaId | None, Request]:
        found: dict[ReplicaId | None, Request] = {}
        for name, (value, _) in self._values.items():
            about = name.removeprefix(b"requests/").decode(errors="replace")
            if name.startswith(b"requests/") and (about == "job" or _NUMBER.fullmatch(about)):
                found[None if about == "job" else ReplicaId(int(about))] = value
        return found

    def _names(self, folder: bytes) -> list[str]:
        prefix = self._root + folder
        return [key.removeprefix(prefix).decode(errors="replace") for key in self._raw if key.startswith(prefix)]
