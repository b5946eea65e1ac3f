"""Every parser of bytes from outside this process, as a function of bytes: it returns, or raises what that parser declares.

The property tests (`test_parsers.py`) and the coverage-guided fuzzer (`fuzz.py`) run the same functions. Each target has
messages that are right, to be mutated. What a target must never do: raise anything else, hang, or take memory for what a message
only claims.
"""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from aetcd import rpc

from keepstep.observe.records import whole_lines
from keepstep.observe.summary import Run, summarize
from keepstep.protocol.errors import (
    ConfigError,
    JobMismatch,
    KeepstepError,
    RemoteProtocolError,
    StaleQuorum,
    StoreError,
    TransferError,
    Unauthorized,
)
from keepstep.protocol.ids import Incarnation, QuorumId, Rank, ReplicaId, Seq, Step, UnitId
from keepstep.protocol.messages import (
    Abort,
    Decided,
    Decision,
    Endpoint,
    Fetched,
    Finish,
    Hello,
    Kind,
    LedgerState,
    Load,
    Loaded,
    Member,
    Peer,
    Policy,
    Report,
    Request,
    RingBroken,
    Role,
    StartOver,
    StateName,
    Verdict,
    Vote,
)
from keepstep.protocol.quorum import chain, decide, speculate
from keepstep.runtime.checkpoint_store import MANIFEST, CheckpointStore, FileRow, Manifest, Part
from keepstep.runtime.decided import Inbox, Outbox, encode_down, heard_in
from keepstep.runtime.endpoints import Endpoints, endpoint_in
from keepstep.runtime.environment import Environment
from keepstep.runtime.etcd_members import parse_url
from keepstep.runtime.etcd_view import Reading
from keepstep.runtime.faults import Faults
from keepstep.runtime.handshake import Identity, connect_hello, greet, welcome
from keepstep.runtime.leader import to_quorum_view
from keepstep.runtime.links import (
    ABORT,
    CREDIT,
    ENDED,
    HEADER,
    HEARTBEAT,
    REACHED,
    RING,
    LinkError,
    LinkSettings,
    ReceiveLink,
    SendLink,
    Wake,
)
from keepstep.runtime.shared_memory import SLOTS, Segment, SharedReceiveLink
from keepstep.runtime.state_connection import Connection, Refused
from keepstep.runtime.state_fetcher import _total_of
from keepstep.runtime.state_http import CHECKSUM, PROOF, Signer
from keepstep.runtime.tree import MAX_FRAME, ControlTree
from keepstep.runtime.tree_joining import MAX_CALL, _Answer, _Call
from keepstep.runtime.tree_shape import TreeShape
from keepstep.runtime.tree_wire import Wire
from keepstep.runtime.upward import said_together
from keepstep.runtime.wire import MALFORMED, decode, decode_frame, encode, encode_frame, unpack

CHUNK = 1 << 12
QUORUM = QuorumId(7)
TOKEN = b"t"
ME = Identity(
    job="j", token=TOKEN, replica_id=ReplicaId(0), incarnation=Incarnation("life-0"), rank=Rank(0), layout_digest="d"
)
OTHER = replace(ME, replica_id=ReplicaId(1), incarnation=Incarnation("life-1"))
PEER = Peer(
    replica_id=ReplicaId(1),
    incarnation=Incarnation("life-1"),
    endpoint=Endpoint(host="127.0.0.1", ftar_port=1, state_port=2),
)
SETTINGS = LinkSettings(silent_s=5.0)


@dataclass(frozen=True)
class Target:
    """One parser; `examples` are right."""

    run: Callable[[bytes], None]
    examples: tuple[bytes, ...]


# --- the ring's handshake --------------------------------------------------------------------------------------


class Talker:
    """A socket whose other end says `first`, and then answers what it hears."""

    def __init__(self, first: bytes, answer: Callable[[bytes], bytes]) -> None:
        self._in, self._answer, self._rest = first, answer, b""

    def gettimeout(self) -> float:
        return 5.0

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def sendall(self, data: bytes) -> None:
        self._in += self._answer(data)

    def recv(self, count: int) -> bytes:
        assert count <= 4096, "more was to be read at once than a message may have"
        got, self._in = self._in[:count], self._in[count:]
        return got


def framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def garbled_welcome(data: bytes) -> None:
    """What a stranger says to the listener."""
    with contextlib.suppress(KeepstepError, OSError):
        welcome(Talker(data, lambda _: b""), ME, lambda hello: "")  # type: ignore[arg-type]
        raise AssertionError("somebody without the token was let in")


def welcome_with_token(data: bytes) -> None:
    """What somebody says who holds the token: any hello, and the right proof for it."""
    import hashlib
    import hmac

    def prove(answer: bytes) -> bytes:
        try:
            nonce, _ = msgspec.msgpack.decode(answer[4:], type=tuple[str, bytes])
            theirs = msgspec.msgpack.decode(data)["nonce"]
        except (*MALFORMED, KeyError, TypeError):
            return b""
        return framed(hmac.new(TOKEN, f"client/{theirs}/{nonce}/".encode() + data, hashlib.sha256).digest())

    with contextlib.suppress(RemoteProtocolError, StaleQuorum, OSError):
        hello = welcome(Talker(framed(data), prove), ME, lambda hello: "")  # type: ignore[arg-type]
        assert (hello.job, hello.to_replica, hello.rank) == ("j", 0, 0)


def greeted_by(data: bytes) -> None:
    """What a listener says: anybody may sit there."""
    hello = connect_hello(OTHER, QUORUM, ME.replica_id, ME.incarnation)
    with contextlib.suppress(Unauthorized, RemoteProtocolError, StaleQuorum, OSError):
        greet(Talker(data, lambda _: b""), hello, TOKEN)  # type: ignore[arg-type]
        raise AssertionError("a listener without the token was believed")


HELLO = msgspec.msgpack.encode(connect_hello(OTHER, QUORUM, ME.replica_id, ME.incarnation))


# --- chunk headers, credits ------------------------------------------------------------------------------------


