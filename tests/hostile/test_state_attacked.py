"""State over HTTP with strangers around: at the server's port while readers fetch, and in the place of a source."""

import contextlib
import hashlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from attackers import KINDS, attacked
from bounds import measured
from test_state_http import CONTENT, Source

from keepstep.protocol.errors import TransferError
from keepstep.protocol.ids import ReplicaId, Seq, Step
from keepstep.protocol.messages import StateName
from keepstep.runtime import gate, state_connection, state_fetcher
from keepstep.runtime.gate import AT_ONCE, MAX_STRANGERS
from keepstep.runtime.links import shut
from keepstep.runtime.state_connection import Source as Place
from keepstep.runtime.state_fetcher import FetchedState, StateFetcher
from keepstep.runtime.state_server import StateServer

STATE = StateName(step=Step(3), lineage=Seq(7))


@pytest.fixture
def server() -> Iterator[StateServer]:
    server = StateServer(Source(), host="127.0.0.1", part="j/0", token=b"t")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def fetch() -> Iterator[Callable[..., FetchedState]]:
    fetcher, done = StateFetcher(part="j/0", token=b"t"), queue.SimpleQueue[FetchedState | TransferError]()

    def fetch(*sources: Place) -> FetchedState:
        fetcher.fetch(STATE, sources, done.put)
        got = done.get(timeout=30)
        if isinstance(got, TransferError):
            raise got
        return got

    yield fetch
    fetcher.close()


def place(server: StateServer, replica: int = 0) -> Place:
    return ReplicaId(replica), "127.0.0.1", server.port


