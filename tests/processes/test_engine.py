"""The FTAR engine on real sockets: sums, overlap, changing members, dead, frozen and wrong peers."""

import gc
import logging
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from keepstep.ports import Addition
from keepstep.protocol.ids import Incarnation, QuorumId, Rank, ReplicaId, Seq
from keepstep.protocol.messages import Endpoint, Peer
from keepstep.runtime.engine import Engine
from keepstep.runtime.engine_events import EngineEvent, EngineSettings, RingBroken, RingReady, StepDone, StepFailed
from keepstep.runtime.handshake import Identity, connect_hello, greet
from keepstep.runtime.links import HEADER, LinkSettings
from keepstep.runtime.native import NativeThread

LINK = LinkSettings(silent_s=1.0, connect_s=2.0)
SETTINGS = EngineSettings(chunk_bytes=1 << 12, window=2, link=LINK)
KINDS = {
    "shm": SETTINGS,
    "shm, in Python": replace(SETTINGS, native=False),
    "tcp, in Python": replace(SETTINGS, native=False, link=replace(LINK, shared_memory=False)),
    "tcp": replace(SETTINGS, link=replace(LINK, shared_memory=False)),
    "tcp, 3 streams": replace(SETTINGS, link=replace(LINK, shared_memory=False, streams=3)),
    "tcp, two hosts": replace(SETTINGS, link=replace(LINK, shared_memory=False)),  # to 127.0.0.2: with checksums
    "mixed": SETTINGS,  # the first member shares no memory
    "mixed, in Python": replace(SETTINGS, native=False),  # but the first, which has C and no shared memory
}


class Buffer:
    """`ports.ExchangeBuffer` over numpy."""

    def __init__(self, values: np.ndarray, plain: bool = True) -> None:
        """`plain`: C may add it up."""
        self.source, self.target = values, np.zeros_like(values)
        self.itemsize, self.nbytes = values.itemsize, values.nbytes
        where = (self.source.ctypes.data, self.target.ctypes.data)
        self.addition = Addition(str(values.dtype), str(values.dtype), *where) if plain else None

    def input(self, lo: int, hi: int) -> memoryview:
        return memoryview(self.source.view(np.uint8))[lo:hi]

    def output(self, lo: int, hi: int) -> memoryview:
        return memoryview(self.target.view(np.uint8))[lo:hi]

    def reduce(self, lo: int, hi: int, received: memoryview, into: memoryview | None = None) -> None:
        a, b = lo // self.itemsize, hi // self.itemsize
        target = self.target[a:b] if into is None else np.frombuffer(into, self.source.dtype)
        np.add(np.frombuffer(received, self.source.dtype), self.source[a:b], out=target)

    def final(self, lo: int, hi: int) -> None:
        pass

    def done(self) -> None:
        pass

    def copy_through(self, lo: int, hi: int) -> None:
        self.target[:] = self.source


class Member:
    """An engine and what it says."""

    def __init__(
        self, replica: int, settings: EngineSettings = SETTINGS, host: str = "127.0.0.1", **identity: str
    ) -> None:
        me = Identity(
            job="j", token=b"t", replica_id=ReplicaId(replica), incarnation=Incarnation(f"life-{replica}"), rank=Rank(0),
            layout_digest="same",
        )  # fmt: skip
        self.identity = replace(me, **identity)
        self.events: queue.Queue[EngineEvent] = queue.Queue()
        self.engine = Engine(self.identity, host=host, settings=settings, on_event=self.events.put)
        self.host = host

    @property
    def peer(self) -> Peer:
        endpoint = Endpoint(host=self.host, ftar_port=self.engine.port, state_port=1)
        return Peer(replica_id=self.identity.replica_id, incarnation=self.identity.incarnation, endpoint=endpoint)

    def next(self, kind: type[EngineEvent]) -> EngineEvent:
        skipped: list[EngineEvent] = []
        while True:
            try:
                event = self.events.get(timeout=20)
            except queue.Empty:
                raise AssertionError(f"no {kind.__name__} came, but {skipped}") from None
            if isinstance(event, kind):
                return event
            skipped.append(event)


