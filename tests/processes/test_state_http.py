"""State over real HTTP: striping, failover, a source that is killed, wrong tokens, cancelling, stopping."""

import hashlib
import http.client
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import xxhash

from keepstep.protocol.errors import TransferError
from keepstep.protocol.ids import Incarnation, ReplicaId, Seq, Step
from keepstep.protocol.messages import Reader, StateName
from keepstep.runtime import state_connection, state_fetcher
from keepstep.runtime.state_fetcher import FetchedState, StateFetcher
from keepstep.runtime.state_http import AUTH, CHALLENGE, CHECKSUM, PROOF, Signer
from keepstep.runtime.state_server import StateServer

STATE = StateName(step=Step(3), lineage=Seq(7))
CONTENT = b"".join(hashlib.sha256(bytes([i & 255, i >> 8])).digest() for i in range(1 << 16)) * 10  # 20 MB


class Source:
    """`ports.StateSource` over bytes."""

    def __init__(self, content: bytes = CONTENT, *, total: int | None = None) -> None:
        self.content, self.total = content, len(content) if total is None else total
        self.reads: list[tuple[int, int]] = []
        self.readers_done: queue.Queue[Reader] = queue.Queue()
        self.gate = threading.Event()
        self.gate.set()

    def manifest(self, state: StateName) -> bytes | None:
        self.gate.wait(30)
        return json.dumps({"total": self.total}).encode() if state == STATE else None

    def read(self, state: StateName, lo: int, hi: int) -> bytes | None:
        self.gate.wait(30)
        self.reads.append((lo, hi))
        return self.content[lo:hi] if state == STATE else None

    def done(self, reader: Reader) -> None:
        self.gate.wait(30)
        self.readers_done.put(reader)


class Fixture:
    """Servers, a fetcher, and what it delivered."""

    def __init__(self) -> None:
        self.servers: list[StateServer] = []
        self.done: queue.Queue[FetchedState | TransferError] = queue.Queue()
        self.fetcher = StateFetcher(part="j/0", token=b"t")

    def serve(self, source: Source, token: bytes = b"t", part: str = "j/0") -> tuple[ReplicaId, str, int]:
        server = StateServer(source, host="127.0.0.1", part=part, token=token)
        server.start()
        self.servers.append(server)
        return ReplicaId(len(self.servers) - 1), "127.0.0.1", server.port

    def fetch(self, *sources: tuple[ReplicaId, str, int], state: StateName = STATE) -> FetchedState:
        self.fetcher.fetch(state, sources, self.done.put)
        result = self.done.get(timeout=60)
        if isinstance(result, TransferError):
            raise result
        return result


@pytest.fixture
def world() -> Iterator[Fixture]:
    before = set(threading.enumerate())
    world = Fixture()
    yield world
    world.fetcher.close()
    for server in world.servers:
        server.stop()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} was left running"


def test_ranges_are_striped_over_all_sources(world: Fixture) -> None:
    sources = [Source() for _ in range(3)]
    got = world.fetch(*(world.serve(s) for s in sources))
    assert bytes(got.data) == CONTENT
    assert all(source.reads for source in sources)
    assert sum(got.bytes_from.values()) == len(CONTENT)


US = Reader(incarnation=Incarnation("5f0e"), since=Seq(8))


def test_every_source_is_told_when_the_reader_has_everything(world: Fixture) -> None:
    sources = [Source(), Source(b"", total=len(CONTENT)), Source()]  # the second one has nothing to give, and fails
    world.fetcher.fetch(STATE, [world.serve(s) for s in sources], world.done.put, reader=US)
    assert [sources[i].readers_done.get(timeout=30) for i in (0, 2)] == [US, US]
    assert isinstance(world.done.get(timeout=30), FetchedState)


def test_who_fetches_nothing_tells_nobody(world: Fixture) -> None:
    source = Source(b"", total=len(CONTENT))
    world.fetcher.fetch(STATE, [world.serve(source)], world.done.put, reader=US)
    assert isinstance(world.done.get(timeout=30), TransferError)
    world.fetcher.close()
    assert source.readers_done.empty()


class Deaf(Source):
    """Does not come to hear that a reader is done."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.hears = threading.Event(), threading.Event()

    def done(self, reader: Reader) -> None:
        self.told.set()
        assert self.hears.wait(30)


def test_the_state_is_there_before_the_sources_have_heard(world: Fixture) -> None:
    source = Deaf()
    world.fetcher.fetch(STATE, [world.serve(source)], world.done.put, reader=US)
    try:
        assert isinstance(world.done.get(timeout=30), FetchedState)
        assert source.told.wait(30)
        began = time.monotonic()
        world.fetcher.close()
        assert time.monotonic() - began < 4, "closing waited for a source"
    finally:
        source.hears.set()


def test_an_empty_state(world: Fixture) -> None:
    assert world.fetch(world.serve(Source(b""))).data == b""


SERVER = """
import sys
sys.path.insert(0, {tests!r})
import threading
from test_state_http import Source, StateServer
def fault(what):
    served.append(what)
    if len(served) == 4:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
