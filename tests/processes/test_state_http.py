"""State over real HTTP: striping, failover, a source that is killed, wrong tokens, cancelling, stopping."""

import hashlib
import json
import queue
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.protocol.errors import TransferError
from keepstep.protocol.ids import ReplicaId, Seq, Step
from keepstep.protocol.messages import StateName
from keepstep.runtime import state_fetcher
from keepstep.runtime.state_fetcher import FetchedState, StateFetcher
from keepstep.runtime.state_server import StateServer

STATE = StateName(step=Step(3), lineage=Seq(7))
CONTENT = b"".join(hashlib.sha256(bytes([i & 255, i >> 8])).digest() for i in range(1 << 16)) * 10  # 20 MB


class Source:
    """`ports.StateSource` over bytes."""

    def __init__(self, content: bytes = CONTENT, *, total: int | None = None) -> None:
        self.content, self.total = content, len(content) if total is None else total
        self.reads: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def manifest(self, state: StateName) -> bytes | None:
        self.gate.wait(30)
        return json.dumps({"total": self.total}).encode() if state == STATE else None

    def read(self, state: StateName, lo: int, hi: int) -> bytes | None:
        self.gate.wait(30)
        self.reads.append((lo, hi))
        return self.content[lo:hi] if state == STATE else None


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
    """kill -9 while it answers its fourth request: the other one serves what is missing."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(tests=str(Path(__file__).parent))], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        got = world.fetch(world.serve(Source()), (ReplicaId(1), "127.0.0.1", port))
        assert bytes(got.data) == CONTENT
        assert process.wait(10) == -9
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_sources_that_do_not_hold_it_are_left_out(world: Fixture) -> None:
    class LetGo(Source):
        def read(self, state: StateName, lo: int, hi: int) -> bytes | None:
            return None

    got = world.fetch(world.serve(LetGo()), world.serve(Source()))
    assert bytes(got.data) == CONTENT
    assert got.bytes_from[ReplicaId(0)] == 0


def test_damaged_bytes_are_not_taken(world: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = state_fetcher.xxhash.xxh3_64_hexdigest
    good, bad = world.serve(Source()), world.serve(Source())
    calls = iter(range(10**6))
    monkeypatch.setattr(  # one of the first few checksums is wrong, as if a bit had flipped on the way
        state_fetcher.xxhash, "xxh3_64_hexdigest", lambda body: "0" * 16 if next(calls) == 4 else real(body)
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
    ):  # fmt: skip
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10)
        assert caught.value.code == code
        caught.value.close()


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
