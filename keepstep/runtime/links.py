"""Links of the ring: stamped chunks go to the next member, credits come back (FT-HSDP section 4.2).

A link is one connection, or several (`streams`) which the chunks take in turn. Every chunk has a header with quorum_id,
decision, exchange, number, length and checksum; whatever does not match what is expected fails the link, so no byte of an older
ring is ever reduced (invariant I3). An idle sender sends heartbeats: a frozen peer is noticed by their absence, a dead one by EOF
or RST, a cut cable by keepalive and TCP_USER_TIMEOUT together.

A link outlives its ring if both ends name each other again. `adopt` puts it under the new quorum_id: the sender marks the place
in the stream (RING), the receiver throws away what comes before the mark, and answers; credits start anew. A ring that ends
early says so on its good links (ABORT, with the suspect), so that all members learn it at once and the links live on.

    forwards    quorum_id, decision, exchange, number (of a chunk, or HEARTBEAT, RING, ABORT), length, checksum; then the chunk
    backwards   c: a credit    r + quorum_id: the mark was reached    a + quorum_id + suspect: the ring has ended

These are the links over TCP; `shared_memory` has those within one host, and RDMA would be a third kind (docs/adr/0009). One
thread uses an end at a time; `shut` may come from any. Errors: LinkError, which knows the link's peer and the phase.
"""

import contextlib
import logging
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.messages import Peer

log = logging.getLogger("keepstep")

HEADER = struct.Struct("<QQIIIxxxxQ")
HEARTBEAT, RING, ABORT = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD
CREDIT, REACHED, ENDED = b"c", b"r", b"a"
_REACHED, _ENDED = struct.Struct("<cQ"), struct.Struct("<cQq")
NOBODY = -1
NO_CHECKSUM = 0
LOOKS = 4  # in a silence: a timeout that finds some bytes only says that there is life, so several short ones


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What may be tuned on a link. Times in seconds."""

    socket_buffer: int = 512 << 10  # best on one host; a long-distance link needs its bandwidth-delay product
    congestion: str = "reno"  # the kernel's default here, BBR, costs loopback 40%; "" leaves it as it is
    checksum: bool = True  # of chunks that leave the host
    streams: int = 1  # TCP connections a link; more of them help where one is slow to use a long-distance link
    shared_memory: bool = True  # between members on one host
    silent_floor_s: float = 1.5  # no byte, not even a heartbeat, for 4 x the recent steps, between these two: frozen
    silent_s: float = 5.0
    connect_s: float = 5.0
    user_timeout_s: float = 10.0  # unacknowledged data for so long: the path is cut

    @property
    def idle_s(self) -> float:
        """A link over which nothing is sent for so long carries a heartbeat."""
        return min(self.silent_floor_s, self.silent_s) / 4

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= 64:
            raise ConfigError("streams must be between 1 and 64")
        if self.socket_buffer < 4096:
            raise ConfigError("socket_buffer must be at least 4096 bytes")
        if min(self.silent_floor_s, self.silent_s, self.connect_s, self.user_timeout_s) <= 0:
            raise ConfigError("silent_floor_s, silent_s, connect_s and user_timeout_s must be positive")


class LinkError(Exception):
    """A link failed: `peer` is its other end, `phase` what was being done."""

    def __init__(self, message: str, phase: str, peer: Peer) -> None:
        super().__init__(message)
        self.phase, self.peer = phase, peer


class PeerClosed(LinkError):
    """The other end has closed the connection: it is gone, or it has done with this ring. It was reached, either way."""

    def __init__(self, phase: str, peer: Peer) -> None:
        super().__init__("it closed the connection", phase, peer)


class RingEnded(LinkError):
    """The other end has ended the ring, because of `suspect` if it knows. The link is good."""

    def __init__(self, message: str, phase: str, peer: Peer, suspect: ReplicaId | None) -> None:
        super().__init__(message, phase, peer)
        self.suspect = suspect


def tune(sock: socket.socket, settings: LinkSettings) -> None:
    """Options that must be set before connecting or listening, and those that may."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.socket_buffer)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.socket_buffer)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 5)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.user_timeout_s * 1000))
    if settings.congestion:
        with contextlib.suppress(OSError):  # not every kernel has every algorithm, or lets us choose: the default works
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, settings.congestion.encode())


def shut(sock: socket.socket | None) -> None:
    """Ends a connection so that both sides and every waiting thread notice. Any thread, any number of times."""
    if sock is not None:
        with contextlib.suppress(OSError):  # it is gone already
            sock.shutdown(socket.SHUT_RDWR)


def _stays_here(sock: socket.socket) -> bool:
    """Whether the bytes of a connection never leave this host."""
    return sock.family == socket.AF_UNIX or sock.getsockname()[0] == sock.getpeername()[0]


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


