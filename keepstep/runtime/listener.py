"""Where previous members connect: a TCP port and, for those on this host, a Unix socket of the same name.

Every connection is authenticated, in a thread of its own and in bounded time, before anybody else sees it. A port scanner, a
stale member, garbage or a connection that says nothing is refused in words, and harms nothing: if too many say nothing at
once, the oldest of them has to make room, not the member that comes last. A member that had to make room itself, in a flood,
tries again. Other users of this host are not spoken to on the Unix socket at all.

Fails: OSError from the constructor. Later on nothing does: without descriptors or threads it waits until there are some.
"""

import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.protocol.errors import KeepstepError, Unauthorized
from keepstep.protocol.ring import Shape
from keepstep.runtime import shared_memory
from keepstep.runtime.handshake import Identity, RingHello, welcome
from keepstep.runtime.links import LinkSettings, shut, tune
from keepstep.runtime.refusals import Refusals
from keepstep.runtime.shared_memory import Segment

log = logging.getLogger("keepstep")

MAX_HANDSHAKES = 32
BACKLOG = 512  # connections that wait; a flood fills it, and a member whose packet is dropped comes a second later
PAUSE_S = 0.1  # without descriptors or threads
OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)  # whoever is at the other end cannot help it
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is one of this user. Other sockets do not tell: True."""
    if sock.family != socket.AF_UNIX:
        return True
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())


@dataclass(frozen=True, slots=True)
class Accepted:
    """A connection of somebody who holds the token, and the segment where its chunks will lie, if they do not come over TCP."""

    sock: socket.socket
    hello: RingHello
    segment: Segment | None

    def close(self) -> None:
        self.sock.close()


class Listener:
    """Accepts connections; `on_peer` gets each, from a thread of the listener's."""

    def __init__(
        self,
        me: Identity,
        host: str,
        settings: LinkSettings,
        admit: Callable[[RingHello], str],
        on_peer: Callable[[Accepted], None],
        shape: Shape | None = None,
    ) -> None:
        """`admit` may refuse a peer, in words. `shape`: of the segments that peers on this host may bring; None: they may not."""
        self._me, self._settings, self._admit, self._on_peer = me, settings, admit, on_peer
        self._shape = shape
        self._lock = threading.Lock()
        self._greeting: list[socket.socket] = []  # oldest first
        self._closed = threading.Event()
        self._refusals = Refusals("a ring connection")
        self._threads: list[threading.Thread] = []
        tcp = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._sockets = [tcp]
        try:
            tune(tcp, settings)
            tcp.bind((host, 0))
            self.port: int = tcp.getsockname()[1]
            self._listen(tcp)
            if shape is not None and settings.shared_memory:
                self._listen_on_this_host(shared_memory.address(host, self.port))
        except BaseException:
            self.close()
            raise

    def _listen_on_this_host(self, address: str) -> None:
        sock = socket.socket(socket.AF_UNIX)
        self._sockets.append(sock)
        try:
            sock.bind(address)
        except OSError as error:  # somebody else has the name: TCP does too
            log.warning("no shared memory for members on this host: %s", error)
        else:
            self._listen(sock)

    def _listen(self, sock: socket.socket) -> None:
        sock.listen(BACKLOG)
        thread = threading.Thread(target=self._accept, args=(sock,), name="keepstep-listen", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                sock, address = listening.accept()
            except OSError as error:
                if not self._closed.is_set():
                    self._refusals.note("anybody", error)
                    self._closed.wait(PAUSE_S)  # or it would fail again at once, for as long as it lasts
                continue
            if not same_user(sock):
                self._refusals.note("this host", Unauthorized("it is another user's"), "user")
                sock.close()
                continue
            with self._lock:
                if len(self._greeting) >= MAX_HANDSHAKES:
                    shut(self._greeting.pop(0))  # its thread closes it
                self._greeting.append(sock)
            try:
                threading.Thread(target=self._greet, args=(sock, address), name="keepstep-hello", daemon=True).start()
            except RuntimeError as error:  # there are too many threads
                with self._lock:
                    if sock in self._greeting:
                        self._greeting.remove(sock)
                sock.close()
                self._refusals.note("anybody", error)
                self._closed.wait(PAUSE_S)

    def _greet(self, sock: socket.socket, address: object) -> None:
        accepted = None
        try:
            sock.settimeout(self._settings.connect_s)
            hello = welcome(sock, self._me, self._admit)
            segment = None
            if sock.family == socket.AF_UNIX and self._shape is not None:
                segment = shared_memory.accept(sock, self._shape)
            sock.settimeout(None)
            accepted = Accepted(sock, hello, segment)
        except (KeepstepError, OSError) as error:
            self._refusals.note(_place(address), error)
        finally:
            with self._lock:
                made_room = sock not in self._greeting
                if not made_room:
                    self._greeting.remove(sock)
            if accepted is None or made_room:
                sock.close()
                accepted = None
        if accepted is not None:
            self._on_peer(accepted)

    def close(self) -> None:
        self._closed.set()
        for sock in self._sockets:
            shut(sock)
            sock.close()
        for thread in self._threads:
            thread.join(2.0)


def _place(address: object) -> str:
    """Where a connection comes from; without its port, which is another one each time."""
    return str(address[0]) if isinstance(address, tuple) else "this host"