served = []
server = StateServer(Source(), host="127.0.0.1", part="j/0", token=b"t", fault=fault)
server.start()
print(server.port, flush=True)
threading.Event().wait()
"""


def test_a_source_that_is_killed_is_replaced(world: Fixture) -> None:
    """kill -9 while it answers its fourth request: the other one, which sends nothing before that, serves what is missing."""

    class Patient(Source):
        def read(self, state: StateName, lo: int, hi: int) -> bytes | None:
            process.wait(10)
            return super().read(state, lo, hi)

    process = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(tests=str(Path(__file__).parent))], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        got = world.fetch(world.serve(Patient()), (ReplicaId(1), "127.0.0.1", port))
        assert bytes(got.data) == CONTENT
        assert process.wait(10) == -9
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class LetGo(Source):
    def read(self, state: StateName, lo: int, hi: int) -> bytes | None:
        return None


def test_sources_that_do_not_hold_it_are_left_out(world: Fixture) -> None:
    got = world.fetch(world.serve(LetGo()), world.serve(Source()))
    assert bytes(got.data) == CONTENT
    assert got.bytes_from[ReplicaId(0)] == 0


def test_damaged_bytes_are_not_taken(world: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = state_connection.xxhash.xxh3_64_hexdigest
    good, bad = world.serve(Source()), world.serve(Source())
    calls = iter(range(10**6))
    monkeypatch.setattr(  # one of the first few checksums is wrong, as if a bit had flipped on the way
        state_connection.xxhash, "xxh3_64_hexdigest", lambda body: "0" * 16 if next(calls) == 4 else real(body)
    )
    assert bytes(world.fetch(good, bad).data) == CONTENT


@pytest.mark.parametrize(("token", "part"), [(b"x", "j/0"), (b"t", "j/1")])
def test_strangers_get_nothing_and_are_not_believed(world: Fixture, token: bytes, part: str) -> None:
    with pytest.raises(TransferError, match="401"):
        world.fetch(world.serve(Source(), token=token, part=part))


def test_requests_without_proof_or_sense(world: Fixture) -> None:
    _, host, port = world.serve(Source())
    for path, code in (
        ("/state/3/7/manifest", 401), ("/state/3/7/bytes?lo=0&hi=1", 401), ("/state/3/7/bytes?lo=5&hi=1", 400),
        ("/state/3/7/bytes?lo=0&hi=99999999999", 400), ("/state/3/7/bytes", 400), ("/state/x/7/manifest", 404), ("/", 404),
        (f"/state/{'9' * 5000}/7/manifest", 404),
    ):  # fmt: skip
        assert status(host, port, path, "") in {code, 401}, "without a proof"
        assert status(host, port, path, Signer("j/0", b"t")) in ({code} if code != 401 else {200})
        assert status(host, port, path, "\xff\xfe:\xff") in {401, 404}, "garbage instead of a proof"
    assert status(host, port, "/state/3/7/bytes", "") == 401, "a stranger is not told what a good request would be"


def status(host: str, port: int, path: str, proof: str | Signer) -> int:
    """What a GET with this proof is answered; a signer makes the right one."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        if isinstance(proof, Signer):
            connection.request("GET", "/state/3/7/manifest")
            first = connection.getresponse()
            first.read()
            proof = f"n:{proof.request(path, 'n', first.headers[CHALLENGE], 0)}"
        connection.request("GET", path, headers={AUTH: proof} if proof else {})
        return connection.getresponse().status
    finally:
        connection.close()