@pytest.fixture(params=KINDS)
def members(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    yield from some(3, request.param)


@pytest.fixture(params=KINDS)
def four(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    yield from some(4, request.param)


def some(count: int, kind: str) -> Iterator[list[Member]]:
    """Engines; once they are closed, nothing of them may be left."""
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    host = "127.0.0.2" if "two hosts" in kind else "127.0.0.1"
    made = [Member(r, KINDS["tcp" if "mixed" in kind and r == 0 else kind], host) for r in range(count)]
    yield made
    for member in made:
        member.engine.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} was left running"
    gc.collect()  # a segment is unmapped once the last view of it is gone
    left = {
        fd: os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - descriptors if is_open(fd)
    }
    assert not left, f"descriptors were left open: {left}"


def is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def configure(members: list[Member], quorum: int) -> None:
    for position, member in enumerate(members):
        member.engine.configure(QuorumId(quorum), [m.peer for m in members], position)


def exchange(members: list[Member], seq: int, quorum: int, arrays: list[list[np.ndarray]]) -> list[list[Buffer]]:
    buffers = [[Buffer(a, plain=i % 2 == 0) for i, a in enumerate(mine)] for mine in arrays]
    for member, mine in zip(members, buffers, strict=True):
        member.engine.begin(Seq(seq), QuorumId(quorum), len(mine))
        for number, buffer in enumerate(mine):
            member.engine.submit(Seq(seq), number, buffer)
    return buffers


def numbers(members: int, seed: int = 0, sizes: tuple[int, ...] = (50_000, 1, 0, 7_777)) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[rng.integers(-1000, 1000, n).astype(np.float32) for n in sizes] for _ in range(members)]


def check(buffers: list[list[Buffer]], arrays: list[list[np.ndarray]]) -> None:
    for number in range(len(arrays[0])):
        total = sum(mine[number] for mine in arrays)
        for mine, given in zip(buffers, arrays, strict=True):
            np.testing.assert_array_equal(mine[number].target, total)
            np.testing.assert_array_equal(mine[number].source, given[number])  # out of place


def test_steps_sum_up_and_the_ring_is_kept(members: list[Member]) -> None:
    configure(members, 1)
    for seq in range(1, 5):
        arrays = numbers(3, seq)
        buffers = exchange(members, seq, 1, arrays)
        for member in members:
            assert member.next(StepDone) == StepDone(Seq(seq))
        check(buffers, arrays)


def test_a_ring_of_one_copies(members: list[Member]) -> None:
    configure(members[:1], 1)
    arrays = numbers(1)
    buffers = exchange(members[:1], 1, 1, arrays)
    members[0].next(StepDone)
    check(buffers, arrays)


def test_all_members_get_the_same_bits(members: list[Member]) -> None:
    configure(members, 1)
    rng = np.random.default_rng(1)
    buffers = exchange(members, 1, 1, [[rng.standard_normal(30_001).astype(np.float32)] for _ in members])
    for member in members:
        member.next(StepDone)
    assert len({mine[0].target.tobytes() for mine in buffers}) == 1


def test_a_dead_member_fails_the_step_and_a_smaller_ring_repeats_it(members: list[Member]) -> None:
    """Member 2 goes away in the middle: both others are told at once, and the same inputs are exchanged again."""
    configure(members, 1)
    for member in members:
        member.next(RingReady)
    arrays = numbers(3)
    exchange(members[:2], 1, 1, arrays[:2])
    members[2].engine.close()
    failed = [member.next(StepFailed) for member in members[:2]]
    assert all(isinstance(f, StepFailed) and not f.fatal and f.seq == 1 for f in failed)
    assert 2 in {f.suspect for f in failed if isinstance(f, StepFailed)}
    configure(members[:2], 2)
    buffers = exchange(members[:2], 2, 2, arrays[:2])
    for member in members[:2]:
        member.next(StepDone)
    check(buffers, arrays[:2])


def test_an_idle_ring_tells_that_it_broke(members: list[Member]) -> None:
    configure(members, 1)
    for member in members:
        member.next(RingReady)
    members[1].engine.close()
    assert isinstance(members[2].next(RingBroken), RingBroken)
    members[2].engine.begin(Seq(1), QuorumId(1), 1)
    failed = members[2].next(StepFailed)
    assert isinstance(failed, StepFailed)
    assert failed.seq == 1


def test_a_refused_connection_names_the_suspect(members: list[Member]) -> None:
    gone = members[1].peer
    members[1].engine.close()
    members[0].engine.configure(QuorumId(1), [members[0].peer, gone], 0)
    members[0].engine.begin(Seq(1), QuorumId(1), 1)
    failed = members[0].next(StepFailed)
    assert isinstance(failed, StepFailed)
    assert (failed.suspect, failed.phase, failed.fatal) == (1, "connect", False)


