"""What every kind of link must do: one suite, run on TCP, on TCP with several streams, and on shared memory."""

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from keepstep.protocol.ids import Incarnation, QuorumId, Rank, ReplicaId
from keepstep.protocol.messages import Endpoint, Peer
from keepstep.protocol.ring import Shape
from keepstep.runtime.connecting import Connecting, Kept, Stopped
from keepstep.runtime.handshake import Identity
from keepstep.runtime.links import HEADER, LinkError, LinkSettings, PeerClosed, ReceiveLink, RingEnded, SendLink, Wake
from keepstep.runtime.listener import Listener

SHAPE = Shape(1 << 16, 4)
BASE = LinkSettings(silent_s=1.0, connect_s=5.0)
KINDS = {
    "tcp": replace(BASE, shared_memory=False),
    "tcp, 3 streams": replace(BASE, shared_memory=False, streams=3),
    "tcp, two hosts": replace(BASE, shared_memory=False),  # to 127.0.0.2 from 127.0.0.1: chunks have checksums
    "shm": BASE,
}


class End:
    """One member of a ring of two."""

    def __init__(self, replica: int, settings: LinkSettings, host: str = "127.0.0.1") -> None:
        self.me = Identity(
            job="j", token=b"t", replica_id=ReplicaId(replica), incarnation=Incarnation(f"life-{replica}"), rank=Rank(0),
            layout_digest="same",
        )  # fmt: skip
        self.settings = settings
        self.connecting: queue.Queue[Connecting] = queue.Queue()
        self.listener = Listener(
            self.me, host, settings, lambda hello: "", lambda a: self.connecting.get().offer(a), SHAPE
        )
        endpoint = Endpoint(host=host, ftar_port=self.listener.port, state_port=1)
        self.peer = Peer(replica_id=self.me.replica_id, incarnation=self.me.incarnation, endpoint=endpoint)

    def connect(self, other: Peer, quorum: int, kept: Kept) -> tuple[SendLink, ReceiveLink]:
        connecting = Connecting(self.me, QuorumId(quorum), other, other, self.settings, SHAPE)
        for _ in range(self.settings.streams):
            self.connecting.put(connecting)
        try:
            return connecting.links(kept)
        finally:
            connecting.wake.close()


@dataclass
class Pair:
    """The link from a to b, and the one back."""

    a: End
    b: End
    send: SendLink
    receive: ReceiveLink
    back_send: SendLink
    back_receive: ReceiveLink
    wakes: tuple[Wake, Wake]

    def reconnect(self, quorum: int) -> None:
        with ThreadPoolExecutor(2) as pool:
            ours = pool.submit(self.a.connect, self.b.peer, quorum, Kept(self.send, self.back_receive))
            theirs = pool.submit(self.b.connect, self.a.peer, quorum, Kept(self.back_send, self.receive))
            self.send, self.back_receive = ours.result(10)
            self.back_send, self.receive = theirs.result(10)
        self.attach()

    def attach(self) -> None:
        self.send.attach(self.wakes[0])
        self.receive.attach(self.wakes[1])

    def grant(self, credits: int) -> None:
        self.receive.grant(credits, "reduce-scatter")
        while self.send.credits < credits:
            self.send.wait("reduce-scatter", hungry=True)

    def pass_on(self, data: bytes, number: int, seq: int = 1) -> bytes:
        self.send.send(seq, 0, number, memoryview(data), "reduce-scatter")
        return take(self.receive, number, len(data), seq)


def take(link: ReceiveLink, number: int, length: int, seq: int = 1) -> bytes:
    while (checksum := link.header(seq, 0, number, length, "reduce-scatter")) is None:
        pass
    return bytes(link.payload(length, checksum, "reduce-scatter"))


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    settings = KINDS[request.param]
    before = set(os.listdir("/proc/self/fd"))
    host = "127.0.0.2" if "two hosts" in request.param else "127.0.0.1"
    a, b = End(0, settings, host), End(1, settings, host)
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(a.connect, b.peer, 1, Kept())
        theirs = pool.submit(b.connect, a.peer, 1, Kept())
        send, back_receive = ours.result(10)
        back_send, receive = theirs.result(10)
    made = Pair(a, b, send, receive, back_send, back_receive, (Wake(), Wake()))
    made.attach()
    assert send.kind == request.param[:3]
    yield made
    for link in (made.send, made.receive, made.back_send, made.back_receive):
        link.close()
    for thing in (a.listener, b.listener, *made.wakes):
        thing.close()
    assert set(os.listdir("/proc/self/fd")) <= before, "descriptors were left open"


def test_chunks_arrive_unchanged_and_in_order(pair: Pair) -> None:
    for number in range(10):
        data = os.urandom(number * 6_000)
        pair.grant(1)
        assert pair.pass_on(data, number) == data


