"""A decision comes down as little as its ranks do not know, and they know the same afterwards."""

from dataclasses import replace
from random import Random

import msgspec
import pytest
from machines import C, W, decision, member

from keepstep.protocol.errors import RemoteProtocolError
from keepstep.protocol.follow import follow, for_ranks
from keepstep.protocol.ids import Incarnation, QuorumId, ReplicaId, Seq, Step
from keepstep.protocol.messages import (
    Decided,
    Decision,
    Downward,
    Endpoint,
    Kind,
    LedgerState,
    Policy,
    Report,
    Verdict,
)
from keepstep.protocol.quorum import SeenReport, View, decide, speculate
from keepstep.protocol.step import after_commit
from keepstep.runtime.decided import NOWHERE, Changed, Inbox, Outbox, _Member, difference, encode_down, heard_in
from keepstep.runtime.endpoints import Endpoints

RANKS = 3
LEDGER = LedgerState(fingerprint="data", total=1000)


def listens(replica: int, rank: int) -> Endpoint:
    return Endpoint(host=f"host-{replica}{'x' * replica}", ftar_port=100 * replica + rank, state_port=7)


class Replica:
    """A leader's outbox and its ranks' inboxes; replica 0."""

    def __init__(self) -> None:
        self.outbox = Outbox(ReplicaId(0))
        self.kind, self.common = b"", 0  # of what was told last, and how long what all are told alike was
        self.inboxes = [Inbox(ReplicaId(0), member(0, W).incarnation) for _ in range(RANKS)]

    def tell(self, what: Decision) -> tuple[int, list[Decided]]:
        """How many bytes all ranks were told, and what each of them made of it."""
        tables = {
            life: Endpoints.of(listens(life[0], rank) for rank in range(RANKS)) for life in self.outbox.news(what)
        }
        common, records, width = self.outbox.tell(what, tables)
        heard = [
            hear(inbox, common, records[rank * width : (rank + 1) * width]) for rank, inbox in enumerate(self.inboxes)
        ]
        assert all(isinstance(message, Decided) and message.decision == for_ranks(what) for message in heard)
        self.kind, self.common = common[:1], len(common)
        return len(common) + len(records), heard  # type: ignore[return-value]


def hear(inbox: Inbox, common: bytes, record: bytes) -> Downward:
    heard = heard_in(common)
    inbox.hear(heard, record)
    return inbox.message(heard)


def addresses(heard: Decided) -> list[Endpoint]:
    return [peer.endpoint for peer in heard.peers]


def after(last: Decision) -> Decision:
    """What the quorum says when all members have committed `last`."""
    assert last.ledger is not None
    ledger = after_commit(last, last.ledger)
    reports = {
        m.replica_id: SeenReport(
            report=Report(
                replica_id=m.replica_id, incarnation=m.incarnation, answers=last.seq, state=last.outcome, materialized=True,
                ledger=ledger, held_units=speculate(last, m.replica_id),
            ), seen_at=0,
        )
        for m in last.members
    }  # fmt: skip
    answer = decide(View(last=last, last_seen_at=0, reports=reports), Policy(num_replicas=5), now=1)
    assert isinstance(answer, Decision)
    return answer


FIVE = replace(decision(3, 2, 2, *(member(n, W, n) for n in range(5)), ledger=LEDGER), num_replicas=5)


def test_a_steady_step_is_nine_bytes() -> None:
    replica, last = Replica(), FIVE
    first, heard = replica.tell(last)
    assert first > 100
    assert [addresses(h)[1:] for h in heard] == [
        [listens(1, rank), NOWHERE, NOWHERE, listens(4, rank)] for rank in range(RANKS)
    ]
    for _ in range(50):
        last = after(last)
        told, again = replica.tell(last)
        assert told == 9
        assert [h.peers for h in again] == [h.peers for h in heard]


@pytest.mark.parametrize("total", [7, 12])
def test_the_end_of_the_data_is_announced(total: int) -> None:
    """What is expected and what the quorum says differ there, and nobody relies on the former."""
    last = replace(FIVE, ledger=replace(LEDGER, total=total))
    replica = Replica()
    replica.tell(last)
    while last.kind is Kind.TRAIN:
        last = after(last)
        replica.tell(last)