@pytest.mark.parametrize(
    ("field", "value", "fatal"),
    [
        ("layout_digest", "other", True),
        ("token", b"x", True),
        ("incarnation", "another life", False),
        ("job", "k", False),
    ],
)
def test_whoever_does_not_fit_is_refused(members: list[Member], field: str, value: str, fatal: bool) -> None:
    odd = Member(1, host=members[0].host, **{field: value})
    try:
        expected = replace(odd.peer, incarnation=Incarnation("life-1"))
        members[0].engine.configure(QuorumId(1), [members[0].peer, expected], 0)
        members[0].engine.begin(Seq(1), QuorumId(1), 1)
        failed = members[0].next(StepFailed)
        assert isinstance(failed, StepFailed)
        assert (failed.suspect, failed.fatal) == (1, fatal)
    finally:
        odd.engine.close()


def impostor(member: Member, as_member: Member, quorum: int) -> socket.socket:
    """Connects to `member` as `as_member` would."""
    sock = socket.create_connection((member.host, member.engine.port))
    greet(
        sock,
        connect_hello(as_member.identity, QuorumId(quorum), member.identity.replica_id, member.identity.incarnation),
        b"t",
    )
    return sock


@pytest.mark.parametrize("stale", ["quorum", "decision", "exchange", "bytes"])
def test_bytes_that_do_not_belong_are_never_reduced(members: list[Member], stale: str) -> None:
    """A member that speaks the handshake, and then sends something of another ring, decision or length (invariant I3)."""
    member, other = members[:2]
    member.engine.configure(QuorumId(7), [member.peer, other.peer], 0)
    sock = impostor(member, other, 7)
    try:
        buffers = exchange([member], 9, 7, [[np.ones(100, np.float32)]])
        length = 200 if stale != "bytes" else 100
        header = {"quorum": (6, 9, 0), "decision": (7, 8, 0), "exchange": (7, 9, 1), "bytes": (7, 9, 0)}[stale]
        other.engine.configure(QuorumId(7), [member.peer, other.peer], 1)  # so that the member's own dialling succeeds
        sock.sendall(HEADER.pack(*header, 0, length, 0) + b"\x01" * length)
        failed = member.next(StepFailed)
        assert isinstance(failed, StepFailed)
        assert failed.suspect == 1
        assert not buffers[0][0].target.any()
    finally:
        sock.close()


def test_a_frozen_peer_is_noticed_by_its_silence(members: list[Member]) -> None:
    member, other = members[:2]
    member.engine.configure(QuorumId(1), [member.peer, other.peer], 0)
    sock = impostor(member, other, 1)  # alive, says nothing
    try:
        other.engine.configure(QuorumId(1), [member.peer, other.peer], 1)
        exchange([member], 1, 1, [[np.ones(100, np.float32)]])
        failed = member.next(StepFailed)
        assert isinstance(failed, StepFailed)
        assert "silent" in failed.reason or "closed" in failed.reason
    finally:
        sock.close()


def test_garbage_on_the_port_hurts_nobody(members: list[Member]) -> None:
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, b"\x04\x00\x00\x00abcd"):
        with socket.create_connection((members[0].host, members[0].engine.port)) as sock:
            sock.sendall(garbage)
    configure(members[:2], 1)
    arrays = numbers(2)
    buffers = exchange(members[:2], 1, 1, arrays)
    for member in members[:2]:
        member.next(StepDone)
    check(buffers, arrays)


def test_a_failing_reduction_is_fatal(members: list[Member], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "keepstep")  # a record of the traceback would keep the shared memory
    configure(members[:2], 1)
    buffer = Buffer(np.ones(1000, np.float32), plain=False)
    buffer.reduce = lambda *_: 1 / 0  # type: ignore[assignment]
    for member, mine in zip(members[:2], (buffer, Buffer(np.ones(1000, np.float32))), strict=True):
        member.engine.begin(Seq(1), QuorumId(1), 1)
        member.engine.submit(Seq(1), 0, mine)
    failed = members[0].next(StepFailed)
    assert isinstance(failed, StepFailed)
    assert failed.fatal
    assert "ZeroDivisionError" in failed.reason


def test_an_abort_fails_what_runs_and_travels_around(members: list[Member]) -> None:
    configure(members, 1)
    for member in members:
        member.next(RingReady)
    exchange(members[:2], 1, 1, numbers(2))
    members[0].engine.abort(QuorumId(99), ReplicaId(2), "another ring")
    members[0].engine.abort(QuorumId(1), ReplicaId(2), "gone")
    for member in members[:2]:
        assert isinstance(member.next(StepFailed), StepFailed)
    assert isinstance(members[2].next(RingBroken), RingBroken)


