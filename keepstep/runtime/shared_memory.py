"""Links between members on one host: chunks lie in shared memory, everything else goes over a Unix socket.

The sender makes a segment of two slots and passes it over the socket, so it has no name: nothing can be left behind, and
nobody else can open it. Chunk number n of a link lies in slot n modulo 2. Its header is sent after it was written, and its
slot is free again once the receiver has granted another credit, so a chunk is never torn, whoever dies when: the socket says so
at once. The receiver adds straight from the slot, and a partial sum goes straight into the slot of the next link.

Chosen without being asked: every listener also listens on an abstract Unix socket named after its address and port. Whoever can
connect to it is on the same host, in the same network namespace; anybody else uses TCP. The handshake is the same.

Fails: OSError when no segment can be made (the caller falls back to TCP), RemoteProtocolError for a segment that does not fit.
"""

import fcntl
import mmap
import os
import socket
from collections.abc import Sequence

import numpy as np

from keepstep.protocol.errors import RemoteProtocolError
from keepstep.protocol.messages import Peer
from keepstep.protocol.ring import Shape
from keepstep.runtime.links import HEADER, LinkSettings, ReceiveLink, SendLink

SLOTS = 2  # one is written while the other is read; with more, they fall out of the cache
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def address(host: str, port: int) -> str:
    """The abstract Unix socket that belongs to the listener at host:port."""
    return f"\0keepstep/{host}/{port}"


class Segment:
    """The slots of one link, mapped into this process."""

    def __init__(self, fd: int, shape: Shape) -> None:
        """Takes the descriptor over."""
        self._size = shape.chunk_bytes
        try:
            wanted = self._size * SLOTS
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise RemoteProtocolError("the shared memory offered could be cut off under us")
            if os.fstat(fd).st_size != wanted:
                raise RemoteProtocolError(
                    f"the shared memory offered has {os.fstat(fd).st_size} bytes instead of {wanted}: chunk_bytes must be the "
                    "same everywhere"
                )
            pages = mmap.mmap(fd, wanted)
        finally:
            os.close(fd)
        self.view = memoryview(pages)

    def slot(self, chunk: int, length: int) -> memoryview:
        """Where chunk number `chunk` of the link lies."""
        at = chunk % SLOTS * self._size
        return self.view[at : at + length]


def offer(sock: socket.socket, shape: Shape) -> Segment:
    """The sender's side: makes a segment and passes it on."""
    fd = os.memfd_create("keepstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, shape.chunk_bytes * SLOTS)  # no memory left is an error here, not a signal later
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        socket.send_fds(sock, [b"m"], [fd])
    except BaseException:
        os.close(fd)
        raise
    return Segment(fd, shape)


def accept(sock: socket.socket, shape: Shape) -> Segment:
    """The receiver's side."""
    message, fds, _, _ = socket.recv_fds(sock, 1, 4)
    if message != b"m" or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise RemoteProtocolError("a peer on this host did not pass its shared memory")
    return Segment(fds[0], shape)


def copy(target: memoryview, source: memoryview) -> None:
    """Without the interpreter lock, which a plain slice assignment would hold."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class SharedSendLink(SendLink):
    """Our end of the link to a next member on this host."""

    kind = "shm"
    inline = True

    def __init__(
        self, peer: Peer, socks: Sequence[socket.socket], quorum_id: int, settings: LinkSettings, segment: Segment
    ) -> None:
        super().__init__(peer, socks, quorum_id, settings)
        self.segment: Segment | None = segment

    def close(self) -> None:
        super().close()
        self.segment = None  # unmapped once the last view of it is gone

    def send(
        self, seq: int, exchange: int, number: int, data: memoryview, phase: str, checksum: int | None = None
    ) -> None:
        """One chunk; uses up a credit. No checksum: it stays in this host's memory."""
        copy(self.slot(len(data)), data)
        self.announce(seq, exchange, number, len(data), phase)

    def slot(self, length: int) -> memoryview:
        assert self.segment is not None
        return self.segment.slot(self.chunks, length)

    def announce(self, seq: int, exchange: int, number: int, length: int, phase: str) -> None:
        self.chunks += 1
        self.credits -= 1
        self._write(self.socks[0], [memoryview(HEADER.pack(self.quorum_id, seq, exchange, number, length, 0))], phase)


class SharedReceiveLink(ReceiveLink):
    """Our end of the link from a previous member on this host."""

    window = SLOTS

    def __init__(
        self, peer: Peer, socks: Sequence[socket.socket], quorum_id: int, settings: LinkSettings, segment: Segment
    ) -> None:
        super().__init__(peer, socks, quorum_id, settings, chunk_bytes=0)
        self.segment: Segment | None = segment

    def close(self) -> None:
        super().close()
        self.segment = None  # unmapped once the last view of it is gone

    def payload(self, length: int, checksum: int, phase: str) -> memoryview:
        assert self.segment is not None
        return self.segment.slot(self.chunks - 1, length)

    def payload_into(self, target: memoryview, checksum: int, phase: str) -> None:
        copy(target, self.payload(len(target), checksum, phase))

    def _discard(self, sock: socket.socket, length: int) -> None:
        """The payload of an older ring is not in the stream."""