def test_a_chunk_can_be_received_in_place(pair: Pair) -> None:
    data, target = os.urandom(50_000), bytearray(50_000)
    pair.grant(1)
    pair.send.send(1, 0, 0, memoryview(data), "all-gather")
    while (checksum := pair.receive.header(1, 0, 0, len(data), "all-gather")) is None:
        pass
    pair.receive.payload_into(memoryview(target), checksum, "all-gather")
    assert target == data


def test_a_window_of_chunks_is_in_flight_before_any_is_taken(pair: Pair) -> None:
    window = min(SHAPE.window, pair.receive.window)
    data = [os.urandom(1000) for _ in range(window)]
    pair.grant(window)
    for number, chunk in enumerate(data):
        pair.send.send(1, 0, number, memoryview(chunk), "reduce-scatter")
    assert pair.send.credits == 0
    assert [take(pair.receive, n, 1000) for n in range(window)] == data


@pytest.mark.parametrize("wrong", ["decision", "exchange", "number", "length"])
def test_a_chunk_that_is_not_the_expected_one_fails_the_link(pair: Pair, wrong: str) -> None:
    pair.grant(1)
    seq, exchange, number, length = (int(wrong == w) for w in ("decision", "exchange", "number", "length"))
    pair.send.send(1 + seq, exchange, number, memoryview(bytes(10 + length)), "all-gather")
    with pytest.raises(LinkError, match="expected"):
        take(pair.receive, 0, 10)
    assert pair.receive.failed


def test_a_heartbeat_is_no_chunk(pair: Pair) -> None:
    pair.send.wait("idle", hungry=False)  # nothing happens for a quarter of silent_s
    assert pair.receive.header(1, 0, 0, 10, "all-gather") is None
    pair.grant(1)
    assert pair.pass_on(b"abc", 0) == b"abc"


def test_who_still_waits_for_its_previous_member_shows_the_next_one_that_it_lives() -> None:
    """That one may have both links, and be in the step's first exchange: silence would end its ring."""
    settings = replace(BASE, shared_memory=False, silent_floor_s=0.4)
    a, b, absent = End(0, settings), End(1, settings), End(2, settings)
    waiting = Connecting(a.me, QuorumId(1), absent.peer, b.peer, settings, SHAPE)
    taken = Connecting(b.me, QuorumId(1), a.peer, a.peer, settings, SHAPE)
    b.connecting.put(taken)
    wake = Wake()
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(waiting.links, Kept())
        assert select.select([taken.wake.fileno()], [], [], 10)[0]
        receive = taken._take_accepted()
        assert receive is not None
        receive.attach(wake)
        receive.expect_life_within(settings.silent_floor_s)
        for _ in range(6):  # each looks for a byte within 0.4 s
            assert receive.header(1, 0, 0, 10, "reduce-scatter") is None
        waiting.stop()
        with pytest.raises(Stopped):
            stopped.result(10)
    receive.close()
    for thing in (a.listener, b.listener, absent.listener, waiting.wake, taken.wake, wake):
        thing.close()


def test_silence_in_an_exchange_is_an_error_and_between_them_is_not(pair: Pair) -> None:
    with pytest.raises(LinkError, match="silent for 1 s") as caught:
        pair.receive.header(1, 0, 0, 10, "all-gather")
    assert caught.value.peer == pair.a.peer
    assert caught.value.phase == "all-gather"


def test_whoever_waits_learns_of_the_end_of_the_other(pair: Pair) -> None:
    pair.send.shut()
    with pytest.raises(PeerClosed, match="it closed the connection"):
        pair.receive.wait_for_work()
    pair.back_receive.shut()
    pair.back_send.attach(pair.wakes[0])
    with pytest.raises(LinkError, match=r"closed|failed"):
        pair.back_send.wait("idle", hungry=False)