ABSURD = {
    "absurd ranges": b"GET /state/3/7/bytes?lo=-1&hi=%d HTTP/1.1\r\nHost: x\r\nX-Keepstep-Auth: n:p\r\n\r\n" % 10**400,
    "done by nobody": b"GET /state/3/7/done?life=%s&since=-1 HTTP/1.1\r\nHost: x\r\nX-Keepstep-Auth: n:p\r\n\r\n"
    % (b"x" * 5000),
    "absurd path": b"GET /" + b"../" * 5000 + b"%00%0a%ff HTTP/1.1\r\nHost: x\r\n\r\n",
    "pipelining": b"GET /state/3/7/manifest HTTP/1.1\r\nHost: x\r\n\r\n" * 2000,
    "absurd body": b"GET /state/3/7/manifest HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % 10**18
    + b"x" * 60_000,
    "absurd chunks": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"
    + b"x" * 60_000,
    "many headers": b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(5000)),
    "wrong proof": b"GET /state/3/7/manifest HTTP/1.1\r\nHost: x\r\nX-Keepstep-Auth: n:%064d\r\n\r\n" % 0,
}


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind not in ("truncated", "oversized", "scan")), *ABSURD])
def test_readers_get_their_bytes_whoever_knocks(
    server: StateServer, fetch: Callable[..., FetchedState], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = ABSURD.get(kind) or recorded(server, fetch)
    assert bytes(fetch(place(server)).data) == CONTENT  # what a fetch costs by itself does not count
    with measured(caplog) as cost:
        with attacked("replay" if kind in ABSURD else kind, f"127.0.0.1:{server.port}", hello=said) as tried:
            for _ in range(2):
                assert bytes(fetch(place(server)).data) == CONTENT
        assert tried[0] >= 20
    assert cost.descriptors <= MAX_STRANGERS + 6 * AT_ONCE, cost
    assert cost.rss_mib < 150, cost  # two fetches of 20 MB among it
    assert len(cost.lines) <= 8, cost.lines
    assert not any("Traceback" in line or "Error handling" in line for line in cost.lines), cost.lines


def recorded(server: StateServer, fetch: Callable[..., FetchedState]) -> bytes:
    """Everything that a reader says over its first connection, with valid proofs in it."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        over = threading.Event()

        def relay(first: bool) -> None:
            sock, _ = listening.accept()
            with sock, socket.create_connection(("127.0.0.1", server.port)) as other:
                back = threading.Thread(target=copy, args=(other, sock, []))
                back.start()
                copy(sock, other, said if first else [])
                with contextlib.suppress(OSError):
                    other.shutdown(socket.SHUT_WR)
                back.join()
            over.set()

        threads = [threading.Thread(target=relay, args=(n == 0,), daemon=True) for n in range(3)]
        for thread in threads:
            thread.start()
        fetch((ReplicaId(0), "127.0.0.1", listening.getsockname()[1]))
        assert over.wait(20)
        for thread in threads:
            thread.join(20)
    return b"".join(said)


def copy(source: socket.socket, target: socket.socket, kept: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            kept.append(piece)
            target.sendall(piece)


def test_a_recorded_request_is_not_answered_again(server: StateServer, fetch: Callable[..., FetchedState]) -> None:
    """Its challenge was that of another connection. Nothing is read from the state, so no reader is taken to have read it."""
    said = recorded(server, fetch)
    assert said.count(b"X-Keepstep-Auth") >= 2, "there is a proof in it"
    before = len(server._source.reads)  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(said)
        answers = b""
        while answers.count(b"HTTP/1.1 ") < said.count(b"GET "):
            answers += sock.recv(1 << 16)
    assert answers.count(b"HTTP/1.1 401") == said.count(b"GET ")
    assert b"200 OK" not in answers
    assert len(server._source.reads) == before  # type: ignore[attr-defined]


def test_a_connection_that_proves_nothing_is_ended(server: StateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PROVE_S", 0.1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(b"GET /state/3/7/manifest HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
    assert not server._doorway.strangers


# --- in the place of a source ----------------------------------------------------------------------------------


def endless(head: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    def answer(sock: socket.socket) -> None:
        sock.sendall(head)
        for _ in itertools.count():
            sock.sendall(piece)

    return answer


def trickle(head: bytes) -> Callable[[socket.socket], None]:
    """One byte every now and then: never silent for long, and never done."""

    def answer(sock: socket.socket) -> None:
        sock.sendall(head)
        pause = threading.Event()
        while not pause.wait(0.05):
            sock.sendall(b"x")

    return answer


LIARS = {
    "an endless refusal": (endless(b"HTTP/1.1 500 no\r\n\r\n", b"x" * 65536), "answered 500"),
    "an endless challenge": (endless(b"HTTP/1.1 401 no\r\n\r\n", b"x" * 65536), "answered 401"),
    "an endless head": (endless(b"HTTP/1.1 200 OK\r\n", b"X-Y: " + b"z" * 60000 + b"\r\n"), "headers"),
    "an endless line": (endless(b"HTTP/1.1 ", b"2" * 65536), "2222|line"),
    "a body for ever": (
        endless(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n", b"x" * 65536),
        "instead of",
    ),
    "a large body without a proof": (
        endless(b"HTTP/1.1 200 OK\r\nContent-Length: 200000000\r\n\r\n", b"x" * 65536),
        "token",
    ),
    "chunks": (endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"ffff\r\n"), "None bytes"),
    "patience": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "100 Continue"),
    "a slow head": (trickle(b"HTTP/1.1 200 OK\r\nX-"), "not complete in 1 s"),
    "a slow refusal": (trickle(b"HTTP/1.1 500 no\r\n\r\n"), "not complete in 1 s"),
    "another protocol": (endless(b"\x00\xff" * 100 + b"\r\n", b"\r\n"), "."),
}


@contextlib.contextmanager
def liar(answer: Callable[[socket.socket], None]) -> Iterator[Place]:
    """Somebody else at the port where a source was."""
    listening = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    socks: list[socket.socket] = []

    def talk(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.recv(4096)
            answer(sock)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listening.accept()
                socks.append(sock)
                threads.append(threading.Thread(target=talk, args=(sock,)))
                threads[-1].start()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    port = listening.getsockname()[1]
    try:
        yield ReplicaId(9), "127.0.0.1", port
        left = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port]
        assert not left, "a connection to it was left open"
    finally:
        for sock in (listening, *socks):  # it would go on sending to whoever has closed a connection with a full buffer
            shut(sock)
        listening.close()
        for thread in threads:
            thread.join(10)


@pytest.mark.parametrize("lie", LIARS)
def test_a_stranger_in_a_sources_place_costs_little(
    server: StateServer,
    fetch: Callable[..., FetchedState],
    lie: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(state_connection, "ANSWER_S", 1.0)
    monkeypatch.setattr(state_fetcher, "LOOK_S", 0.05)
    answer, why = LIARS[lie]
    with liar(answer) as where:
        began = time.monotonic()
        with measured(caplog) as cost, pytest.raises(TransferError, match=why):
            fetch(where)
        assert time.monotonic() - began < 8
        assert cost.rss_mib < 40, cost
        got = fetch(place(server), where)
        assert hashlib.sha256(got.data).digest() == hashlib.sha256(CONTENT).digest()
        assert got.bytes_from[ReplicaId(9)] == 0