@contextlib.contextmanager
def fed(data: bytes) -> Iterator[socket.socket]:
    """A socket from which `data` comes, and then the end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.sendall(data[:60_000])
        theirs.shutdown(socket.SHUT_WR)
        yield ours


@contextlib.contextmanager
def of_the_peer() -> Iterator[None]:
    """It ends with a LinkError that names the peer."""
    try:
        yield
    except LinkError as error:
        if error.peer is not PEER:
            raise AssertionError("another peer is blamed") from error


def drain(link: ReceiveLink) -> None:
    """All that a ring does with the link, until it fails: which it must, for the data ends."""
    wake = Wake()
    link.attach(wake)
    with contextlib.closing(wake), of_the_peer():
        for number in range(10_000):
            if link.quorum_id == QUORUM and number % 8 == 7:
                link.adopt(8)
            if not link.adopted:
                link.look_for_mark()
                if not link.adopted:
                    link.wait_for_work()
            elif number % 8 == 6:
                link.wait_for_work()
            else:
                checksum = link.header(3, 0, number % 4, 100, "reduce-scatter")
                if checksum is not None:
                    assert len(link.payload(100, checksum, "reduce-scatter")) == 100
        raise AssertionError("the link did not notice that its data has ended")


def chunks(data: bytes) -> None:
    """What comes over a TCP link from the previous member."""
    with fed(data) as sock:
        drain(ReceiveLink(PEER, [sock], QUORUM, SETTINGS, CHUNK))


def announcements(data: bytes) -> None:
    """The same over a shared-memory link: headers only."""
    shape = SimpleNamespace(chunk_bytes=CHUNK)
    fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, CHUNK * SLOTS)
    import fcntl

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with fed(data) as sock:
        link = SharedReceiveLink(PEER, [sock], QUORUM, SETTINGS, Segment(fd, shape))  # type: ignore[arg-type]
        drain(link)
        link.close()


def credits_back(data: bytes) -> None:
    """What comes back over a link from the next member."""
    with fed(data) as sock:
        link = SendLink(PEER, [sock], QUORUM, SETTINGS)
        with of_the_peer():
            for _ in range(100):
                link.take_credits("reduce-scatter")
            raise AssertionError("the link did not notice that its data has ended")


def header(number: int, length: int = 0, seq: int = 3) -> bytes:
    return HEADER.pack(QUORUM, seq, 0, number, length, 0)


# --- the control tree ------------------------------------------------------------------------------------------


class Pipe:
    """A transport whose other end answers with proofs, as somebody with the token would."""

    def __init__(self, call: bytes, honest: bool) -> None:
        self._call, self._honest = call, honest
        self.closed = False
        self.wire: Wire | None = None

    def write(self, data: bytes) -> None:
        if self._honest and self.wire is not None:
            import hashlib
            import hmac

            self._honest = False
            nonce, _ = msgspec.msgpack.decode(data[4:], type=tuple[str, bytes])
            text = f"tree/client/{nonce}/".encode() + self._call
            feed(self.wire, framed(hmac.new(TOKEN, text, hashlib.sha256).digest()))
            self.wire.eof_received()

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, _: str) -> tuple[str, int]:
        return "127.0.0.1", 9


def feed(wire: Wire, data: bytes) -> None:
    """As the loop would, as much at a time as there is room for."""
    while data:
        room = wire.get_buffer(-1)
        piece, data = data[: len(room)], data[len(room) :]
        room[: len(piece)] = piece
        wire.buffer_updated(len(piece))


_loop = asyncio.new_event_loop()


def tree(lost: list[Any] | None = None) -> ControlTree:
    def on_up(_: int, payload: bytes) -> None:
        decode_frame(payload)

    return ControlTree(
        rank=0, shape=TreeShape(size=5, group=1, fan_out=2), token=TOKEN, job="j", incarnation="i", host="127.0.0.1",
        leader_address=None, listen_fd=None, welcome=b"hi", on_down=lambda *_: None, on_up=on_up,
        on_together=said_together, on_lost=lambda *why: lost.append(why) if lost is not None else None,
    )  # fmt: skip


def wire_to(pipe: Pipe, limit: int) -> Wire:
    pipe.wire = Wire(limit)
    pipe.wire.transport = pipe  # type: ignore[assignment]
    return pipe.wire


def _called(data: bytes, honest: bool) -> None:
    async def run() -> None:
        node, pipe = tree(), Pipe(data, honest)
        wire = wire_to(pipe, MAX_CALL)
        feed(wire, framed(data) if honest else data)
        if not honest:
            wire.eof_received()
        assert node._doorkeeper is not None
        with contextlib.suppress(TimeoutError):  # a rank whose parent is not there yet is kept waiting
            await asyncio.wait_for(node._doorkeeper.greet(wire), 0.02)
        assert not node._doorkeeper.strangers
        if not honest:
            assert pipe.closed
            assert all(child.wire is None for child in node._children.values()), "it was let in"

    _loop.run_until_complete(run())


def tree_stranger(data: bytes) -> None:
    """What somebody says to rank 0 before it has proved itself."""
    _called(data, honest=False)


def tree_caller(data: bytes) -> None:
    """What a caller with the token says about itself."""
    _called(data, honest=True)


def tree_frames(data: bytes) -> None:
    """What comes over a link of the tree, from below and from above. It is lost at the end, whatever came."""

    async def run() -> None:
        for above in (False, True):
            lost = list[Any]()
            node = tree(lost)
            link = node._parent if above else node._children[1]
            wire = wire_to(Pipe(b"", False), MAX_FRAME)
            node._use(1, link, wire, node._heard_from_above if above else partial(node._heard_from_below, 1))
            feed(wire, data)
            wire.eof_received()
            assert len(lost) == 1

    _loop.run_until_complete(run())


def tree_answer(data: bytes) -> None:
    """What the other end says about who may come where."""
    with contextlib.suppress(RemoteProtocolError):
        unpack(data, _Answer, "greeting")


def together(data: bytes) -> None:
    """What all ranks of a replica are said to have said."""
    with contextlib.suppress(RemoteProtocolError, struct.error):
        said_together(*struct.unpack("<BQ?", data))


def told(data: bytes) -> None:
    """What a rank hears, at first or after a decision: the common bytes, and the end of them as its own record, however long."""
    for cut in (len(data), len(data) - len(ANNOUNCED[1])):
        for before in ((), (ANNOUNCED,)):
            member = DECISION.members[0]
            inbox = Inbox(member.replica_id, member.incarnation)
            with contextlib.suppress(RemoteProtocolError):
                for common, record in (*before, *[(data[:cut], data[cut:])] * 2):
                    heard = heard_in(common)
                    inbox.hear(heard, record)
                    inbox.message(heard)


def control_message(data: bytes) -> None:
    """What a frame of the tree carries."""
    with contextlib.suppress(RemoteProtocolError):
        message = decode_frame(data)
        assert decode_frame(encode_frame(message)) == message


# --- the store -------------------------------------------------------------------------------------------------

ROOT = b"keepstep/j/"
POLICY = Policy(num_replicas=3, min_replicas=1, start_wait_ns=1)


def state(step: int, lineage: int) -> StateName:
    return StateName(step=Step(step), lineage=Seq(lineage))


LEDGER = LedgerState(fingerprint="f", total=100, next_unit=UnitId(4), requeued=(UnitId(1),))
STREAMS = LedgerState(policy="stream", fingerprint="f", total=100, cursors=(3, 4, 4))
REPORT = Report(
    replica_id=ReplicaId(0), incarnation=Incarnation("life-0"), answers=Seq(3), state=state(3, 3), materialized=True,
    ledger=LEDGER, held_units=(UnitId(5),), layout_digest="d",
)  # fmt: skip
MEMBERS = tuple(
    Member(replica_id=ReplicaId(i), incarnation=Incarnation(f"life-{i}"), role=role, units=units, fetch=fetch)
    for i, role, units, fetch in ((0, Role.WORKER, (UnitId(5),), False), (1, Role.CATCHING_UP, (), True))
)
DECISION = Decision(
    seq=Seq(3), quorum_id=QuorumId(3), kind=Kind.TRAIN, step=Step(2), base=Seq(2), ancestry=(state(1, 1), state(0, 1)),
    members=MEMBERS, ledger=LEDGER, num_replicas=3, reason="because",
)  # fmt: skip
ENDPOINTS = (Endpoint(host="127.0.0.1", ftar_port=1, state_port=2),)
OTHERS = (
    replace(REPORT, replica_id=ReplicaId(1), incarnation=Incarnation("life-1"), state=None, materialized=False),
    replace(REPORT, replica_id=ReplicaId(2), incarnation=Incarnation("life-2")),
)


def told_of(*decisions: Decision) -> list[tuple[bytes, bytes]]:
    """What the leader of the first member says about these, with the addresses of its neighbours."""
    outbox, said = Outbox(DECISION.members[0].replica_id), []
    for decision in decisions:
        common, record, _ = outbox.tell(decision, {life: Endpoints.of(ENDPOINTS) for life in outbox.news(decision)})
        said.append((common, record))
    return said


OTHER_LIFE = replace(MEMBERS[1], incarnation=Incarnation("life-2"))
AFTER = replace(DECISION, seq=Seq(4), quorum_id=QuorumId(4), members=(MEMBERS[0], OTHER_LIFE))
ANNOUNCED, CHANGED = told_of(DECISION, AFTER)


def put(key: bytes, value: bytes, revision: int) -> Any:
    kv = SimpleNamespace(key=ROOT + key, value=value, mod_revision=revision)
    return SimpleNamespace(kv=kv, type=rpc.Event.PUT)


def decide_upon(reading: Reading) -> None:
    """What every leader does with what it has read: it must come to an answer."""
    view = reading.view()
    for now in (0, 1 << 60):
        answer = decide(to_quorum_view(view), POLICY, now=now)
        if isinstance(answer, Decision):
            speculate(answer, ReplicaId(0))
            assert decode(encode(answer), Decision) == answer


def store_report(data: bytes) -> None:
    """A report, beside others that are right."""
    for last in (DECISION, None):
        reading = Reading(ROOT)
        for other in OTHERS:
            seq = Seq(3 if last else 0)
            reading.change(put(b"reports/%d" % other.replica_id, encode(replace(other, answers=seq)), 1))
        if last is not None:
            reading.change(put(b"decision", encode(last), 2))
        reading.change(put(b"reports/0", data, 3))
        decide_upon(reading)


def store_decision(data: bytes) -> None:
    """The last decision, with reports that answer it."""
    reading = Reading(ROOT)
    reading.change(put(b"decision", data, 2))
    last = reading.view().last
    for report in (REPORT, *OTHERS):
        seq = last.seq if last else Seq(0)
        held = last.outcome if last and report.state else report.state
        reading.change(put(b"reports/%d" % report.replica_id, encode(replace(report, answers=seq, state=held)), 3))
    if last is not None:
        assert chain(last)
        speculate(last, ReplicaId(0))
    decide_upon(reading)


def store_key(data: bytes) -> None:
    """Any key of the job, and any value."""
    key, _, value = data.partition(b"=")
    reading = Reading(ROOT)
    reading.change(put(key, value, 1))
    decide_upon(reading)


def store_request(data: bytes) -> None:
    """What somebody wants of a replica and of the job, beside reports that answer the last decision."""
    reading = Reading(ROOT)
    reading.change(put(b"decision", encode(DECISION), 1))
    for report in (replace(REPORT, leaving=True), *OTHERS):
        reading.change(put(b"reports/%d" % report.replica_id, encode(report), 2))
    reading.change(put(b"requests/0", data, 3))
    decide_upon(reading)
    reading.change(put(b"requests/job", data, 4))
    decide_upon(reading)
    for about, request in reading.view().requests.items():
        assert decode(encode(request), Request) == request, about


def store_endpoints(data: bytes) -> None:
    """Where the ranks of a replica listen."""
    with contextlib.suppress(RemoteProtocolError):
        table = decode(data, Endpoints)
        for endpoint in map(endpoint_in, table.records(table.host_length)[:100]):
            with socket.socket(socket.AF_INET) as sock:
                sock.setblocking(False)
                if endpoint.host == "127.0.0.1":  # any other would be looked up
                    with contextlib.suppress(OSError):
                        sock.connect((endpoint.host, endpoint.ftar_port))
            http.client.HTTPConnection(endpoint.host, endpoint.state_port)


# --- checkpoints -----------------------------------------------------------------------------------------------

_shared = tempfile.TemporaryDirectory()
_one = Path(_shared.name) / "000000002-2-life"
_one.mkdir()
(_one / "__0_0.distcp").write_bytes(b"bytes")
MANIFESTED = Manifest(
    version="0", state=state(2, 2), ledger=LEDGER,
    parts=(Part(files=(FileRow(name="__0_0.distcp", size=5, xxh3="0"),), tensors=(), values="{}"),),
)  # fmt: skip


def checkpoint_manifest(data: bytes) -> None:
    """What is found beside the files of a checkpoint: it is one, or it is passed over."""
    (_one / MANIFEST).write_bytes(data)
    for found in CheckpointStore(Path(_shared.name), keep=3).found():
        assert found.checkpoint.state.step >= 0
        assert decode(encode(found.manifest), Manifest) == found.manifest


# --- state over HTTP -------------------------------------------------------------------------------------------


def http_answer(data: bytes) -> None:
    """What comes back from the port of a source."""
    with fed(data) as sock:
        connection = Connection((ReplicaId(1), "127.0.0.1", 9), Signer("j/0", TOKEN), lambda: None)
        connection._http.sock = sock
        connection._http.auto_open = 0
        with contextlib.suppress(Refused):
            connection._known = True  # no second try: nobody listens there
            connection.get("/state/3/7/manifest", None, 1 << 20)
            raise AssertionError("a source without the token was believed")


def manifest(data: bytes) -> None:
    """How large a state says that it is."""
    with contextlib.suppress(TransferError):
        assert 0 <= _total_of(data) <= 1 << 40


# --- what an operator or another process of this user writes ---------------------------------------------------

ENV = {
    "RANK": "0", "WORLD_SIZE": "2", "REPLICA_ID": "1", "NUM_REPLICAS": "3", "KEEPSTEP_STORE": "etcd://127.0.0.1:2379",
    "KEEPSTEP_TOKEN": "t", "KEEPSTEP_LEADER": "127.0.0.1:4000", "KEEPSTEP_LEADER_FD": "7", "KEEPSTEP_LEASE_S": "2.5",
    "KEEPSTEP_JOB": "j", "KEEPSTEP_HOST": "127.0.0.1", "KEEPSTEP_LIFE": "2", "KEEPSTEP_FAULTS": "",
}  # fmt: skip


def environment(data: bytes) -> None:
    """Variables, one a line, over an environment that is right."""
    env = dict(ENV)
    for line in data.replace(b"\0", b"").split(b"\n"):
        name, _, value = line.decode(errors="surrogateescape").partition("=")
        if name != "KEEPSTEP_TOKEN_FILE":
            env[name] = value
    with contextlib.suppress(ConfigError):
        read = Environment.from_env(env)
        with contextlib.suppress(ConfigError):
            parse_url(read.store)
        Faults.check(read.faults)


def fault(data: bytes) -> None:
    """A fault that an operator asks for."""
    with contextlib.suppress(ConfigError):
        Faults.check(data.decode(errors="surrogateescape"))


RECORDS = [
    {"event": "spawn", "mono": 1.0, "t": 1.0, "replica": 0, "rank": 0, "incarnation": "a"},
    {
        "event": "decision", "mono": 2.0, "replica": 0, "rank": 0, "seq": 1, "base": 1, "step": 0, "quorum_id": 1,
        "members": [{"replica": 0, "incarnation": "a", "role": "worker", "units": [0]}],
    },
    {"event": "commit", "mono": 3.0, "replica": 0, "rank": 0, "incarnation": "a", "seq": 1, "step": 0, "role": "worker",
     "loss": 1.5},
    {"event": "retry", "mono": 3.5, "replica": 0, "seq": 2, "reason": "because"},
    {"event": "exit", "mono": 4.0, "replica": 0, "rank": 0, "code": -9},
    {"event": "final", "mono": 5.0, "replica": 0, "rank": 0, "digest": "x", "units_total": 1, "units_committed": 1},
    {"action": "kill", "mono": 2.5, "replica": 0, "rank": 0, "step": 0, "phase": "forward", "incarnation": "a"},
]  # fmt: skip


def run_directory(data: bytes) -> None:
    """The lines of a run's records, among which some are right."""
    lines = [json.dumps(r) for r in RECORDS]
    lines = [*lines[:3], *data.decode(errors="replace").splitlines(), *lines[3:]]
    records = sorted(whole_lines(lines), key=lambda r: r["mono"])
    events, faults = [r for r in records if "event" in r], [r for r in records if "action" in r]
    json.dumps(summarize(Run(events=tuple(events), faults=tuple(faults))))  # incidents and goodput are in it