class _Link:
    """What both ends have in common."""

    def __init__(self, peer: Peer, socks: Sequence[socket.socket], quorum_id: int, settings: LinkSettings) -> None:
        self.peer, self.quorum_id = peer, quorum_id
        self.socks = tuple(socks)
        self.failed = False  # not to be kept
        self.adopted = True  # both ends are under this quorum_id
        self._settings = settings
        self._wake: Wake | None = None
        self.chunks = 0  # since the link was put under its quorum_id

    def error(self, error: OSError | str, phase: str) -> LinkError:
        """The link has failed."""
        self.failed = True
        if isinstance(error, OSError):
            error = f"the connection to it failed ({error.strerror or error})"
        return LinkError(error, phase, self.peer)

    def closed(self, phase: str) -> PeerClosed:
        """The other end has closed it."""
        self.failed = True
        return PeerClosed(phase, self.peer)

    def _ended(self, suspect: int, phase: str) -> RingEnded:
        who = None if suspect == NOBODY else ReplicaId(suspect)
        return RingEnded(
            "it has ended this ring" + (f" because of replica {who}" * (who is not None)), phase, self.peer, who
        )

    def fileno(self) -> int:
        return self.socks[0].fileno()

    def shut(self) -> None:
        """Both ends and every waiting thread notice. Any thread."""
        self.failed = True
        for sock in self.socks:
            shut(sock)

    def close(self) -> None:
        """Frees it. Only once no thread uses it any more."""
        self.shut()
        for sock in self.socks:
            sock.close()


class SendLink(_Link):
    """Our end of the link to the next member."""

    kind = "tcp"
    inline = False  # whether `send` never waits for the peer

    def __init__(self, peer: Peer, socks: Sequence[socket.socket], quorum_id: int, settings: LinkSettings) -> None:
        super().__init__(peer, socks, quorum_id, settings)
        self.credits = 0
        self._backwards = b""
        self.checked = settings.checksum and not _stays_here(socks[0])

    def attach(self, wake: Wake) -> None:
        """`wait` ends when `wake` is set."""
        self._wake = wake
        self._hungry, self._content = select.poll(), select.poll()
        self._hungry.register(self.socks[0], select.POLLIN | select.POLLRDHUP)
        self._content.register(self.socks[0], select.POLLRDHUP)
        for poll in (self._hungry, self._content):
            poll.register(wake.fileno(), select.POLLIN)

    def adopt(self, quorum_id: int) -> None:
        """Puts the link under a new ring; it may be used once `adopted` (see `take_credits`)."""
        self.quorum_id, self.adopted, self.credits, self.chunks = quorum_id, False, 0, 0
        for sock in self.socks:
            self._write(sock, [memoryview(HEADER.pack(quorum_id, 0, 0, RING, 0, 0))], "connect")

    def wait(self, phase: str, hungry: bool) -> None:
        """Until something may have changed: the wake was set or, if we are hungry for them, credits came.

        Sends a heartbeat when idle for long. Credits that nobody waits for wake nobody: each would cost two thread switches.
        """
        assert self._wake is not None
        ready = (self._hungry if hungry else self._content).poll(self._settings.idle_s * 1000)
        if not ready:
            self.heartbeat(phase)
        for fd, _ in ready:
            if fd == self._wake.fileno():
                self._wake.clear()
            else:
                self.take_credits(phase)

    def heartbeat(self, phase: str) -> None:
        """Shows the next member that we live. Not while a chunk is being sent."""
        for sock in self.socks:
            self._write(sock, [memoryview(HEADER.pack(self.quorum_id, 0, 0, HEARTBEAT, 0, 0))], phase)

    def take_credits(self, phase: str) -> None:
        """Reads what has come back. Never waits."""
        try:
            got = self.socks[0].recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise self.error(error, phase) from None
        if not got:
            raise self.closed(phase)
        self.understand(got, phase)

    @property
    def expects_more(self) -> bool:
        """The beginning of an answer has come."""
        return bool(self._backwards)

    def understand(self, got: bytes, phase: str) -> None:
        """Bytes that have come back: credits, and answers. RingEnded if the next member says so."""
        got = self._backwards + got
        at = 0
        while at < len(got):
            if got.startswith(CREDIT, at):
                self.credits += 1
                at += 1
            elif got.startswith(REACHED, at) and at + _REACHED.size <= len(got):
                if _REACHED.unpack_from(got, at)[1] == self.quorum_id:
                    self.adopted, self.credits = True, 0
                at += _REACHED.size
            elif got.startswith(ENDED, at) and at + _ENDED.size <= len(got):
                _, quorum_id, suspect = _ENDED.unpack_from(got, at)
                at += _ENDED.size
                if quorum_id == self.quorum_id:
                    self._backwards = got[at:]
                    raise self._ended(suspect, phase)
            elif len(got) - at < _ENDED.size and got[at : at + 1] in (REACHED, ENDED):
                break
            else:
                raise self.error("it sent something that is neither a credit nor an answer", phase)
        self._backwards = got[at:]

    def send(
        self, seq: int, exchange: int, number: int, data: memoryview, phase: str, checksum: int | None = None
    ) -> None:
        """One chunk; uses up a credit. `checksum`: of the data, if it is known."""
        if not self.checked:
            checksum = NO_CHECKSUM
        elif checksum is None:
            checksum = xxhash.xxh3_64_intdigest(data)
        header = HEADER.pack(self.quorum_id, seq, exchange, number, len(data), checksum)
        sock = self.socks[self.chunks % len(self.socks)]
        self.chunks += 1
        self.credits -= 1
        self._write(sock, [memoryview(header), data], phase)

    def end_ring(self, suspect: ReplicaId | None) -> None:
        """Tells the next member that the ring is over; the link stays good. Does nothing if the link has failed."""
        mark = HEADER.pack(self.quorum_id, 0, 0 if suspect is None else suspect + 1, ABORT, 0, 0)
        for sock in () if self.failed else self.socks:
            with contextlib.suppress(LinkError):  # then it learns it by the connection's end
                self._write(sock, [memoryview(mark)], "idle")

    def _write(self, sock: socket.socket, parts: list[memoryview], phase: str) -> None:
        try:
            while parts:
                sent = sock.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except OSError as error:
            raise self.error(error, phase) from None


