"""Every message survives its encoding; nothing else is let in."""

import pytest
from machines import LEDGER, C, W, decision, hello, member, peers, state

from keepstep.protocol.errors import RemoteProtocolError
from keepstep.protocol.ids import QuorumId, Rank, ReplicaId, Seq
from keepstep.protocol.messages import (
    Abort,
    Decided,
    Decision,
    Downward,
    Fetched,
    Finish,
    Load,
    Loaded,
    Report,
    RingBroken,
    StartOver,
    Upward,
    Verdict,
    Vote,
)
from keepstep.runtime.wire import decode, decode_frame, encode, encode_frame

STEP = decision(3, 2, 1, member(0, W, 4, 5), member(1, C, fetch=True))
MESSAGES: list[Downward | Upward] = [
    Decided(decision=STEP, peers=peers(STEP)),
    Load(state=state(1, 2)),
    Verdict(seq=Seq(3), commit=False, reason="because"),
    StartOver(reason="because", state=state(1, 2)),
    StartOver(reason="because"),
    Abort(quorum_id=QuorumId(3), suspect=ReplicaId(1), reason="gone"),
    Finish(error="over"),
    hello(1),
    Vote(rank=Rank(0), seq=Seq(3), yes=False, ring_broken=True, suspect=ReplicaId(1), reason="because"),
    Fetched(rank=Rank(0), state=state(1, 2), since=Seq(4), ok=True),
    RingBroken(rank=Rank(0), quorum_id=QuorumId(1), suspect=None, reason="because"),
    Loaded(rank=Rank(0), state=state(1, 2)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_frames(message: Downward | Upward) -> None:
    assert decode_frame(encode_frame(message)) == message


def test_store_values() -> None:
    report = Report(
        replica_id=ReplicaId(1), incarnation=STEP.members[0].incarnation, answers=Seq(3), state=state(2, 1), materialized=True,
        ledger=LEDGER, held_units=STEP.members[0].units,
    )  # fmt: skip
    assert decode(encode(report), Report) == report
    assert decode(encode(STEP), Decision) == STEP


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\x93\x01\x02\x03", b"\x92\xa1x\x80", b"\x92\xa4Load\x80", b"\x92\xa4Vote\x01"]
)
def test_frames_that_make_no_sense_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_frame(data)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"seq": "one"}'])
def test_store_values_that_make_no_sense_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data, Decision)