def test_cancelling_while_a_thread_connects_does_not_wait(world: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no socket yet that could be shut: the thread must look again once it has one."""
    connecting, go_on = threading.Semaphore(0), threading.Event()
    real = http.client.HTTPConnection.connect

    def slow(connection: http.client.HTTPConnection) -> None:
        connecting.release()
        assert go_on.wait(30)
        real(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", slow)
    source = Stuck()
    try:
        handle = world.fetcher.fetch(STATE, [world.serve(source)], world.done.put)
        assert connecting.acquire(timeout=10)
        handle.cancel()
        go_on.set()
        began = time.monotonic()
        world.fetcher.close()
        assert time.monotonic() - began < 3
        assert not source.asked.acquire(blocking=False), "a cancelled fetch asked for bytes"
    finally:
        source.gate.set()


def test_healthy_sources_are_hardly_asked_twice(world: Fixture) -> None:
    sources = [Source() for _ in range(4)]
    world.fetch(*(world.serve(s) for s in sources))
    read = sum(hi - lo for source in sources for lo, hi in source.reads)
    assert read <= len(CONTENT) * 1.4, f"{read} bytes were read for {len(CONTENT)}"


def test_one_damaged_range_does_not_cost_the_only_source(world: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    real, fetching, damaged = xxhash.xxh3_64_hexdigest, "keepstep-fetch", iter([True])

    def checksum(body: bytes) -> str:
        mine = threading.current_thread().name == fetching and len(body) > 1000
        return "0" * 16 if mine and next(damaged, False) else real(body)

    where = world.serve(Source())
    monkeypatch.setattr(state_connection.xxhash, "xxh3_64_hexdigest", checksum)
    assert bytes(world.fetch(where).data) == CONTENT
    assert next(damaged, None) is None, "no range was damaged"
    damaged = iter(lambda: True, None)
    with pytest.raises(TransferError, match="replica 0: its bytes failed their checksum"):
        world.fetch(where)


def test_nobody_is_left_is_a_sentence(world: Fixture) -> None:
    with pytest.raises(TransferError, match="no replica holds state 3"):
        world.fetch()
    with pytest.raises(TransferError, match="replica 5"):
        world.fetch((ReplicaId(5), "127.0.0.1", 9))
    with pytest.raises(TransferError, match="410"):
        world.fetch(world.serve(Source()), state=StateName(step=Step(4), lineage=Seq(7)))


def test_absurd_sizes_are_refused(world: Fixture) -> None:
    with pytest.raises(TransferError, match="at most"):
        world.fetch(world.serve(Source(total=1 << 60)))
    with pytest.raises(TransferError, match="bytes instead of"):
        world.fetch(world.serve(Source(b"short", total=1000)))


def test_a_cancelled_fetch_says_nothing_and_a_stopped_server_frees_its_readers(world: Fixture) -> None:
    source = Source()
    source.gate.clear()
    where = world.serve(source)
    handle = world.fetcher.fetch(STATE, [where], world.done.put)
    handle.cancel()
    source.gate.set()
    assert bytes(world.fetch(where).data) == CONTENT
    assert world.done.empty(), "the cancelled fetch spoke"


def test_a_throttled_fetch_is_slow_and_whole(world: Fixture) -> None:
    content = CONTENT[:50_000]
    world.fetcher.fetch(STATE, [world.serve(Source(content))], world.done.put, throttle_bytes_per_s=200_000)
    with pytest.raises(queue.Empty):
        world.done.get(timeout=0.05)
    got = world.done.get(timeout=30)
    assert isinstance(got, FetchedState)
    assert bytes(got.data) == content


class Stuck(Source):
    """Says when it is asked, and does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.clear()
        self.asked = threading.Semaphore(0)

    def manifest(self, state: StateName) -> bytes | None:
        self.asked.release()
        return super().manifest(state)


def test_a_stopped_server_frees_its_readers_in_bounded_time(world: Fixture) -> None:
    source = Stuck()
    world.fetcher.fetch(STATE, [world.serve(source)], world.done.put)
    try:
        assert source.asked.acquire(timeout=10)
        began = time.monotonic()
        world.servers[0].stop()
        assert time.monotonic() - began < 4, "stop waited for the reader"
        assert isinstance(world.done.get(timeout=5), TransferError)
    finally:
        source.gate.set()


def test_cancel_and_close_do_not_wait_for_a_source_that_is_stuck(world: Fixture) -> None:
    source = Stuck()
    where = world.serve(source)
    try:
        handle = world.fetcher.fetch(STATE, [where], world.done.put)
        assert source.asked.acquire(timeout=10)
        handle.cancel()
        world.fetcher.fetch(STATE, [where], world.done.put)
        assert source.asked.acquire(timeout=10)
        began = time.monotonic()
        world.fetcher.close()
        assert time.monotonic() - began < 4, "close waited for the source"
        assert world.done.empty(), "a fetch that was cancelled spoke"
    finally:
        source.gate.set()


def test_a_source_that_has_not_reached_the_state_is_asked_again(world: Fixture) -> None:
    class Late(Source):
        def manifest(self, state: StateName) -> bytes | None:
            self.not_at_first("manifest")
            return super().manifest(state)

        def read(self, state: StateName, lo: int, hi: int) -> bytes | None:
            self.not_at_first(f"read {lo}")
            return super().read(state, lo, hi)

        def not_at_first(self, what: str) -> None:
            with lock:
                new = what not in early
                early.add(what)
            if new:
                raise TimeoutError("not yet")

    early: set[str] = set()
    lock = threading.Lock()
    assert bytes(world.fetch(world.serve(Late())).data) == CONTENT
    assert {"manifest", "read 0"} < early


def test_all_sources_that_hold_nothing_are_named(world: Fixture) -> None:
    with pytest.raises(TransferError, match=r"replica 0.*410.*replica 1.*410"):
        world.fetch(world.serve(LetGo()), world.serve(LetGo()))


def test_a_source_that_says_nothing_is_left_out(world: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a frozen process does: the kernel still takes the connection."""
    monkeypatch.setattr(state_connection, "SILENT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = (ReplicaId(9), "127.0.0.1", silent.getsockname()[1])
        got = world.fetch(world.serve(Source()), mute)
        assert bytes(got.data) == CONTENT
        assert got.bytes_from[ReplicaId(9)] == 0
        began = time.monotonic()
        with pytest.raises(TransferError, match="replica 9"):
            world.fetch(mute)
        assert time.monotonic() - began < 5


@contextmanager
def liar(answer: Callable[[str, str], tuple[bytes, dict[str, str]]]) -> Iterator[tuple[ReplicaId, str, int]]:
    """An HTTP server at the port where a source should be; `answer` gets path and nonce."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, headers = answer(self.path, self.headers[AUTH].partition(":")[0])
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield ReplicaId(9), "127.0.0.1", server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _signed(nonce: str, body: bytes, *, sent: bytes | None = None) -> tuple[bytes, dict[str, str]]:
    """An answer of somebody who holds the token; `sent` is what arrives instead of `body`."""
    checksum = xxhash.xxh3_64_hexdigest(body)
    headers = {CHECKSUM: checksum, PROOF: Signer("j/0", b"t").answer(nonce, checksum)}
    return body if sent is None else sent, headers


def _unsigned(_path: str, _nonce: str) -> tuple[bytes, dict[str, str]]:
    return CONTENT[:100], {CHECKSUM: xxhash.xxh3_64_hexdigest(CONTENT[:100])}


def _not_even_text(_path: str, _nonce: str) -> tuple[bytes, dict[str, str]]:
    return b"{}", {CHECKSUM: "\xff", PROOF: "\xfe"}


def _bits_flip(path: str, nonce: str) -> tuple[bytes, dict[str, str]]:
    if path.endswith("manifest"):
        return _signed(nonce, json.dumps({"total": 100}).encode())
    return _signed(nonce, CONTENT[:100], sent=bytes(100))


def _too_short(path: str, nonce: str) -> tuple[bytes, dict[str, str]]:
    return _signed(nonce, json.dumps({"total": 100}).encode() if path.endswith("manifest") else CONTENT[:99])


def _no_manifest(_path: str, nonce: str) -> tuple[bytes, dict[str, str]]:
    return _signed(nonce, b"[1, 2]")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (_unsigned, "token"),
        (_not_even_text, "token"),
        (_bits_flip, "checksum"),
        (_too_short, "99 bytes instead of 100"),
        (_no_manifest, "manifest"),
    ],
)
def test_answers_that_cannot_be_right_are_not_taken(
    world: Fixture, answer: Callable[[str, str], tuple[bytes, dict[str, str]]], why: str
) -> None:
    with liar(answer) as where:
        with pytest.raises(TransferError, match=why):
            world.fetch(where)
        if answer is not _no_manifest:  # any manifest that is signed is believed
            got = world.fetch(world.serve(Source(CONTENT[:100])), where)
            assert bytes(got.data) == CONTENT[:100]
            assert got.bytes_from[ReplicaId(9)] == 0


def test_no_memory_is_a_sentence(world: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_size: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(state_fetcher, "big_buffer", none_left)
    with pytest.raises(TransferError, match="no memory"):
        world.fetch(world.serve(Source()))


def test_the_throttle_counts_all_sources_together(world: Fixture) -> None:
    content = CONTENT[:200_000]  # four threads take the first half at once
    sources = [world.serve(Source(content)) for _ in range(2)]
    began = time.monotonic()
    world.fetcher.fetch(STATE, sources, world.done.put, throttle_bytes_per_s=200_000)
    got = world.done.get(timeout=30)
    assert isinstance(got, FetchedState)
    assert bytes(got.data) == content
    assert time.monotonic() - began > 0.45
