"""A decision on its way from a leader to its ranks: as little as they do not know yet.

    Continued   seq only: it is what `follow` makes of the decision before
    Committed   seq only: the verdict of most steps
    Changed     a few members are not as in the decision before, or as `follow` has them: who went, who came, what else differs
    Announced   the whole decision, without its ancestry

With the last two come addresses: in the rank's own record, where the same rank of a member listens, for each member whose
address the rank needs and has not got yet. It needs those of its two neighbours in a new ring, and of all WORKERs if it fetches
from them. Both ends keep the same book of what was told: the addresses of the lives that are members. Everybody else's endpoint
is `NOWHERE`.

The common bytes are read once in a process (`heard_in`); whether they go on from what a rank has heard before is checked by each
(`Inbox.hear`); the protocol's own message is made when it is asked for. What goes on from a decision that a rank was not told is
refused, so whoever joins is told a whole one first. Not thread-safe.
"""

import struct
from collections.abc import Mapping, Sequence
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
_CONTINUED, _COMMITTED, _CHANGED, _ANNOUNCED, _OTHER = b"c", b"v", b"d", b"a", b"o"
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


class Announced(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every rank of a replica is told alike."""

    seq: Seq
    quorum_id: QuorumId
    members: tuple[_Member, ...]
    told: tuple[Life, ...]  # of these members the record has the endpoint, each in `length` + 4 bytes
    length: int
    rest: bytes  # the decision, without members


class Changed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The same, if it has much in common with decision `since`, the last one that was told."""

    since: Seq
    seq: Seq
    quorum_id: QuorumId
    follows: bool  # compared with what `follow` makes of that decision, not with itself
    gone: tuple[ReplicaId, ...]  # of its members: take them out,
    come: tuple[tuple[int, _Member], ...]  # then put these in, one after the other, where they stand
    told: tuple[Life, ...]
    length: int
    rest: bytes  # the decision, without members; empty: as it was, but for seq and quorum_id


News = Announced | Changed
Heard = Continued | Committed | News | Downward

_announced = msgspec.msgpack.Decoder(Announced)
_changed = msgspec.msgpack.Decoder(Changed)


def heard_in(common: bytes) -> Heard:
    """What is said to all ranks of a replica alike. Raises RemoteProtocolError."""
    kind, body = common[:1], common[1:]
    try:
        if kind == _CONTINUED and len(body) == _SEQ.size:
            return Continued(_SEQ.unpack(body)[0])
        if kind == _COMMITTED and len(body) == _SEQ.size:
            return Committed(_SEQ.unpack(body)[0])
        if kind == _CHANGED:
            return _changed.decode(body)
        if kind == _ANNOUNCED:
            return _announced.decode(body)
    except MALFORMED as error:
        raise RemoteProtocolError(f"malformed control message: {error}") from None
    if kind != _OTHER:
        raise RemoteProtocolError(f"malformed control message: {len(body)} bytes of the kind {kind!r}")
    return decode_frame(body)  # type: ignore[return-value]  # an Upward is refused by whoever carries it out


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
        expected = None if last is None else follow(last)
        if not tables and decision == expected:
            return _CONTINUED + _SEQ.pack(decision.seq), b"", 0
        lives = {(m.replica_id, m.incarnation) for m in decision.members}
        self._book = {life for life in self._book if life in lives} | tables.keys()
        told, length = tuple(tables), max((table.host_length for table in tables.values()), default=0)
        columns = [tables[life].records(length) for life in told]
        records = b"".join(b"".join(row) for row in zip(*columns, strict=True))
        return _said(decision, last, expected, told, length), records, len(told) * (length + 4)


def _said(
    decision: Decision, last: Decision | None, expected: Decision | None, told: tuple[Life, ...], length: int
) -> bytes:
    """The common bytes of a decision that is not just what was expected after `last`."""
    seq, quorum_id = decision.seq, decision.quorum_id
    rest = msgspec.msgpack.encode(replace(decision, members=()))
    ways = []
    for base in (expected, last):
        if base is None or last is None:
            continue
        gone, come = difference(base.members, decision.members)
        alike = replace(base, seq=seq, quorum_id=quorum_id, members=decision.members) == decision
        changed = Changed(
            last.seq, seq, quorum_id, base is expected, gone, tuple((n, _told(m)) for n, m in come), told, length,
            b"" if alike else rest,
        )  # fmt: skip
        ways.append(_CHANGED + msgspec.msgpack.encode(changed))
    members = tuple(_told(m) for m in decision.members)
    ways.append(_ANNOUNCED + msgspec.msgpack.encode(Announced(seq, quorum_id, members, told, length, rest)))
    return min(ways, key=len)


def difference(
    before: Sequence[Member], after: Sequence[Member]
) -> tuple[tuple[ReplicaId, ...], tuple[tuple[int, Member], ...]]:
    """Which of `before` are to be taken out, and what is to be put in where, one after the other, to get `after`."""
    gone: list[ReplicaId] = []
    come: list[tuple[int, Member]] = []
    rest = list(before)
    for place, m in enumerate(after):
        if m in rest:
            at = rest.index(m)
            gone += [other.replica_id for other in rest[:at]]
            del rest[: at + 1]
        else:
            come.append((place, m))
    return (*gone, *(other.replica_id for other in rest)), tuple(come)


def _told(m: Member) -> _Member:
    return _Member(m.replica_id, m.incarnation, m.role is Role.CATCHING_UP, m.fetch, m.units)


class Inbox:
    """A rank's end."""

    def __init__(self, replica_id: ReplicaId, incarnation: Incarnation) -> None:
        self._me = replica_id, incarnation
        self._seq: Seq | None = None
        self._last: Decision | None = None
        self._peers: tuple[Peer, ...] = ()
        self._book: dict[ReplicaId, tuple[Incarnation, bytes]] = {}  # records
        self._news: list[tuple[News, bytes]] = []  # heard, and not in the book yet

    def hear(self, heard: Heard, record: bytes) -> None:
        """Checks that what came down the tree goes on from what was heard before. Raises RemoteProtocolError."""
        if isinstance(heard, Continued):
            if heard.seq - 1 != self._seq:
                raise RemoteProtocolError("a decision goes on from one that was not heard of here")
            self._seq = heard.seq
        elif isinstance(heard, Announced | Changed):
            self._hear_news(heard, record)

    def _hear_news(self, news: News, record: bytes) -> None:
        if isinstance(news, Changed) and news.since != self._seq:
            raise RemoteProtocolError(f"decision {news.seq} differs from one that was not heard of here")
        if self._seq is not None and news.seq <= self._seq:
            raise RemoteProtocolError(f"decision {news.seq} comes after {self._seq}")
        if len(record) != (news.length + 4) * len(news.told) or news.length < 0:
            raise RemoteProtocolError(f"decision {news.seq} comes with {len(record)} bytes of addresses")
        self._seq = news.seq
        self._news.append((news, record))

    def _note(self) -> None:
        """Brings the book up to what was heard."""
        for news, record in self._news:
            book, width = self._book, news.length + 4
            if isinstance(news, Announced):
                lives = {m.replica_id: m.incarnation for m in news.members}
                self._book = book = {
                    replica: known for replica, known in book.items() if known[0] == lives.get(replica)
                }
            else:
                came = {m.replica_id: m.incarnation for _, m in news.come}
                for replica in news.gone:
                    if replica in book and book[replica][0] != came.get(replica):
                        del book[replica]
            for place, (replica, life) in enumerate(news.told):
                book[replica] = life, record[place * width : (place + 1) * width]
        self._news.clear()

    def message(self, heard: Heard) -> Downward:
        """As the protocol says it; for each of what was heard, in this order. Raises RemoteProtocolError."""
        match heard:
            case Continued():
                decision = None if self._last is None else follow(self._last)  # which made sense when it was announced
                if decision is None or decision.seq != heard.seq:
                    raise RemoteProtocolError(f"decision {heard.seq} does not follow from the one before it")
                self._last = decision
            case Announced() | Changed():
                self._last = decision = self._decision(heard)
                self._peers = tuple(
                    Peer(replica_id=m.replica_id, incarnation=m.incarnation, endpoint=self.where(m.replica_id, m.incarnation))
                    for m in decision.members
                )  # fmt: skip
            case Committed():
                return Verdict(seq=heard.seq, commit=True)
            case _:
                return heard
        return Decided(decision=decision, peers=self._peers)

    def _decision(self, news: News) -> Decision:
        if isinstance(news, Announced):
            decision = replace(_rest(news), members=tuple(_member(m) for m in news.members))
        else:
            last = self._last
            base = None if last is None or last.seq != news.since else follow(last) if news.follows else last
            if base is None:
                raise RemoteProtocolError(f"decision {news.seq} differs from one that is not known here")
            members = [m for m in base.members if m.replica_id not in news.gone]
            if len(members) + len(news.gone) != len(base.members):
                raise RemoteProtocolError(
                    f"decision {news.seq} goes on without replicas that were not in the one before it"
                )
            for place, m in news.come:
                if not 0 <= place <= len(members):
                    raise RemoteProtocolError(f"decision {news.seq} puts a member in place {place} of {len(members)}")
                members.insert(place, _member(m))
            decision = _rest(news) if news.rest else replace(base, seq=news.seq, quorum_id=news.quorum_id)
            decision = replace(decision, members=tuple(members))
        problem = problem_of_decision(decision)
        if problem:
            raise RemoteProtocolError(f"this decision cannot be meant: {problem}")
        if decision.member(*self._me) is None:
            raise RemoteProtocolError(f"decision {decision.seq} does not name this life of replica {self._me[0]}")
        return decision

    def where(self, replica: ReplicaId, life: Incarnation) -> Endpoint:
        """What we were told of this member. Raises RemoteProtocolError."""
        self._note()
        known = self._book.get(replica)
        try:
            return NOWHERE if known is None or known[0] != life else endpoint_in(known[1])
        except MALFORMED as error:
            raise RemoteProtocolError(f"malformed address of replica {replica}: {error}") from None


def _rest(news: News) -> Decision:
    decision = unpack(news.rest, Decision, "decision")
    if (decision.seq, decision.quorum_id) != (news.seq, news.quorum_id):
        raise RemoteProtocolError(f"decision {news.seq} is called {decision.seq} inside")
    return decision


def _member(m: _Member) -> Member:
    return Member(
        replica_id=m.replica_id, incarnation=m.incarnation, role=Role.CATCHING_UP if m.catching_up else Role.WORKER,
        units=m.units, fetch=m.fetch,
    )  # fmt: skip


def encode_down(message: Downward) -> bytes:
    """Everything but a decision."""
    if isinstance(message, Decided):
        raise LocalProtocolError("a decision is told by the Outbox")
    if isinstance(message, Verdict) and message.commit:
        return _COMMITTED + _SEQ.pack(message.seq)
    return _OTHER + encode_frame(message)