class ReceiveLink(_Link):
    """Our end of the link from the previous member."""

    window = 1 << 30  # chunks that may be on their way, if the settings allow as many

    def __init__(
        self, peer: Peer, socks: Sequence[socket.socket], quorum_id: int, settings: LinkSettings, chunk_bytes: int
    ) -> None:
        super().__init__(peer, socks, quorum_id, settings)
        self._header = memoryview(bytearray(HEADER.size))
        self._stage = memoryview(bytearray(chunk_bytes))
        self._marked = [quorum_id] * len(self.socks)  # the last mark that was read on each stream
        self._silent_s = 0.0
        self.expect_life_within(settings.silent_s)

    def attach(self, wake: Wake) -> None:
        """Waiting for a header ends when `wake` is set."""
        self._wake = wake
        self._polls = []
        for sock in self.socks:
            poll = select.poll()
            poll.register(sock, select.POLLIN | select.POLLRDHUP)
            poll.register(wake.fileno(), select.POLLIN)
            self._polls.append(poll)

    def expect_life_within(self, seconds: float) -> None:
        """How long the sender may be silent in an exchange."""
        if seconds != self._silent_s:
            self._silent_s = seconds
            micros = max(1, int(seconds / LOOKS * 1e6))
            for sock in self.socks:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(micros, 1_000_000)))

    def adopt(self, quorum_id: int) -> None:
        """Puts the link under a new ring; it may be used once `adopted` (see `look_for_mark`)."""
        self.quorum_id, self.adopted, self.chunks = quorum_id, False, 0

    def look_for_mark(self) -> None:
        """Throws away what the sender has sent before its mark. Waits for the rest of a chunk only."""
        for stream, sock in enumerate(self.socks):
            while self._marked[stream] != self.quorum_id:
                if not self._begins(stream, "connect"):
                    return
                ring, _, who, number, length, _ = self._read_header(sock, "connect")
                if number == RING:
                    self._marked[stream] = ring
                elif number == ABORT and ring == self.quorum_id:
                    raise self._ended(who - 1, "connect")
                elif number < ABORT:
                    self._discard(sock, length)
        self._answer(_REACHED.pack(REACHED, self.quorum_id), "connect")
        self.adopted = True

    def wait_for_work(self) -> None:
        """Until the wake is set. Notices a peer that goes away or ends the ring."""
        number = self._next_header(0, "idle")
        if number is not None and number[3] != HEARTBEAT:
            raise self.unexpected(number, None, "idle")

    def grant(self, credits: int, phase: str) -> None:
        """Lets the previous member send so many more chunks."""
        if credits:
            self._answer(CREDIT * credits, phase)

    def header(self, seq: int, exchange: int, number: int, length: int, phase: str) -> int | None:
        """The checksum of the next chunk, which must be the one described; None: nothing yet, look around and call again."""
        got = self._next_header(self.chunks % len(self.socks), phase)
        if got is None or got[3] == HEARTBEAT:
            return None
        if got[:5] != (self.quorum_id, seq, exchange, number, length):
            raise self.unexpected(got, (seq, exchange, number, length), phase)
        self.chunks += 1
        return got[5]

    def unexpected(self, got: tuple[int, ...], expected: tuple[int, int, int, int] | None, phase: str) -> LinkError:
        """A header that is not the next chunk's (decision, exchange, number, length; None: no chunk was asked for)."""
        told = self._told(0, got, phase)
        if told is not None:
            return told
        if expected is None:
            return self.error(f"it sent a chunk ({got[:5]}) that nobody has asked for", phase)
        seq, exchange, number, length = expected
        return self.error(
            f"it sent chunk {got[3]} ({got[4]} bytes) of exchange {got[2]}, decision {got[1]}, quorum {got[0]}; expected "
            f"chunk {number} ({length} bytes) of exchange {exchange}, decision {seq}, quorum {self.quorum_id}",
            phase,
        )

    def payload(self, length: int, checksum: int, phase: str) -> memoryview:
        """The bytes of the chunk whose header was read; good until the next chunk is."""
        target = self._stage[:length]
        self.payload_into(target, checksum, phase)
        return target

    def payload_into(self, target: memoryview, checksum: int, phase: str) -> None:
        """The same, straight into `target`."""
        self._fill(self.socks[(self.chunks - 1) % len(self.socks)], target, phase)
        if checksum != NO_CHECKSUM and xxhash.xxh3_64_intdigest(target) != checksum:
            raise self.error("a chunk from it failed its checksum", phase)

    def end_ring(self, suspect: ReplicaId | None) -> None:
        """Tells the previous member that the ring is over; the link stays good. Does nothing if the link has failed."""
        if not self.failed:
            with contextlib.suppress(LinkError):  # then it learns it by the connection's end
                self._answer(_ENDED.pack(ENDED, self.quorum_id, NOBODY if suspect is None else suspect), "idle")

    def _answer(self, data: bytes, phase: str) -> None:
        try:
            self.socks[0].sendall(data)
        except OSError as error:
            raise self.error(error, phase) from None

    def _begins(self, stream: int, phase: str) -> bool:
        """Whether there is something to read. Never waits."""
        try:
            if not self.socks[stream].recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                raise self.closed(phase)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.error(error, phase) from None
        return True

    def _next_header(self, stream: int, phase: str) -> tuple[int, ...] | None:
        """The header that comes next on `stream`; None: the wake was set instead. RingEnded if the sender says so."""
        sock, at = self.socks[stream], 0
        try:
            at = sock.recv_into(self._header, HEADER.size, socket.MSG_DONTWAIT)
            if not at:
                raise self.closed(phase)
        except BlockingIOError:
            if not self._await(stream, phase):
                return None
        except OSError as error:
            raise self.error(error, phase) from None
        header = self._read_header(sock, phase, at)
        told = self._told(stream, header, phase)
        if told is not None:
            raise told
        return header

    def _told(self, stream: int, header: tuple[int, ...], phase: str) -> RingEnded | None:
        """Whether a header says that the ring is over."""
        if header[3] == ABORT and header[0] == self.quorum_id:
            return self._ended(header[2] - 1, phase)
        if header[3] == RING:  # the sender is in a later ring; so shall we be, soon
            self._marked[stream] = header[0]
            return self._ended(NOBODY, phase)
        return None

    def _await(self, stream: int, phase: str) -> bool:
        """Until there is something to read; False: the wake was set. In an exchange, silence is an error."""
        assert self._wake is not None
        ready = self._polls[stream].poll(None if phase == "idle" else self._silent_s * 1000)
        if not ready:
            raise self.error(f"it has been silent for {self._silent_s:.3g} s", phase)
        if any(fd == self._wake.fileno() for fd, _ in ready):
            self._wake.clear()
            return False
        return True

    def _read_header(self, sock: socket.socket, phase: str, at: int = 0) -> tuple[int, ...]:
        self._fill(sock, self._header[at:], phase)
        return HEADER.unpack(self._header)

    def _discard(self, sock: socket.socket, length: int) -> None:
        """Payload of an older ring."""
        if length > len(self._stage):
            raise self.error(f"it announces a chunk of {length} bytes, larger than any", "connect")
        while length:
            piece = self._stage[: min(length, len(self._stage))]
            self._fill(sock, piece, "connect")
            length -= len(piece)

    def _fill(self, sock: socket.socket, target: memoryview, phase: str) -> None:
        at = looks = 0
        while at < len(target):
            try:
                got = sock.recv_into(target[at:], len(target) - at, socket.MSG_WAITALL)
            except BlockingIOError:
                looks += 1
                if looks < LOOKS:
                    continue
                raise self.error(f"it has been silent for {self._silent_s:.3g} s", phase) from None
            except OSError as error:
                raise self.error(error, phase) from None
            if not got:
                raise self.closed(phase)
            at, looks = at + got, 0