@pytest.mark.parametrize(
    "wait", [lambda p: p.receive.wait_for_work(), lambda p: p.receive.header(1, 0, 0, 9, "all-gather")]
)
def test_shut_from_another_thread_ends_waiting(pair: Pair, wait: Callable[[Pair], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, pair)
        pair.receive.shut()
        assert isinstance(waiting.exception(5), LinkError)


def test_a_wake_ends_waiting(pair: Pair) -> None:
    pair.wakes[1].set()
    pair.receive.wait_for_work()
    pair.wakes[1].set()
    assert pair.receive.header(1, 0, 0, 9, "all-gather") is None
    pair.wakes[0].set()
    pair.send.wait("idle", hungry=False)


def test_something_else_than_credits_fails_the_link(pair: Pair) -> None:
    pair.receive.socks[0].sendall(b"x")
    with pytest.raises(LinkError, match="neither"):
        pair.send.wait("idle", hungry=True)


def test_the_end_of_a_ring_is_told_both_ways_and_the_link_lives_on(pair: Pair) -> None:
    links = pair.send, pair.receive
    pair.send.end_ring(ReplicaId(7))
    with pytest.raises(RingEnded, match="replica 7") as caught:
        pair.receive.wait_for_work()
    assert caught.value.suspect == 7
    pair.receive.end_ring(None)
    with pytest.raises(RingEnded) as caught:
        pair.send.wait("idle", hungry=True)
    assert caught.value.suspect is None
    pair.reconnect(2)
    assert (pair.send, pair.receive) == links
    pair.grant(2)
    assert pair.pass_on(b"hello", 0) == b"hello"


def test_a_kept_link_throws_away_what_is_older_than_its_ring(pair: Pair) -> None:
    """Credits granted, chunks sent and not taken: none of it may reach the next ring."""
    links = pair.send, pair.receive
    pair.grant(2)
    pair.send.send(1, 0, 0, memoryview(os.urandom(60_000)), "reduce-scatter")
    pair.receive.grant(1, "reduce-scatter")
    pair.send.send(1, 0, 1, memoryview(os.urandom(60_000)), "reduce-scatter")
    pair.reconnect(2)
    assert (pair.send, pair.receive) == links
    assert pair.send.credits == 0
    for number in range(4):
        pair.grant(1)
        assert pair.pass_on(bytes([number]) * 60_000, number) == bytes([number]) * 60_000


def test_rings_may_be_skipped(pair: Pair) -> None:
    """One end goes through quorum 2, 3 and 4, the other from 1 to 4."""
    for quorum in (2, 3):
        pair.send.adopt(quorum)
    pair.reconnect(4)
    pair.grant(1)
    assert pair.pass_on(b"x", 0) == b"x"


def test_a_ring_ends_when_the_sender_is_in_a_later_one(pair: Pair) -> None:
    """Also if the receiver has looked for the mark of a ring in between that never comes. Rings need not be in order."""
    for later, between in ((3, 2), (1 << 62, 7), (5, 1 << 40)):
        pair.send.adopt(later)
        with pytest.raises(RingEnded):
            pair.receive.wait_for_work()
        pair.receive.adopt(between)
        pair.receive.look_for_mark()
        assert not pair.receive.adopted
        assert not pair.receive.failed
        pair.receive.adopt(later)
        pair.receive.look_for_mark()
        assert pair.receive.adopted
        pair.grant(1)
        assert pair.send.adopted
        assert pair.pass_on(b"x", 0) == b"x"


def test_if_one_end_did_not_keep_it_a_new_link_is_made(pair: Pair) -> None:
    old = pair.send
    pair.receive.close()
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(pair.a.connect, pair.b.peer, 2, Kept(pair.send, pair.back_receive))
        theirs = pool.submit(pair.b.connect, pair.a.peer, 2, Kept(pair.back_send, None))
        pair.send, pair.back_receive = ours.result(10)
        pair.back_send, pair.receive = theirs.result(10)
    pair.attach()
    assert pair.send is not old
    pair.grant(1)
    assert pair.pass_on(b"x", 0) == b"x"


@pytest.mark.parametrize("pair", ["tcp", "tcp, 3 streams", "tcp, two hosts"], indirect=True)
def test_a_damaged_chunk_is_noticed(pair: Pair) -> None:
    pair.receive.grant(1, "all-gather")
    header = HEADER.pack(1, 1, 0, 0, 4, 12345)
    pair.send.socks[0].sendall(header + b"abcd")
    with pytest.raises(LinkError, match="checksum"):
        take(pair.receive, 0, 4)


@pytest.mark.parametrize(("pair", "has"), [("tcp", False), ("shm", False), ("tcp, two hosts", True)], indirect=["pair"])
def test_chunks_that_leave_the_host_have_a_checksum(pair: Pair, has: bool) -> None:
    pair.grant(1)
    pair.send.send(1, 0, 0, memoryview(b"abcd"), "all-gather")
    assert (pair.receive.header(1, 0, 0, 4, "all-gather") != 0) is has


PEER = """
import sys
sys.path.insert(0, {tests!r})
from test_links import *
end, other = End(1, KINDS[{kind!r}]), Peer(**eval(sys.argv[1]), endpoint=Endpoint(host="127.0.0.1", ftar_port=int(sys.argv[2]), state_port=1))
print(end.listener.port, flush=True)
send, receive = end.connect(other, 1, Kept())
send.attach(Wake())
while send.credits < 1:
    send.wait("idle", hungry=True)
os.kill(os.getpid(), signal.{signal}) if {when!r} == "before" else None
send.send(1, 0, 0, memoryview(b"whole"), "idle")
send.socks[0].sendall(HEADER.pack(1, 1, 0, 1, 60_000, 0)[:20])
os.kill(os.getpid(), signal.SIGKILL)
"""  # noqa: E501


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before", "in a chunk"])
def test_a_killed_peer_leaves_no_torn_chunk_and_no_segment(kind: str, when: str) -> None:
    """kill -9 at a chunk's border and in the middle of a header: what was whole is taken, the rest is an error."""
    settings, end = KINDS[kind], End(0, KINDS[kind])
    source = PEER.format(tests=str(Path(__file__).parent), kind=kind, when=when, signal="SIGKILL")
    who = str({"replica_id": 0, "incarnation": "life-0"})
    process = subprocess.Popen(
        [sys.executable, "-c", source, who, str(end.listener.port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        endpoint = Endpoint(host="127.0.0.1", ftar_port=port, state_port=1)
        other = Peer(replica_id=ReplicaId(1), incarnation=Incarnation("life-1"), endpoint=endpoint)
        send, receive = end.connect(other, 1, Kept())
        receive.attach(Wake())
        receive.grant(2, "idle")
        if when == "before":
            with pytest.raises(LinkError):
                take(receive, 0, 5)
        else:
            assert take(receive, 0, 5) == b"whole"
            with pytest.raises(LinkError):
                take(receive, 1, 60_000)
        assert process.wait(10) == -signal.SIGKILL
        for link in (send, receive):
            link.close()
        assert settings.streams == len(send.socks) or send.kind == "shm"
        del send, receive
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
        end.listener.close()
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:keepstep" in line]


def test_a_slow_handshake_ends_in_bounded_time() -> None:
    """One byte at a time would keep a per-read timeout happy for hours."""
    end = End(0, replace(BASE, connect_s=0.5))
    try:
        with socket.create_connection(("127.0.0.1", end.listener.port)) as sock:
            sock.settimeout(0.1)
            stop = threading.Event()

            def drip() -> None:
                while not stop.wait(0.05):
                    try:
                        sock.sendall(b"\0")
                    except OSError:
                        return

            thread = threading.Thread(target=drip)
            thread.start()
            sock.settimeout(5)
            try:
                assert sock.recv(1) == b"", "the listener hung up"
            except ConnectionResetError:
                pass
            finally:
                stop.set()
                thread.join()
    finally:
        end.listener.close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_connections_that_say_nothing_keep_nobody_out(kind: str) -> None:
    """A hundred half-open ones, and then a member."""
    a, b = End(0, KINDS[kind]), End(1, KINDS[kind])
    family = socket.AF_UNIX if kind == "shm" else socket.AF_INET
    where = f"\0keepstep/127.0.0.1/{b.listener.port}" if kind == "shm" else ("127.0.0.1", b.listener.port)
    silent = [socket.socket(family) for _ in range(100)]
    try:
        for sock in silent:
            sock.connect(where)
        with ThreadPoolExecutor(2) as pool:
            ours = pool.submit(a.connect, b.peer, 1, Kept())
            theirs = pool.submit(b.connect, a.peer, 1, Kept())
            links = (*ours.result(10), *theirs.result(10))
        assert links[0].kind == kind  # type: ignore[union-attr]
        for link in links:
            link.close()
    finally:
        for thing in (*silent, a.listener, b.listener):
            thing.close()


def test_somebody_else_with_the_same_name_means_tcp() -> None:
    """The abstract socket's name is taken before we bind it, by a process that is not ours: links go over TCP."""
    a, b = End(0, BASE), End(1, KINDS["tcp"])
    squatter = socket.socket(socket.AF_UNIX)
    squatter.bind(f"\0keepstep/127.0.0.1/{b.listener.port}")
    squatter.listen()
    try:
        with ThreadPoolExecutor(2) as pool:
            a.settings = replace(BASE, connect_s=1.0)
            ours = pool.submit(a.connect, b.peer, 1, Kept())
            theirs = pool.submit(b.connect, a.peer, 1, Kept())
            links = (*ours.result(10), *theirs.result(10))
        assert links[0].kind == "tcp"  # type: ignore[union-attr]
        for link in links:
            link.close()
    finally:
        squatter.close()
        a.listener.close()
        b.listener.close()


def test_an_older_chunk_that_is_larger_than_any_fails_the_link(pair: Pair) -> None:
    """While it looks for the mark of its ring, the receiver throws payloads away: it must not wait for four gigabytes."""
    if pair.send.kind == "shm":
        pytest.skip("its payloads are not in the stream")
    pair.send.socks[0].sendall(HEADER.pack(1, 1, 0, 0, 0xFFFFFFFF, 0) + bytes(1000))
    pair.receive.adopt(QuorumId(2))
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(pair.receive.look_for_mark).exception(0.8)
    assert isinstance(failed, LinkError)
    assert "larger than any" in str(failed)
