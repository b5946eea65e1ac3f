"""A member that holds the token and sends bytes that are wrong: to whoever comes after it, and back to whoever comes before.

The exchange fails, with a suspect, or is what it should be; nothing outside the buffers is touched and the process lives. With
chunks moved in C (`runtime/pump.c`, where it is built) and in Python, over TCP and shared memory.
"""

import contextlib
import random
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_engine import LINK, Buffer, Member
from test_parsers import CLAIMS, changed

from keepstep.protocol.exchange import Exchange
from keepstep.protocol.ids import QuorumId, Seq
from keepstep.runtime.connecting import Kept
from keepstep.runtime.engine_events import EngineSettings, StepDone, StepFailed
from keepstep.runtime.links import ABORT, CREDIT, HEADER, HEARTBEAT, RING
from keepstep.runtime.native import library

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
from test_links import SHAPE, End

CASES = 120
VALUES = 60_001
USED = 28  # bytes of a header: behind them come padding, and a checksum that is not looked at within a host
SETTINGS = EngineSettings(chunk_bytes=SHAPE.chunk_bytes, window=SHAPE.window, link=replace(LINK, silent_s=2.0))
WAYS = {
    f"{link}, {how}": replace(SETTINGS, native=how == "C", link=replace(SETTINGS.link, shared_memory=link == "shm"))
    for link in ("tcp", "shm")
    for how in ("C", "Python")
}


class Between:
    """A buffer in the middle of memory that nobody may write to."""

    def __init__(self) -> None:
        self.all = np.full(3 * VALUES, 7.0, np.float32)
        self.buffer = Buffer(np.arange(VALUES, dtype=np.float32))
        self.buffer.target = self.all[VALUES : 2 * VALUES]
        assert self.buffer.addition is not None
        self.buffer.addition = replace(self.buffer.addition, output=self.buffer.target.ctypes.data)

    def check(self) -> None:
        assert (self.all[:VALUES] == 7).all(), "something was written before the output"
        assert (self.all[2 * VALUES :] == 7).all(), "something was written behind the output"
        assert (self.buffer.source == np.arange(VALUES)).all(), "the input was written to"


@pytest.fixture(params=WAYS)
def two(request: pytest.FixtureRequest) -> Iterator[tuple[Member, End, bool]]:
    if request.param.endswith("C") and library() is None:
        pytest.skip("the C library is not built here")
    settings = WAYS[request.param]
    victim, evil = Member(0, settings), End(1, settings.link)
    yield victim, evil, "tcp" in request.param
    victim.engine.close()
    evil.listener.close()


def said(quorum: int, payloads: bool) -> list[bytes]:
    """What an honest previous member sends: a header and a payload for each chunk."""
    progress = Exchange(nbytes=4 * VALUES, itemsize=4, size=2, position=0, shape=SHAPE)
    parts = []
    for number, chunk in enumerate(progress.receives):
        length = chunk.hi - chunk.lo
        parts += [HEADER.pack(quorum, quorum, 0, number, length, 0), bytes(length) if payloads else b""]
    return parts


def exchange(two: tuple[Member, End, bool], quorum: int, forwards: bytes, backwards: bytes) -> StepDone | StepFailed:
    """One step of the victim, in which it hears these bytes from both sides; what came of it."""
    victim, evil, _ = two
    victim.engine.configure(QuorumId(quorum), [victim.peer, evil.peer], 0)
    send, receive = evil.connect(victim.peer, quorum, Kept())
    between = Between()
    try:
        victim.engine.begin(Seq(quorum), QuorumId(quorum), 1)
        victim.engine.submit(Seq(quorum), 0, between.buffer)
        send.socks[0].settimeout(5)
        assert send.socks[0].recv(1, socket.MSG_PEEK) == CREDIT, "its first credit: it waits for chunks now"
        for link, data in ((receive, backwards), (send, forwards)):
            link.socks[0].settimeout(5)
            try:
                link.socks[0].sendall(data)
            except OSError:
                pass  # it has heard enough
        if forwards != b"".join(said(quorum, two[2])):
            send.shut()
            receive.shut()
        while not isinstance(event := victim.events.get(timeout=20), StepDone | StepFailed):
            pass
        between.check()
        assert not (isinstance(event, StepFailed) and event.fatal), event
        return event
    finally:
        send.close()
        receive.close()


