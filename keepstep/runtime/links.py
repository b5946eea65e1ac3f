"""TCP links of the ring: listening, dialling, and moving stamped chunks.

A link is one-way for data: chunks go to the next member, credits (one byte each) come back on the same connection. Every chunk
has a header with quorum_id, decision, exchange, number, length and checksum; whatever does not match what is expected fails the
link, so no byte of an older ring is ever reduced (invariant I3). An idle sender sends heartbeats: a frozen peer is noticed by
their absence, a dead one by EOF or RST, a cut cable by keepalive and TCP_USER_TIMEOUT together.

Blocking sockets. `shutdown` from any thread wakes whoever waits. Errors are OSError subclasses or LinkError, which carries the
phase; who is to blame is for the engine to say.
"""

import contextlib
import logging
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from keepstep.protocol.errors import KeepstepError
from keepstep.runtime.handshake import Identity, RingHello, welcome

log = logging.getLogger("keepstep")

HEADER = struct.Struct("<QQIIIxxxxQ")  # quorum_id, decision seq, exchange, chunk number, length, checksum
HEARTBEAT = 0xFFFFFFFF  # as a chunk number
MAX_HANDSHAKES = 32
BACKLOG = 64


class LinkError(Exception):
    """A link failed: `phase` says in which activity."""

    def __init__(self, message: str, phase: str) -> None:
        super().__init__(message)
        self.phase = phase


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What may be tuned on a link. Times in seconds."""

    socket_buffer: int = 512 << 10  # best on one host; a long-distance link needs its bandwidth-delay product
    congestion: str = "reno"  # the kernel's default here, BBR, costs loopback 40%
    checksum: bool = True
    silent_s: float = 5.0  # no byte, not even a heartbeat, for so long: the peer is frozen
    connect_s: float = 5.0
    user_timeout_s: float = 10.0  # unacknowledged data for so long: the path is cut


def tune(sock: socket.socket, settings: LinkSettings) -> None:
    """Options that must be set before connecting or listening, and those that may."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.socket_buffer)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.socket_buffer)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 5)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.user_timeout_s * 1000))
    with contextlib.suppress(OSError):  # not every kernel has every algorithm, or lets us choose: the default works too
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, settings.congestion.encode())


def shut(sock: socket.socket | None) -> None:
    """Ends a connection so that both sides and every waiting thread notice. Any thread, any number of times."""
    if sock is not None:
        with contextlib.suppress(OSError):  # it is gone already
            sock.shutdown(socket.SHUT_RDWR)


class Listener:
    """Accepts ring connections on a port of its own; each is authenticated before `on_peer(socket, hello)` gets it."""

    def __init__(
        self,
        me: Identity,
        host: str,
        settings: LinkSettings,
        admit: Callable[[RingHello], str],
        on_peer: Callable[[socket.socket, RingHello], None],
    ) -> None:
        self._me, self._settings, self._admit, self._on_peer = me, settings, admit, on_peer
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        tune(self._socket, settings)
        self._socket.bind((host, 0))
        self._socket.listen(BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._slots = threading.Semaphore(MAX_HANDSHAKES)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="keepstep-listen", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("a ring connection could not be accepted: %s", error)
                continue
            if not self._slots.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._greet, args=(sock, address), name="keepstep-hello", daemon=True).start()

    def _greet(self, sock: socket.socket, address: object) -> None:
        try:
            sock.settimeout(self._settings.connect_s)
            hello = welcome(sock, self._me, self._admit)
            sock.settimeout(None)
        except (KeepstepError, OSError) as error:
            log.info("refused a ring connection from %s: %s", address, error)
            sock.close()
        else:
            self._on_peer(sock, hello)
        finally:
            self._slots.release()

    def close(self) -> None:
        self._closed = True
        shut(self._socket)
        self._socket.close()
        self._thread.join(2.0)


class Wake:
    """An event that `select.poll` can wait for beside a socket."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def set(self) -> None:
        """Any thread."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is set already; closed: nobody waits any more
            self._write.send(b"x")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)

    def fileno(self) -> int:
        return self._read.fileno()

    def close(self) -> None:
        self._read.close()
        self._write.close()


