"""How a ring gets its two links: kept from the ring before, dialled, or accepted.

    to the next member         kept, if the ring before had a good link to it; else dialled: shared memory, or else TCP
    from the previous member   kept, once its mark comes; or a new connection, if that member did not keep it

Both ends decide from the same lists of members, so they agree in all but rare cases; where they do not, the end of the kept
connection says so, and a new one is made. Runs in the ring's own thread, while the model computes. Fails: LinkError (who and
why), a KeepstepError from the handshake, or `Stopped`.
"""

import contextlib
import logging
import select
import socket
import threading
import time
from dataclasses import dataclass, field

from keepstep.protocol.errors import KeepstepError
from keepstep.protocol.ids import QuorumId
from keepstep.protocol.messages import Peer
from keepstep.protocol.ring import Shape
from keepstep.runtime import shared_memory
from keepstep.runtime.handshake import Identity, connect_hello, greet
from keepstep.runtime.links import LinkError, LinkSettings, PeerClosed, ReceiveLink, RingEnded, SendLink, Wake, tune
from keepstep.runtime.listener import Accepted, same_user
from keepstep.runtime.shared_memory import SharedReceiveLink, SharedSendLink

log = logging.getLogger("keepstep")

AGAIN_S = 0.02


class Stopped(Exception):
    """Nobody wants the ring any more."""


@dataclass(slots=True)
class Kept:
    """What a ring leaves to the next one: links that are good, at the end of a chunk."""

    send: SendLink | None = None
    receive: ReceiveLink | None = None

    def close(self) -> None:
        for link in (self.send, self.receive):
            if link is not None:
                link.close()


