"""Tensors from one member of a process group to another: connections of their own, made when first needed.

One connection a direction and pair, authenticated like the ring's. A message is tag, length and bytes; messages from one member
to another arrive in the order in which they were sent. Each direction has a worker thread of its own.

Fails: ExchangeError, which names the rank: it is gone, too late, or sent another tag or length than was asked for.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from keepstep.protocol.errors import ExchangeError, KeepstepError
from keepstep.protocol.ids import QuorumId, ReplicaId
from keepstep.protocol.messages import Peer
from keepstep.runtime.handshake import Identity, connect_hello, greet
from keepstep.runtime.links import LinkSettings, shut, tune
from keepstep.runtime.listener import Accepted, Listener

MAX_EARLY = 64  # connections of rings that we have not been told of yet
_FRAME = struct.Struct("<QQ")  # tag, length


class PointToPoint:
    """The direct connections of one member, under one membership after the other."""

    def __init__(self, me: Identity, host: str, settings: LinkSettings) -> None:
        self._me, self._settings = me, settings
        self._changed = threading.Condition()
        self._ring, self._members = QuorumId(0), tuple[Peer, ...]()
        self._accepted: dict[tuple[QuorumId, ReplicaId], socket.socket] = {}  # of other rings, too; oldest first
        self._open: dict[tuple[str, int], socket.socket] = {}
        self._workers: dict[tuple[str, int], ThreadPoolExecutor] = {}
        self._listener = Listener(me, host, settings, lambda hello: "", self._on_peer)
        self.port = self._listener.port

    def configure(self, ring: QuorumId, members: Sequence[Peer]) -> None:
        """New members, in the order of their ranks; their `ftar_port` is that of their PointToPoint."""
        self.reset()
        with self._changed:
            self._ring, self._members = ring, tuple(members)
            for key in [key for key in self._accepted if key[0] != ring][:-MAX_EARLY]:
                self._accepted.pop(key).close()
            self._changed.notify_all()

    def send(self, to: int, tag: int, data: memoryview, timeout_s: float) -> "Future[None]":
        """In the background: `data` must not change before the future is done."""
        ring = self._ring

        def work() -> None:
            with self._blaming(to):
                sock = self._connection(("send", to), ring, timeout_s, self._dial)
                sock.settimeout(timeout_s)
                sock.sendall(_FRAME.pack(tag, len(data)))
                sock.sendall(data)

        return self._worker("send", to).submit(work)

    def receive(self, source: int, tag: int, target: memoryview, timeout_s: float) -> "Future[None]":
        """In the background: `target` is complete once the future is done."""
        ring = self._ring

        def work() -> None:
            with self._blaming(source):
                sock = self._connection(("recv", source), ring, timeout_s, self._await_peer)
                sock.settimeout(timeout_s)
                got_tag, length = _FRAME.unpack(_exactly(sock, memoryview(bytearray(_FRAME.size))))
                if (got_tag, length) != (tag, len(target)):
                    raise ExchangeError(
                        f"rank {source} sent {length} bytes with tag {got_tag}; expected {len(target)} bytes with tag {tag}"
                    )
                _exactly(sock, target)

        return self._worker("recv", source).submit(work)

    def reset(self) -> None:
        """Whatever is under way fails."""
        with self._changed:
            self._ring, self._members = QuorumId(0), ()
            socks, self._open = list(self._open.values()), {}
            workers, self._workers = list(self._workers.values()), {}
            self._changed.notify_all()
        for sock in socks:
            shut(sock)
        for worker in workers:
            worker.shutdown(wait=True, cancel_futures=True)
        for sock in socks:
            sock.close()

    def close(self) -> None:
        self._listener.close()
        self.reset()
        for sock in self._accepted.values():
            sock.close()
        self._accepted.clear()

    # --- connections -------------------------------------------------------------------------------------------

    def _worker(self, direction: str, rank: int) -> ThreadPoolExecutor:
        with self._changed:
            worker = self._workers.get((direction, rank))
            if worker is None:
                worker = self._workers[direction, rank] = ThreadPoolExecutor(1, f"keepstep-{direction}-{rank}")
            return worker

    def _connection(
        self,
        key: tuple[str, int],
        ring: QuorumId,
        timeout_s: float,
        make: Callable[[Peer, QuorumId, float], socket.socket],
    ) -> socket.socket:
        with self._changed:
            if ring != self._ring:
                raise ExchangeError("the process group was configured anew, or aborted")
            sock, peer = self._open.get(key), self._members[key[1]]
        if sock is None:
            sock = make(peer, ring, timeout_s)
            with self._changed:
                if ring != self._ring:
                    sock.close()
                    raise ExchangeError("the process group was configured anew, or aborted")
                self._open[key] = sock
        return sock

    def _dial(self, peer: Peer, ring: QuorumId, timeout_s: float) -> socket.socket:
        host = peer.endpoint.host
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            tune(sock, self._settings)
            sock.settimeout(min(timeout_s, self._settings.connect_s))
            sock.connect((host, peer.endpoint.ftar_port))
            greet(sock, connect_hello(self._me, ring, peer.replica_id, peer.incarnation), self._me.token)
        except BaseException:
            sock.close()
            raise
        return sock

    def _await_peer(self, peer: Peer, ring: QuorumId, timeout_s: float) -> socket.socket:
        key = ring, peer.replica_id
        with self._changed:
            self._changed.wait_for(lambda: key in self._accepted or self._ring != ring, timeout_s)
            if key not in self._accepted:
                raise TimeoutError(f"it has sent nothing in {timeout_s:g} s")
            return self._accepted.pop(key)

    def _on_peer(self, accepted: Accepted) -> None:
        hello = accepted.hello
        with self._changed:
            old = self._accepted.pop((hello.quorum_id, hello.replica_id), None)
            self._accepted[hello.quorum_id, hello.replica_id] = accepted.sock
            early = [key for key in self._accepted if key[0] != self._ring]
            over = [old, *(self._accepted.pop(key) for key in early[:-MAX_EARLY])]
            self._changed.notify_all()
        for sock in over:
            if sock is not None:
                sock.close()

    @contextlib.contextmanager
    def _blaming(self, rank: int) -> Iterator[None]:
        try:
            yield
        except ExchangeError:
            raise
        except (OSError, KeepstepError) as error:
            raise ExchangeError(f"rank {rank}: {error}", suspect=ReplicaId(rank), phase="point to point") from error


def _exactly(sock: socket.socket, target: memoryview) -> memoryview:
    at = 0
    while at < len(target):
        got = sock.recv_into(target[at:])
        if not got:
            raise ConnectionResetError("it closed the connection")
        at += got
    return target
