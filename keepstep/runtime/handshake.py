"""Two ends of a fresh TCP connection prove to each other that they hold the job token, and say who they are.

    client -> hello: who I am, whom I want, quorum_id, layout digest, nonce
    server -> its own nonce, HMAC(token, "server", both nonces, hello)      a server without the token learns nothing
    client -> HMAC(token, "client", both nonces, hello)
    server -> "" or a refusal in words

Every message is length-prefixed and bounded before anything is allocated. Errors: `Unauthorized` (wrong token), `StaleQuorum`
(another life or ring), `RemoteProtocolError` (malformed), `JobMismatch` (fatal: same-numbered ranks hold different models),
OSError and TimeoutError from the socket. Blocking; the socket's timeout, as the caller has set it, is for all of the
conversation: whoever says one byte every now and then does not hold us up for longer.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from keepstep.protocol.errors import JobMismatch, RemoteProtocolError, StaleQuorum, Unauthorized
from keepstep.protocol.ids import Incarnation, QuorumId, Rank, ReplicaId
from keepstep.runtime.wire import unpack

MAX_MESSAGE = 4096
MAGIC = "keepstep-ftar/2"
_LENGTH = struct.Struct("<I")
_STALE, _LAYOUT, _TOKEN = "stale: ", "layout: ", "token: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who one end of the ring is."""

    job: str
    token: bytes
    replica_id: ReplicaId
    incarnation: Incarnation
    rank: Rank
    layout_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RingHello:
    """What the connecting side says."""

    magic: str
    job: str
    quorum_id: QuorumId
    replica_id: ReplicaId
    incarnation: Incarnation
    rank: Rank
    to_replica: ReplicaId
    to_incarnation: Incarnation
    layout_digest: str
    nonce: str
    stream: int  # which of the connections of the link this is
    streams: int  # and how many it has


def connect_hello(
    me: Identity, quorum_id: QuorumId, to: ReplicaId, to_incarnation: Incarnation, stream: int = 0, streams: int = 1
) -> RingHello:
    """The hello that `me` sends to a member of ring `quorum_id`."""
    return RingHello(
        magic=MAGIC,
        job=me.job,
        quorum_id=quorum_id,
        replica_id=me.replica_id,
        incarnation=me.incarnation,
        rank=me.rank,
        to_replica=to,
        to_incarnation=to_incarnation,
        layout_digest=me.layout_digest,
        nonce=secrets.token_hex(16),
        stream=stream,
        streams=streams,
    )


def greet(sock: socket.socket, hello: RingHello, token: bytes) -> None:
    """The connecting side. Returns once the other side has accepted us."""
    talk = _Conversation(sock)
    raw = msgspec.msgpack.encode(hello)
    talk.send(raw)
    nonce, proof = unpack(talk.receive(), tuple[str, bytes], "handshake")
    if not hmac.compare_digest(proof, _mac(token, "server", hello.nonce, nonce, raw)):
        raise Unauthorized("the peer could not prove that it holds the job token")
    talk.send(_mac(token, "client", hello.nonce, nonce, raw))
    refusal = talk.receive().decode(errors="replace")
    if refusal.startswith(_STALE):
        raise StaleQuorum(refusal)
    if refusal.startswith(_LAYOUT):
        raise JobMismatch(refusal)
    if refusal.startswith(_TOKEN):
        raise Unauthorized(refusal)
    if refusal:
        raise RemoteProtocolError(refusal)


def welcome(sock: socket.socket, me: Identity, admit: Callable[[RingHello], str]) -> RingHello:
    """The accepting side: returns the hello of a peer that holds the token and fits. `admit` may refuse it, in words."""
    talk = _Conversation(sock)
    raw = talk.receive()
    hello = unpack(raw, RingHello, "handshake")
    nonce = secrets.token_hex(16)
    talk.send(msgspec.msgpack.encode((nonce, _mac(me.token, "server", hello.nonce, nonce, raw))))
    proof = talk.receive()
    if not hmac.compare_digest(proof, _mac(me.token, "client", hello.nonce, nonce, raw)):
        talk.send((_TOKEN + "the job tokens differ").encode())
        raise Unauthorized("a peer could not prove that it holds the job token")
    refusal = _misfit(hello, me) or admit(hello)
    talk.send(refusal.encode())
    if refusal:
        raise StaleQuorum(f"refused replica {hello.replica_id} rank {hello.rank}: {refusal}")
    return hello


def _misfit(hello: RingHello, me: Identity) -> str:
    if hello.magic != MAGIC:
        return f"this end speaks {MAGIC}, the other {hello.magic[:40]}: install the same keepstep everywhere"
    if hello.job != me.job:
        return f"{_STALE}this is job {me.job}, not {hello.job[:80]}"
    if (hello.to_replica, hello.to_incarnation) != (me.replica_id, me.incarnation):
        return f"{_STALE}another life of replica {me.replica_id} listens here"
    if hello.rank != me.rank:
        return f"this is rank {me.rank}, not rank {hello.rank}"
    if hello.layout_digest != me.layout_digest:
        return f"{_LAYOUT}rank {me.rank} of replicas {hello.replica_id} and {me.replica_id} hold different models"
    return ""


def _mac(token: bytes, side: str, nonce_client: str, nonce_server: str, hello: bytes) -> bytes:
    text = f"{side}/{nonce_client}/{nonce_server}/".encode() + hello
    return hmac.new(token, text, hashlib.sha256).digest()


class _Conversation:
    """Length-prefixed messages over a socket, all within the timeout that it has."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, within = sock, sock.gettimeout()
        self._deadline = None if within is None else time.monotonic() + within

    def send(self, message: bytes) -> None:
        self._hurry()
        self._sock.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MAX_MESSAGE:
            raise RemoteProtocolError(f"a handshake message of {length} bytes: this is not keepstep")
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._hurry()
            piece = self._sock.recv(count - len(data))
            if not piece:
                raise ConnectionResetError("the peer closed the connection during the handshake")
            data += piece
        return data

    def _hurry(self) -> None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the peer took too long over the handshake")
            self._sock.settimeout(left)