@dataclass(slots=True)
class Connecting:
    """Everything that one ring has to do with connections until it has its links. `offer` and `stop`: any thread."""

    me: Identity
    quorum_id: QuorumId
    previous: Peer
    next: Peer
    settings: LinkSettings
    shape: Shape
    wake: Wake = field(default_factory=Wake)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _accepted: dict[int, Accepted] = field(default_factory=dict)
    _dialling: list[socket.socket] = field(default_factory=list)
    _over: bool = False  # nothing is accepted any more
    _heard_at: float = 0.0  # when the next member was last shown that we live

    def offer(self, accepted: Accepted) -> None:
        """The previous member has connected."""
        with self._lock:
            if not self._over and accepted.hello.stream not in self._accepted:
                self._accepted[accepted.hello.stream] = accepted
                self.wake.set()
                return
        accepted.close()

    def stop(self) -> None:
        """`links` raises Stopped soon."""
        with self._lock:
            self._over = True
            unused, self._accepted = list(self._accepted.values()), {}
            for sock in self._dialling:
                with contextlib.suppress(OSError):  # not connected yet, or gone
                    sock.shutdown(socket.SHUT_RDWR)
        for accepted in unused:
            accepted.close()
        self.wake.set()

    def links(self, kept: Kept) -> tuple[SendLink, ReceiveLink]:
        """The links, ready for chunks. Takes `kept` over. At most about connect_s for each side."""
        send, receive = kept.send, kept.receive
        try:
            send = self._keep(send) or self._dial()
            if receive is not None:
                receive.adopt(self.quorum_id)
                receive = self._look_for_mark(receive)
            self._heard_at = time.monotonic()
            deadline = self._heard_at + self.settings.connect_s
            while not (send.adopted and receive is not None and receive.adopted):
                fresh = self._take_accepted()
                if fresh is not None:
                    if receive is not None:
                        receive.close()
                    receive = fresh
                    continue
                readable = self._wait(send, receive, deadline)
                if send.fileno() in readable:
                    send = self._look_for_answer(send)
                if receive is not None and not readable.isdisjoint(sock.fileno() for sock in receive.socks):
                    receive = self._look_for_mark(receive)
            self._end()
            return send, receive
        except BaseException:
            Kept(send, receive).close()
            raise

    def _end(self) -> None:
        with self._lock:
            self._check()
            self._over = True
            unused, self._accepted = list(self._accepted.values()), {}
        for accepted in unused:
            accepted.close()

    def _check(self) -> None:
        if self._over:
            raise Stopped

    # --- to the next member ------------------------------------------------------------------------------------

    def _keep(self, link: SendLink | None) -> SendLink | None:
        if link is None:
            return None
        try:
            link.adopt(self.quorum_id)
        except LinkError:  # it did not keep it
            link.close()
            return None
        return link

    def _look_for_answer(self, link: SendLink) -> SendLink:
        """Reads what the next member has answered."""
        try:
            link.take_credits("connect")
        except LinkError as error:
            if link.adopted or isinstance(error, RingEnded):
                raise
            link.close()  # it did not keep it
            return self._dial()
        return link

    def _dial(self) -> SendLink:
        host, port, settings = self.next.endpoint.host, self.next.endpoint.ftar_port, self.settings
        link = self._dial_on_this_host(host, port) if settings.shared_memory else None
        if link is not None:
            return link
        socks: list[socket.socket] = []
        try:
            for stream in range(settings.streams):
                socks.append(self._dial_stream(host, port, stream))
        except BaseException:  # Stopped, too
            for sock in socks:
                sock.close()
            raise
        return SendLink(self.next, socks, self.quorum_id, settings)

    def _dial_stream(self, host: str, port: int, stream: int) -> socket.socket:
        """One connection. Where strangers flood the member's port, ours may have to make room for theirs: then once more."""
        deadline = time.monotonic() + self.settings.connect_s
        while True:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            try:
                tune(sock, self.settings)
                self._connect(sock, (host, port), stream)
                return sock
            except (ConnectionResetError, BrokenPipeError):
                sock.close()
                self._check()
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN_S)
            except BaseException:  # Stopped, too
                sock.close()
                raise

    def _dial_on_this_host(self, host: str, port: int) -> SendLink | None:
        """None: it is elsewhere, or will not share memory."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            tune(sock, self.settings)
            self._connect(sock, shared_memory.address(host, port), 0)
            segment = shared_memory.offer(sock, self.shape)
        except ConnectionRefusedError:  # it is elsewhere
            sock.close()
            return None
        except (OSError, KeepstepError) as error:
            sock.close()
            self._check()
            log.warning("no shared memory with replica %d, but TCP: %s", self.next.replica_id, error)
            return None
        return SharedSendLink(self.next, [sock], self.quorum_id, self.settings, segment)

    def _connect(self, sock: socket.socket, to: tuple[str, int] | str, stream: int) -> None:
        with self._lock:
            if self._over:
                sock.close()
                raise Stopped
            self._dialling.append(sock)
        try:
            sock.settimeout(self.settings.connect_s)
            sock.connect(to)
            if not same_user(sock):
                raise ConnectionRefusedError("another user has the name of its Unix socket")
            streams = self.settings.streams if isinstance(to, tuple) else 1
            peer = self.next
            greet(
                sock,
                connect_hello(self.me, self.quorum_id, peer.replica_id, peer.incarnation, stream, streams),
                self.me.token,
            )
            sock.settimeout(None)
        finally:
            with self._lock:
                self._dialling.remove(sock)

    # --- from the previous member ------------------------------------------------------------------------------

    def _take_accepted(self) -> ReceiveLink | None:
        """The link of a new connection, once all its streams are there."""
        with self._lock:
            got = [self._accepted[stream] for stream in sorted(self._accepted)]
            if not got or len(got) < got[0].hello.streams:
                return None
            self._accepted = {}
        socks, segment = [a.sock for a in got], got[0].segment
        if segment is not None:
            return SharedReceiveLink(self.previous, socks, self.quorum_id, self.settings, segment)
        return ReceiveLink(self.previous, socks, self.quorum_id, self.settings, self.shape.chunk_bytes)

    def _look_for_mark(self, link: ReceiveLink) -> ReceiveLink | None:
        """None: the previous member did not keep it, and will connect anew."""
        if link.adopted:
            raise PeerClosed("connect", link.peer)
        try:
            link.look_for_mark()
        except LinkError as error:
            if isinstance(error, RingEnded):
                raise
            link.close()
            return None
        return link

    def _wait(self, send: SendLink, receive: ReceiveLink | None, deadline: float) -> set[int]:
        """Descriptors that have something to say. Raises LinkError past the deadline, Stopped if nobody wants us.

        The next member may have all its links, and waits for our first chunk: it hears from us meanwhile.
        """
        poll = select.poll()
        poll.register(self.wake.fileno(), select.POLLIN)
        poll.register(send.fileno(), select.POLLIN | select.POLLRDHUP)
        for sock in () if receive is None else receive.socks:
            poll.register(sock, select.POLLRDHUP | (0 if receive is None or receive.adopted else select.POLLIN))
        now = time.monotonic()
        if send.adopted and now >= self._heard_at + self.settings.idle_s:
            send.heartbeat("connect")
            self._heard_at = now
        due = min(deadline, self._heard_at + self.settings.idle_s) if send.adopted else deadline
        ready = {fd for fd, _ in poll.poll(max(0.0, due - now) * 1000)}
        if self.wake.fileno() in ready:
            self.wake.clear()
        self._check()
        if not ready and time.monotonic() >= deadline:
            raise self._too_late(send)
        return ready

    def _too_late(self, send: SendLink) -> LinkError:
        wait_s = self.settings.connect_s
        if not send.adopted:
            return LinkError(f"it has not taken up the link in {wait_s:g} s", "connect", self.next)
        return LinkError(f"it has not connected in {wait_s:g} s", "connect", self.previous)