def test_what_is_right_is_summed(two: tuple[Member, End, bool]) -> None:
    parts = said(1, two[2])
    assert exchange(two, 1, b"".join(parts), CREDIT * (len(parts) // 2)) == StepDone(Seq(1))


def test_wrong_headers_fail_the_exchange_and_nothing_else(two: tuple[Member, End, bool]) -> None:
    for quorum in range(1, CASES + 1):
        rng, parts = random.Random(quorum), said(quorum, two[2])
        at = 2 * rng.randrange(len(parts) // 2)
        right = parts[at]
        match rng.randrange(4):
            case 0:
                parts[at] = changed(right, quorum)
            case 1:
                where = rng.randrange(len(right))
                parts[at] = right[:where] + rng.choice(CLAIMS)[: len(right) - where] + right[where + 32 :]
            case 2:
                mark = rng.choice((ABORT, RING, HEARTBEAT, ABORT - 1))
                parts[at] = HEADER.pack(rng.choice((quorum, 1 << 63)), 0, rng.randrange(1 << 32), mark, 1 << 31, 5)
            case _:
                parts[at] = rng.randbytes(rng.randrange(200))
        if parts[at][:USED] != right[:USED]:
            failed = exchange(two, quorum, b"".join(parts), CREDIT * len(parts))
            assert isinstance(failed, StepFailed), parts[at]


def test_wrong_answers_fail_the_exchange_and_nothing_else(two: tuple[Member, End, bool]) -> None:
    """Far too many credits among them: what is sent on them is ours, and of no use to anybody else."""
    for quorum in range(1, CASES + 1):
        rng = random.Random(quorum)
        backwards = rng.choice(
            (rng.randbytes(rng.randrange(400)), CREDIT * 5000, changed(b"cc" + b"r" * 9 + b"a" * 17, quorum))
        )
        exchange(two, quorum, b"".join(said(quorum, two[2]))[:-1], backwards)


def test_the_member_goes_on_afterwards(two: tuple[Member, End, bool]) -> None:
    assert isinstance(exchange(two, 1, b"\xff" * 5000, b"\xff" * 5000), StepFailed)
    parts = said(2, two[2])
    assert exchange(two, 2, b"".join(parts), CREDIT * (len(parts) // 2)) == StepDone(Seq(2))


def test_heartbeats_without_end_are_no_progress(two: tuple[Member, End, bool]) -> None:
    """As fast as they are read: a member that does nothing else is alive, but not for ever."""
    victim, evil, _ = two
    victim.engine.expect_progress_within(0.5)
    victim.engine.configure(QuorumId(1), [victim.peer, evil.peer], 0)
    send, receive = evil.connect(victim.peer, 1, Kept())
    over = threading.Event()

    def flood() -> None:
        beats = HEADER.pack(1, 0, 0, HEARTBEAT, 0, 0) * 1000
        with contextlib.suppress(OSError):
            while not over.is_set():
                send.socks[0].sendall(beats)

    flooding = threading.Thread(target=flood)
    try:
        victim.engine.begin(Seq(1), QuorumId(1), 1)
        victim.engine.submit(Seq(1), 0, Between().buffer)
        flooding.start()
        while not isinstance(event := victim.events.get(timeout=10), StepFailed):
            pass
        assert "alive, but has sent nothing for 0.5 s" in event.reason
    finally:
        over.set()
        send.shut()
        flooding.join()
        send.close()
        receive.close()
