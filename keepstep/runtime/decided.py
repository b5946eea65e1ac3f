"""A decision on its way from a leader to its ranks: as little as they do not know yet.

    Continued   seq only: it is what `follow` makes of the decision before
    Committed   seq only: the verdict of most steps
    Announced   the decision without its ancestry; and for each member whose address the rank needs and has not got yet, where
                the same rank of it listens, in the rank's own record

A rank needs the addresses of its two neighbours in a new ring, and of all WORKERs if it fetches from them. Both ends keep the
same book of what was told: the addresses of the lives that are members. Everybody else's endpoint is `NOWHERE`.

What was said is checked when it is heard; the protocol's own message is made of it when it is asked for. Not thread-safe.
"""

import struct
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from keepstep.protocol.errors import LocalProtocolError, RemoteProtocolError
from keepstep.protocol.follow import follow, for_ranks
from keepstep.protocol.ids import Incarnation, QuorumId, ReplicaId, Seq, UnitId
from keepstep.protocol.messages import Decided, Decision, Downward, Endpoint, Kind, Member, Peer, Role, Verdict
from keepstep.protocol.sense import problem_of_decision
from keepstep.runtime.endpoints import Endpoints, endpoint_in
from keepstep.runtime.wire import MALFORMED, decode_frame, encode_frame, unpack

Life = tuple[ReplicaId, Incarnation]

NOWHERE = Endpoint(host="", ftar_port=0, state_port=0)
_CONTINUED, _COMMITTED, _ANNOUNCED, _OTHER = b"c", b"v", b"a", b"o"
_SEQ = struct.Struct("<Q")


class Continued(msgspec.Struct, frozen=True):
    seq: Seq


class Committed(msgspec.Struct, frozen=True):
    seq: Seq


class _Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    replica_id: ReplicaId
    incarnation: Incarnation
    catching_up: bool
    fetch: bool
    units: tuple[UnitId, ...]


class Announced(msgspec.Struct, frozen=True, array_like=True):
    """What every rank of a replica is told alike."""

    seq: Seq
    quorum_id: QuorumId
    members: tuple[_Member, ...]
    mine: int  # which of them we are
    told: tuple[int, ...]  # of these members the record has the endpoint, each in `length` + 4 bytes
    length: int
    rest: bytes  # the decision, without members


Heard = Continued | Committed | Announced | Downward

_announced = msgspec.msgpack.Decoder(Announced)


def neighbours(decision: Decision, me: ReplicaId) -> tuple[int, ...]:
    """Where the members before and after ours stand, in a ring of more than one."""
    size = len(decision.members)
    at = next(n for n, m in enumerate(decision.members) if m.replica_id == me)
    return tuple({(at - 1) % size, (at + 1) % size} - {at})


class Outbox:
    """The leader's end."""

    def __init__(self, replica_id: ReplicaId) -> None:
        self._me = replica_id
        self._last: Decision | None = None
        self._book: set[Life] = set()

    def news(self, decision: Decision) -> list[Life]:
        """The members whose endpoints have to be told along with it."""
        members = decision.members
        me = next(m for m in members if m.replica_id == self._me)
        wanted: set[int] = set()
        if decision.kind is Kind.TRAIN:
            wanted.update(neighbours(decision, self._me))
        if me.role is Role.CATCHING_UP and me.fetch:
            wanted.update(n for n, m in enumerate(members) if m.role is Role.WORKER and m is not me)
        lives = [(members[n].replica_id, members[n].incarnation) for n in sorted(wanted)]
        return [life for life in lives if life not in self._book]

    def tell(self, decision: Decision, tables: Mapping[Life, Endpoints]) -> tuple[bytes, bytes, int]:
        """The common bytes, all ranks' records, and the width of one. `tables` has what `news` asked for."""
        decision, last = for_ranks(decision), self._last
        self._last = decision
        if not tables and last is not None and decision == follow(last):
            return _CONTINUED + _SEQ.pack(decision.seq), b"", 0
        lives = [(m.replica_id, m.incarnation) for m in decision.members]
        self._book = {life for life in self._book if life in lives} | tables.keys()
        length = max((table.host_length for table in tables.values()), default=0)
        said = Announced(
            seq=decision.seq,
            quorum_id=decision.quorum_id,
            members=tuple(
                _Member(m.replica_id, m.incarnation, m.role is Role.CATCHING_UP, m.fetch, m.units)
                for m in decision.members
            ),
            mine=next(n for n, m in enumerate(decision.members) if m.replica_id == self._me),
            told=tuple(n for n, life in enumerate(lives) if life in tables),
            length=length,
            rest=msgspec.msgpack.encode(replace(decision, members=())),
        )
        columns = [tables[lives[n]].records(length) for n in said.told]
        records = b"".join(b"".join(row) for row in zip(*columns, strict=True))
        return _ANNOUNCED + msgspec.msgpack.encode(said), records, len(said.told) * (length + 4)