def test_a_member_that_dies_before_it_connects_is_noticed_through_the_others(members: list[Member]) -> None:
    """0 -> 1 -> 2 -> 0, and 0 is gone. 2 cannot dial it; 1, whom it should have dialled, learns it from 2."""
    peers = [m.peer for m in members]
    members[0].engine.close()
    members[1].engine.configure(QuorumId(1), peers, 1)
    members[1].engine.begin(Seq(1), QuorumId(1), 1)
    members[2].engine.configure(QuorumId(1), peers, 2)
    failed = members[1].next(StepFailed)
    assert isinstance(failed, StepFailed)
    assert "gave this ring up" in failed.reason or "closed" in failed.reason or "reset" in failed.reason


def kept(members: list[Member]) -> list[int]:
    found = []
    for member in members:
        event = member.next(RingReady)
        assert isinstance(event, RingReady)
        found.append(event.kept)
    return found


def steps(members: list[Member], seq: int, quorum: int) -> None:
    arrays = numbers(len(members), seq)
    buffers = exchange(members, seq, quorum, arrays)
    for member in members:
        while member.next(StepDone) != StepDone(Seq(seq)):
            pass  # of a step before that was complete here when somebody aborted it
    check(buffers, arrays)


def test_links_are_kept_when_the_ring_changes(four: list[Member]) -> None:
    """The same members, one less, one more, another order: what still serves is kept, the rest is built anew."""
    a, b, c, d = four
    for quorum, (members, expected) in enumerate(
        [([a, b, c, d], [0] * 4), ([a, b, c, d], [2] * 4), ([a, b, c], [1, 2, 1]), ([a, b, c, d], [1, 2, 1, 0]),
         ([d, c, b, a], [0] * 4), ([c, b, a, d], [2] * 4)], start=1,
    ):  # fmt: skip
        configure(members, quorum)
        assert kept(members) == expected
        steps(members, quorum, quorum)


def test_good_links_survive_a_failure(four: list[Member]) -> None:
    """One of four dies in the middle of an exchange: only the link that bridges its place is new."""
    a, b, c, d = four
    configure(four, 1)
    kept(four)
    exchange([a, b, d], 1, 1, numbers(3))
    c.engine.close()
    for member in (a, b, d):
        failed = member.next(StepFailed)
        assert isinstance(failed, StepFailed)
        assert failed.suspect in (2, None), failed
    configure([a, b, d], 2)
    assert kept([a, b, d]) == [2, 1, 1]
    steps([a, b, d], 2, 2)


def test_members_that_are_told_at_different_times(four: list[Member]) -> None:
    """Rings that some members skip, and some hear of before the others have ended the one before."""
    a, _, c, d = four
    configure(four, 1)
    kept(four)
    for quorum, first in ((2, a), (4, c), (6, d)):
        first.engine.configure(QuorumId(quorum), [m.peer for m in four], four.index(first))
        configure(four, quorum + 1)
        steps(four, quorum, quorum + 1)


@pytest.mark.parametrize("quietly", [True, False])
def test_a_member_that_is_through_may_leave_before_the_others_are(members: list[Member], quietly: bool) -> None:
    """0 -> 1 -> 2 -> 0. The last chunk that 0 gets goes no further: 1 is done, and leaves, while 0 still is not.

    The chunk is held up in 2 where that holds up its sending, so that 0 waits for it; else in 0.
    """
    configure(members, 1)
    kept(members)
    arrays = numbers(3, sizes=(300,))
    gate, seen, reached = threading.Event(), threading.Event(), threading.Event()
    native = [isinstance(m.engine._ring._movement, NativeThread) for m in members]  # type: ignore[union-attr]
    if native[0] and not native[2]:
        pytest.skip(
            "2 sends in another thread than the one that can be held up, and 0, held up in C, would not send to 1"
        )
    for seq in range(1, 100):
        buffers = [Buffer(mine[0], plain=False) for mine in arrays]

        def held(lo: int, hi: int, seq: int = seq) -> None:
            if hi == arrays[0][0].nbytes:  # segment 2
                forwarded = members[2].engine._ring._movement.chunks_sent - 4 * (seq - 1)  # type: ignore[union-attr]
                if forwarded >= 3 or not native[2]:  # else it came too early: 0 and 1 still need something of 2
                    reached.set()
                seen.set()
                assert not reached.is_set() or gate.wait(20)

        buffers[2 if native[2] else 0].final = held  # type: ignore[method-assign]
        for member, buffer in zip(members, buffers, strict=True):
            member.engine.begin(Seq(seq), QuorumId(1), 1)
            member.engine.submit(Seq(seq), 0, buffer)
        assert seen.wait(20)
        if reached.is_set():
            break
        seen.clear()
        for member in members:
            member.next(StepDone)
    assert reached.is_set()
    members[1].next(StepDone)
    if quietly:
        members[1].engine.configure(QuorumId(2), [members[1].peer], 0)
    else:
        members[1].engine.close()
    ring = members[0].engine._ring
    assert ring is not None
    deadline = time.monotonic() + (0.3 if quietly else 20)  # an end that is told is only read by who waits for credits
    while ring._late is None and ring.broken is None and time.monotonic() < deadline:
        gate.wait(0.01)
    assert ring.broken is None, "the ring was broken under an exchange that did not need the link"
    gate.set()
    for member in (members[0], members[2]):
        assert member.next(StepDone) == StepDone(Seq(seq))
    check([[buffer] for buffer in buffers], arrays)


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_rings(four: list[Member], seed: int) -> None:
    """Random members, orders, aborts and steps that are cut off; each ring that is let alone sums up right."""
    rng = random.Random(seed)
    for quorum in range(1, 25):
        members = rng.sample(four, rng.randint(1, 4))
        configure(members, quorum)
        match rng.choice(["run", "run", "cut", "abort", "next"]):
            case "run":
                steps(members, quorum, quorum)
            case "cut":  # somebody never submits
                exchange(members[1:], quorum, quorum, numbers(len(members) - 1))
            case "abort":
                exchange(members, quorum, quorum, numbers(len(members)))
                rng.choice(members).engine.abort(QuorumId(quorum), rng.choice(members).identity.replica_id, "a test")