class SendLink:
    """Our side of the connection to the next member. One thread."""

    def __init__(self, sock: socket.socket, quorum_id: int, wake: Wake, settings: LinkSettings) -> None:
        self._sock, self._quorum_id, self._wake, self._settings = sock, quorum_id, wake, settings
        self.credits = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLRDHUP)
        self._poll.register(wake.fileno(), select.POLLIN)
        self._beat = HEADER.pack(quorum_id, 0, 0, HEARTBEAT, 0, 0)

    def wait(self, phase: str) -> None:
        """Until something may have changed: credits came, or the wake was set. Sends a heartbeat when idle for long."""
        ready = self._poll.poll(self._settings.silent_s * 250)
        if not ready:
            self._write([memoryview(self._beat)], phase)
        for fd, _ in ready:
            if fd == self._wake.fileno():
                self._wake.clear()
            else:
                self.take_credits(phase)

    def take_credits(self, phase: str) -> None:
        try:
            got = self._sock.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkError(f"the connection to it failed ({error.strerror})", phase) from None
        if not got:
            raise LinkError("it closed the connection", phase)
        self.credits += len(got)

    def send(self, seq: int, exchange: int, number: int, data: memoryview, phase: str) -> None:
        """One chunk; uses up a credit."""
        checksum = xxhash.xxh3_64_intdigest(data) if self._settings.checksum else 0
        header = HEADER.pack(self._quorum_id, seq, exchange, number, len(data), checksum)
        self.credits -= 1
        self._write([memoryview(header), data], phase)

    def _write(self, parts: list[memoryview], phase: str) -> None:
        try:
            while parts:
                sent = self._sock.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except OSError as error:
            raise LinkError(f"the connection to it failed ({error.strerror})", phase) from None


class ReceiveLink:
    """Our side of the connection from the previous member. One thread."""

    def __init__(self, sock: socket.socket, quorum_id: int, wake: Wake, settings: LinkSettings) -> None:
        self._sock, self._quorum_id, self._wake, self._settings = sock, quorum_id, wake, settings
        seconds = int(settings.silent_s)
        micros = int((settings.silent_s - seconds) * 1e6)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, micros))
        self._header = bytearray(HEADER.size)
        self._idle = select.poll()
        self._idle.register(sock, select.POLLRDHUP)
        self._idle.register(wake.fileno(), select.POLLIN)

    def wait_for_work(self) -> None:
        """Until the wake is set. Notices a peer that goes away, but leaves its bytes alone."""
        for fd, _ in self._idle.poll():
            if fd != self._wake.fileno():
                raise LinkError("it closed the connection", "idle")
            self._wake.clear()

    def grant(self, credits: int, phase: str) -> None:
        """Lets the previous member send so many more chunks."""
        if credits:
            try:
                self._sock.sendall(b"c" * credits)
            except OSError as error:
                raise LinkError(f"the connection to it failed ({error.strerror})", phase) from None

    def header(self, seq: int, exchange: int, number: int, length: int, phase: str) -> int | None:
        """The checksum of the next chunk, which must be the one described; None: it was a heartbeat."""
        self._fill(memoryview(self._header), phase)
        quorum_id, got_seq, got_exchange, got_number, got_length, checksum = HEADER.unpack(self._header)
        if quorum_id == self._quorum_id and got_number == HEARTBEAT:
            return None
        if (quorum_id, got_seq, got_exchange, got_number, got_length) != (
            self._quorum_id,
            seq,
            exchange,
            number,
            length,
        ):
            raise LinkError(
                f"it sent chunk {got_number} ({got_length} bytes) of exchange {got_exchange}, decision {got_seq}, quorum "
                f"{quorum_id}; expected chunk {number} ({length} bytes) of exchange {exchange}, decision {seq}, quorum "
                f"{self._quorum_id}",
                phase,
            )
        return int(checksum)

    def body(self, target: memoryview, checksum: int, phase: str) -> None:
        """The bytes of the chunk whose header was read."""
        self._fill(target, phase)
        if self._settings.checksum and xxhash.xxh3_64_intdigest(target) != checksum:
            raise LinkError("a chunk from it failed its checksum", phase)

    def _fill(self, target: memoryview, phase: str) -> None:
        at = 0
        while at < len(target):
            try:
                got = self._sock.recv_into(target[at:], len(target) - at, socket.MSG_WAITALL)
            except BlockingIOError:
                raise LinkError(f"it has been silent for {self._settings.silent_s:g} s", phase) from None
            except OSError as error:
                raise LinkError(f"the connection from it failed ({error.strerror})", phase) from None
            if not got:
                raise LinkError("it closed the connection", phase)
            at += got