def test_only_new_neighbours_are_told() -> None:
    replica = Replica()
    replica.tell(FIVE)
    without_4 = replace(FIVE, seq=Seq(4), quorum_id=QuorumId(4), members=FIVE.members[:4])
    _, heard = replica.tell(without_4)
    assert [addresses(h)[1:] for h in heard] == [[listens(1, r), NOWHERE, listens(3, r)] for r in range(RANKS)]
    assert replica.outbox.news(without_4) == []
    without_2 = replace(without_4, seq=Seq(5), quorum_id=QuorumId(5), members=FIVE.members[:2] + FIVE.members[3:4])
    assert replica.outbox.news(without_2) == [], "1 and 3 are known"
    replica.tell(without_2)
    back = replace(FIVE, seq=Seq(6), quorum_id=QuorumId(6))
    assert [life for life, _ in replica.outbox.news(back)] == [4], "its address was forgotten when it had gone"
    replica.tell(back)


WITHOUT_4 = replace(FIVE, seq=Seq(4), quorum_id=QuorumId(4), members=FIVE.members[:4])


def rejoined() -> tuple[Decision, Decision]:
    """Replica 4 was lost, the step committed without it, and it is back: for a fetch, and then still at it."""
    go_on = after(WITHOUT_4)
    back = replace(
        go_on, quorum_id=QuorumId(go_on.seq), members=(*go_on.members, member(4, C, fetch=True, life=1)), reason="back"
    )
    assert back.ledger is not None
    fetching = replace(after(replace(back, members=go_on.members)), quorum_id=back.quorum_id)
    return back, replace(fetching, members=(*fetching.members, member(4, C, life=1)))


def test_a_change_is_told_as_who_went_and_who_came() -> None:
    replica = Replica()
    replica.tell(FIVE)
    assert replica.kind == b"a"
    back, fetching = rejoined()
    for what, most in ((WITHOUT_4, 20), (back, 150)):
        replica.tell(what)
        assert replica.kind == b"d"
        assert replica.common < most, "it does not grow with those who stay"
    told, _ = replica.tell(fetching)
    assert told == 9, "that somebody catches up is what is expected"
    caught_up = replace(fetching, seq=Seq(fetching.seq + 1), step=Step(fetching.step + 1))
    replica.tell(replace(caught_up, members=(*caught_up.members[:4], member(4, W, 99, life=1))))
    assert replica.kind == b"d"


def test_whatever_comes_after_whatever_is_heard_as_it_is() -> None:
    """Members that go, come, change their roles, lives and places; other fields too. Also after what was not to be expected."""
    random = Random(7)
    for _ in range(60):
        replica, seq = Replica(), 3
        for _ in range(6):
            others = random.sample(range(1, 7), random.randrange(7))
            members = [member(n, random.choice((W, C)), life=random.randrange(2)) for n in others]
            members.insert(random.randrange(len(members) + 1), member(0, W, 0))
            kind = random.choice((Kind.TRAIN, Kind.TRAIN, Kind.GATHER))
            what = replace(FIVE, seq=Seq(seq), quorum_id=QuorumId(seq), kind=kind, members=tuple(members))
            _, heard = replica.tell(replace(what, step=Step(random.randrange(3))))
            told = {peer.replica_id: peer.endpoint for peer in heard[1].peers}
            if kind is Kind.TRAIN:
                at = members.index(member(0, W, 0))
                near = {members[at - 1].replica_id, members[(at + 1) % len(members)].replica_id} - {ReplicaId(0)}
                assert all(told[n] == listens(n, 1) for n in near)
            seq += random.randrange(1, 3)


def test_a_difference_leads_from_one_to_the_other() -> None:
    five = FIVE.members
    for other in ((), five[1:], five[::-1], (five[4], *five[:4]), (*five[:2], member(2, C), *five[3:])):
        gone, come = difference(five, other)
        rest = [m for m in five if m.replica_id not in gone]
        for place, m in come:
            rest.insert(place, m)
        assert tuple(rest) == other