class Inbox:
    """A rank's end."""

    def __init__(self, replica_id: ReplicaId, incarnation: Incarnation) -> None:
        self._me = replica_id, incarnation
        self._seq: Seq | None = None
        self._last: Decision | None = None
        self._peers: tuple[Peer, ...] = ()
        self._book: dict[Life, bytes] = {}  # records
        self._news: list[tuple[Announced, bytes]] = []  # heard, and not in the book yet

    def hear(self, common: bytes, record: bytes) -> Heard:
        """Checks what came down the tree. Raises RemoteProtocolError."""
        kind, body = common[:1], common[1:]
        if kind == _CONTINUED:
            if len(body) != _SEQ.size or self._seq is None or (seq := _SEQ.unpack(body)[0]) != self._seq + 1:
                raise RemoteProtocolError("a decision goes on from one that was not heard of here")
            self._seq = seq
            return Continued(seq)
        if kind == _COMMITTED and len(body) == _SEQ.size:
            return Committed(_SEQ.unpack(body)[0])
        if kind == _OTHER:
            return decode_frame(body)  # type: ignore[return-value]
        if kind != _ANNOUNCED:
            raise RemoteProtocolError(f"malformed control message: its kind is {kind!r}")
        try:
            said = _announced.decode(body)
            self._announced(said, record)
        except MALFORMED as error:
            raise RemoteProtocolError(f"malformed control message: {error}") from None
        return said

    def _announced(self, said: Announced, record: bytes) -> None:
        if self._seq is not None and said.seq <= self._seq:
            raise RemoteProtocolError(f"decision {said.seq} comes after {self._seq}")
        size = len(said.members)
        mine = said.members[said.mine] if 0 <= said.mine < size else None
        if mine is None or (mine.replica_id, mine.incarnation) != self._me:
            raise RemoteProtocolError(f"decision {said.seq} does not name this life of replica {self._me[0]}")
        if len(record) != (said.length + 4) * len(said.told) or any(not 0 <= n < size for n in said.told):
            raise RemoteProtocolError(f"decision {said.seq} comes with {len(record)} bytes of addresses")
        self._seq = said.seq
        self._news.append((said, record))

    def _note(self) -> None:
        """Brings the book up to what was heard."""
        for said, record in self._news:
            lives, width = {(m.replica_id, m.incarnation) for m in said.members}, said.length + 4
            self._book = {life: known for life, known in self._book.items() if life in lives}
            for place, n in enumerate(said.told):
                m = said.members[n]
                self._book[m.replica_id, m.incarnation] = record[place * width : (place + 1) * width]
        self._news.clear()

    def message(self, heard: Heard) -> Downward:
        """As the protocol says it; for each of what was heard, in this order."""
        match heard:
            case Continued():
                decision = None if self._last is None else follow(self._last)  # which made sense when it was announced
                if decision is None or decision.seq != heard.seq:
                    raise RemoteProtocolError(f"decision {heard.seq} does not follow from the one before it")
                self._last = decision
            case Announced():
                self._last = decision = _decision(heard)
                self._peers = tuple(
                    Peer(replica_id=m.replica_id, incarnation=m.incarnation, endpoint=self.where(m.replica_id, m.incarnation))
                    for m in decision.members
                )  # fmt: skip
            case Committed():
                return Verdict(seq=heard.seq, commit=True)
            case _:
                return heard
        return Decided(decision=decision, peers=self._peers)

    def where(self, replica: ReplicaId, life: Incarnation) -> Endpoint:
        """What we were told of this member. Raises RemoteProtocolError."""
        self._note()
        record = self._book.get((replica, life))
        try:
            return NOWHERE if record is None else endpoint_in(record)
        except MALFORMED as error:
            raise RemoteProtocolError(f"malformed address of replica {replica}: {error}") from None


def _decision(heard: Announced) -> Decision:
    decision = unpack(heard.rest, Decision, "decision")
    if (decision.seq, decision.quorum_id) != (heard.seq, heard.quorum_id):
        raise RemoteProtocolError(f"decision {heard.seq} is called {decision.seq} inside")
    members = tuple(
        Member(
            replica_id=m.replica_id, incarnation=m.incarnation, role=Role.CATCHING_UP if m.catching_up else Role.WORKER,
            units=m.units, fetch=m.fetch,
        )
        for m in heard.members
    )  # fmt: skip
    decision = replace(decision, members=members)
    problem = problem_of_decision(decision)
    if problem:
        raise RemoteProtocolError(f"this decision cannot be meant: {problem}")
    return decision


def encode_down(message: Downward) -> bytes:
    """Everything but a decision."""
    if isinstance(message, Decided):
        raise LocalProtocolError("a decision is told by the Outbox")
    if isinstance(message, Verdict) and message.commit:
        return _COMMITTED + _SEQ.pack(message.seq)
    return _OTHER + encode_frame(message)