def signed(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{CHECKSUM}: 00\r\n{PROOF}: 00\r\n\r\n"
    return head.encode() + body


HELLO_UP = Hello(rank=Rank(0), endpoint=PEER.endpoint, layout_digest="d", ledger=LEDGER, version="1")
MESSAGES = (
    Decided(decision=DECISION, peers=(PEER, PEER)),
    Load(state=state(1, 2)),
    Verdict(seq=Seq(3), commit=False, reason="because"),
    StartOver(reason="because", state=state(1, 2)),
    Abort(quorum_id=QUORUM, suspect=ReplicaId(1), reason="gone"),
    Finish(error="over"),
    HELLO_UP,
    Vote(rank=Rank(0), seq=Seq(3), yes=False, suspect=ReplicaId(1)),
    Fetched(rank=Rank(0), state=state(1, 2), since=Seq(4), ok=True),
    RingBroken(rank=Rank(0), quorum_id=QUORUM, suspect=None, reason="because"),
    Loaded(rank=Rank(0), state=state(1, 2)),
)
UP = b"\1\0\0\0" + encode_frame(MESSAGES[7])
DOWN = b"d" + struct.pack("<HI", 1, len(ANNOUNCED[0])) + ANNOUNCED[0] + bytes(5)
FRAMES = tuple(
    framed(frame)
    for frame in (b"u" + UP, b"o" + UP[:4] + b"\1k" + UP[4:], b"t" + struct.pack("<?BQ", True, 1, 3), b".", DOWN)
)
DEEP = tuple(opening * 3000 for opening in (b"\x91", b"\x81\xa1x", b"[", b'{"x":'))
CALL = msgspec.msgpack.encode(_Call("j", "i", 1, 4000, "0" * 32, 1, 2))

TARGETS: dict[str, Target] = {
    "welcome": Target(garbled_welcome, (framed(HELLO), framed(HELLO) + framed(bytes(32)))),
    "hello": Target(welcome_with_token, (HELLO,)),
    "greet": Target(
        greeted_by, (framed(msgspec.msgpack.encode(("0" * 32, bytes(32)))) + framed(b""), framed(b"stale: no"))
    ),
    "chunks": Target(
        chunks,
        (
            header(0, 100) + bytes(100) + header(HEARTBEAT) + header(1, 100) + bytes(100),
            header(ABORT),
            header(0, 100) + bytes(100) + HEADER.pack(8, 0, 0, RING, 0, 0),
            HEADER.pack(6, 1, 0, 0, 0xFFFFFFFF, 0) + bytes(500),
        ),
    ),
    "announcements": Target(announcements, (header(0, 100) + header(1, 100), HEADER.pack(6, 1, 0, 0, 0xFFFFFFFF, 0))),
    "credits": Target(
        credits_back,
        (CREDIT * 5, struct.pack("<cQ", REACHED, QUORUM) + CREDIT, struct.pack("<cQq", ENDED, QUORUM, -1)),
    ),
    "tree stranger": Target(tree_stranger, (framed(CALL), framed(CALL) + framed(bytes(32)))),
    "tree caller": Target(tree_caller, (CALL,)),
    "tree frames": Target(tree_frames, (b"".join(FRAMES), *FRAMES)),
    "tree answer": Target(
        tree_answer,
        (msgspec.msgpack.encode(_Answer(welcome=b"hi")), msgspec.msgpack.encode(_Answer(parent=("127.0.0.1", 4)))),
    ),
    "control message": Target(control_message, tuple(encode_frame(message) for message in MESSAGES)),
    "said together": Target(together, (struct.pack("<BQ?", 1, 3, True), struct.pack("<BQ?", 2, 3, False))),
    "told": Target(
        told,
        (
            ANNOUNCED[0] + ANNOUNCED[1],
            CHANGED[0] + CHANGED[1],
            b"c" + bytes(8),
            b"v" + bytes(8),
            encode_down(MESSAGES[1]),
        ),
    ),
    "report": Target(store_report, (encode(REPORT), encode(replace(REPORT, ledger=STREAMS)), encode(OTHERS[0]))),
    "decision": Target(
        store_decision,
        (
            encode(DECISION),
            encode(replace(DECISION, ledger=STREAMS, members=(replace(MEMBERS[0], units=(UnitId(9),)),))),
        ),
    ),
    "key": Target(
        store_key,
        (b"decision=" + encode(DECISION), b"reports/0=" + encode(REPORT), b"dead/a={}", b"announced/1={}"),
    ),
    "request": Target(
        store_request, tuple(encode(Request(request_id="1", leave=leave, by="me")) for leave in (True, False))
    ),
    "checkpoint manifest": Target(checkpoint_manifest, (encode(MANIFESTED),)),
    "endpoints": Target(store_endpoints, (encode(Endpoints.of(ENDPOINTS)), encode(Endpoints.of(ENDPOINTS * 3)))),
    "http answer": Target(http_answer, (signed(b"{}"), b"HTTP/1.1 401 no\r\nX-Keepstep-Challenge: 0\r\n\r\n")),
    "manifest": Target(manifest, (b'{"total": 100, "tensors": [], "values": {}}',)),
    "environment": Target(environment, tuple(f"{name}={value}".encode() for name, value in ENV.items())),
    "fault": Target(fault, (b"kill replica=1 rank=0 step=5+ phase=in_exchange count=2", b"slow=1 replica=0 rank=0")),
    "run directory": Target(run_directory, tuple(json.dumps(record).encode() for record in RECORDS)),
}

DECLARED = (JobMismatch, StoreError)  # raised by the conversations around these parsers, not by them