def test_a_difference_from_something_else_is_refused() -> None:
    """Whoever missed a decision, or has just begun, cannot take a difference for a decision."""
    replica, late = Replica(), Inbox(ReplicaId(0), member(0, W).incarnation)
    replica.tell(FIVE)
    common, _, _ = replica.outbox.tell(
        WITHOUT_4, {life: Endpoints.of([listens(life[0], 0)]) for life in replica.outbox.news(WITHOUT_4)}
    )
    assert common[:1] == b"d"
    with pytest.raises(RemoteProtocolError, match="was not heard of here"):
        late.hear(heard_in(common), b"")
    said = heard_in(common)
    assert isinstance(said, Changed)
    record = bytes((said.length + 4) * len(said.told))
    one = said.come or ((0, _Member(ReplicaId(9), Incarnation("j0"), False, False, ())),)
    for wrong, why in (
        ({"gone": (ReplicaId(7),)}, "not in the one before"),
        ({"gone": (ReplicaId(0),)}, "does not name this life"),
        ({"come": ((99, one[0][1]),)}, "in place 99"),
        ({"come": ((-1, one[0][1]),)}, "in place -1"),
        ({"seq": said.seq + 1, "rest": msgspec.msgpack.encode(for_ranks(WITHOUT_4))}, "is called 4 inside"),
        ({"rest": b"?"}, "malformed decision"),
    ):
        rank = Replica()
        rank.tell(FIVE)
        heard = msgspec.structs.replace(said, **wrong)
        rank.inboxes[0].hear(heard, record)
        with pytest.raises(RemoteProtocolError, match=why):
            rank.inboxes[0].message(heard)


def test_whoever_fetches_is_told_of_all_who_hold_the_state() -> None:
    replica = Replica()
    members = (member(0, C, fetch=True), *FIVE.members[1:4], member(4, C))
    _, heard = replica.tell(replace(FIVE, members=members))
    assert addresses(heard[2])[1:] == [listens(n, 2) for n in (1, 2, 3, 4)]


def test_an_alone_replica_needs_nobody() -> None:
    _, heard = Replica().tell(replace(FIVE, members=FIVE.members[:1]))
    assert addresses(heard[0]) == [NOWHERE]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"c",
        b"c" + bytes(8),
        b"v",
        b"v" + bytes(7),
        b"a",
        b"a\xff",
        b"o",
        b"oxx",
        b"?",
        b"a\x96\x01\x01\x90\x90\x00\xc4\x00",
        b"d",
        b"d\xff",
        b"d\x99\x00\x01\x01\xc2\x90\x90\x90\x00\xc4\x00",
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    inbox = Inbox(ReplicaId(0), member(0, W).incarnation)
    with pytest.raises(RemoteProtocolError):
        hear(inbox, data, b"")


def test_a_decision_without_its_addresses_or_out_of_order_is_refused() -> None:
    replica = Replica()
    tables = {life: Endpoints.of(listens(life[0], r) for r in range(RANKS)) for life in replica.outbox.news(FIVE)}
    common, records, width = replica.outbox.tell(FIVE, tables)
    inbox = replica.inboxes[0]
    for record in (b"", records[: width - 1], records):
        with pytest.raises(RemoteProtocolError, match="bytes of addresses"):
            hear(inbox, common, record)
    hear(inbox, common, records[:width])
    for again in (common, b"c" + (3).to_bytes(8, "little"), b"c" + (5).to_bytes(8, "little")):
        with pytest.raises(RemoteProtocolError):
            hear(inbox, again, records[:width])


@pytest.mark.parametrize("verdict", [Verdict(seq=Seq(3), commit=True), Verdict(seq=Seq(3), commit=False, reason="no")])
def test_other_messages_pass(verdict: Verdict) -> None:
    inbox = Inbox(ReplicaId(0), member(0, W).incarnation)
    assert hear(inbox, encode_down(verdict), b"") == verdict
    assert len(encode_down(Verdict(seq=Seq(3), commit=True))) == 9


def test_nothing_is_expected_after_a_decision_that_is_not_for_training() -> None:
    assert follow(replace(FIVE, kind=Kind.GATHER)) is None
    assert follow(replace(FIVE, members=(member(4, C),))) is None
    assert follow(replace(FIVE, members=tuple(replace(m, units=()) for m in FIVE.members))) is None