def test_no_more_than_a_window_is_in_flight(members: list[Member]) -> None:
    """The next member's reduction is held up: the sender must stop after `window` chunks beyond what was taken."""
    a, b = members[:2]
    configure([a, b], 1)
    kept([a, b])
    arrays = numbers(2, sizes=(50_000,))
    buffers = [Buffer(mine[0], plain=False) for mine in arrays]
    gate, reached, add = threading.Event(), threading.Event(), buffers[1].reduce

    def held(lo: int, hi: int, received: memoryview, into: memoryview | None = None) -> None:
        reached.set()
        assert gate.wait(20)
        add(lo, hi, received, into)

    buffers[1].reduce = held  # type: ignore[method-assign]
    for member, buffer in zip((a, b), buffers, strict=True):
        member.engine.begin(Seq(1), QuorumId(1), 1)
        member.engine.submit(Seq(1), 0, buffer)
    assert reached.wait(20)
    movement = a.engine._ring._movement  # type: ignore[union-attr]
    assert movement is not None
    deadline = time.monotonic() + 20
    while movement.chunks_sent < SETTINGS.window and time.monotonic() < deadline:
        gate.wait(0.01)
    gate.wait(0.1)
    assert movement.chunks_sent == SETTINGS.window, "chunks sent while none was taken"
    gate.set()
    for member in (a, b):
        member.next(StepDone)
    check([[buffer] for buffer in buffers], arrays)


@pytest.mark.parametrize("native", [True, False])
def test_a_frozen_member_is_noticed_within_the_time_that_experience_allows(native: bool) -> None:
    """Silence is judged by the recent steps: here they take milliseconds, so the floor holds, not the ceiling."""
    settings = replace(SETTINGS, native=native, link=replace(LINK, silent_floor_s=0.3, silent_s=60.0))
    members = [Member(r, settings) for r in range(2)]
    thaw = threading.Event()
    try:
        configure(members, 1)
        kept(members)
        steps(members, 1, 1)
        a, b = members
        frozen = Buffer(np.ones(100_000, np.float32), plain=False)
        frozen.reduce = lambda *_: thaw.wait(20)  # type: ignore[assignment, method-assign, return-value]
        for member, buffer in ((a, Buffer(np.ones(100_000, np.float32))), (b, frozen)):
            member.engine.begin(Seq(2), QuorumId(1), 1)
            if not native:  # the sender is another thread than that which reduces
                b.engine._ring._movement.turn.acquire(blocking=False)  # type: ignore[union-attr]
            member.engine.submit(Seq(2), 0, buffer)
        began = time.monotonic()
        failed = a.next(StepFailed)
        assert isinstance(failed, StepFailed)
        assert (failed.suspect, "silent for 0.3 s" in failed.reason) == (1, True)
        assert time.monotonic() - began < 20
    finally:
        thaw.set()
        if not native:
            b.engine._ring._movement.turn.release()  # type: ignore[union-attr]
        for member in members:
            member.engine.close()
