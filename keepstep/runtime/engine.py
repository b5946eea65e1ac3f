"""FTAR on one rank: a ring that can change its members, and the exchanges that run on it (FT-HSDP section 4).

    configure(ring) ──> begin(decision, n) ──> submit(bucket 0) ... submit(bucket n-1) ──> StepDone | StepFailed

A new `configure` replaces the ring; buckets that failed on the old one can be submitted again. The engine owns the port where
previous members connect, and gives each connection to the ring it was made for, however early it comes.

Calls may come from any thread and never block for the network; `on_event` is called from the rings' threads. An engine
makes the whole process switch threads more often (`switch_interval_s`): otherwise a pure-Python main thread holds up whatever
still needs the interpreter.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

from keepstep.ports import ExchangeBuffer
from keepstep.protocol.errors import LocalProtocolError
from keepstep.protocol.exchange import Deadline
from keepstep.protocol.ids import Incarnation, QuorumId, ReplicaId, Seq
from keepstep.protocol.messages import Peer
from keepstep.runtime.engine_events import EngineEvent, EngineSettings
from keepstep.runtime.handshake import Identity, RingHello
from keepstep.runtime.listener import Accepted, Listener
from keepstep.runtime.ring import Owner, Ring

MAX_EARLY = 16  # connections of rings that we have not been told of yet


class Engine:
    """The rings of one rank, one after the other."""

    def __init__(
        self,
        identity: Identity,
        *,
        host: str,
        settings: EngineSettings,
        on_event: Callable[[EngineEvent], None],
        fault: Callable[[str, int], None] | None = None,
        ordered: bool = True,
    ) -> None:
        """`ordered`: quorum_ids only grow, so that whoever is behind can be told at once."""
        self._on_event, self._ordered = on_event, ordered
        sys.setswitchinterval(min(settings.switch_interval_s, sys.getswitchinterval()))
        deadline = Deadline(floor=settings.progress_floor_s, ceiling=settings.progress_ceiling_s)
        link = settings.link
        silence = Deadline(floor=min(link.silent_floor_s, link.silent_s), ceiling=link.silent_s, multiple=4.0)
        self._owner = Owner(
            identity=identity, settings=settings, deadline=deadline, silence=silence, tell=self._tell, fault=fault
        )
        self._lock = threading.Lock()
        self._ring: Ring | None = None
        self._old: list[Ring] = []
        self._early: deque[Accepted] = deque()
        self._closed = False
        self._listener = Listener(identity, host, settings.link, self._admit, self._on_peer, settings.shape)
        self.port = self._listener.port

    def _tell(self, event: EngineEvent) -> None:
        if not self._closed:
            self._on_event(event)

    def configure(self, quorum_id: QuorumId, peers: Sequence[Peer], position: int) -> None:
        """A new ring replaces the old one, and keeps its good links. Connects in the background."""
        ring = Ring(self._owner, quorum_id, peers, position)
        with self._lock:
            old, self._ring = self._ring, ring
            # Whoever comes before us is forming this ring too: what it connected for another one before is over.
            over = [a for a in self._early if _from(a) == _who(ring.previous) or self._is_over(a.hello)]
            mine = [a for a in self._early if a.hello.quorum_id == quorum_id]
            self._early = deque(a for a in self._early if a not in over and a not in mine)
        if old is not None:
            old.retire()
            self._old = [r for r in (*self._old, old) if not r.release()]
        ring.start(old)
        for accepted in over:
            if accepted not in mine:
                accepted.close()
        for accepted in mine:
            self._on_peer(accepted)

    def begin(self, seq: Seq, quorum_id: QuorumId, exchanges: int) -> None:
        """Decision `seq` runs `exchanges` exchanges on ring `quorum_id`; their buckets follow by `submit`."""
        self._ring_of(quorum_id).begin(seq, exchanges)

    def submit(self, seq: Seq, exchange: int, buffer: ExchangeBuffer) -> None:
        """Bucket `exchange` of decision `seq` is full: its input stays unchanged until the step ends. In order of number."""
        ring = self._ring
        if ring is None:
            raise LocalProtocolError("a bucket was submitted before any ring was configured")
        ring.submit(seq, exchange, buffer)

    def abort(self, quorum_id: QuorumId, suspect: ReplicaId, reason: str) -> None:
        """A member of the ring is known to be gone, though no link may have said so: what runs on it fails."""
        ring = self._ring
        if ring is not None and ring.quorum_id == quorum_id:
            ring.abort(suspect, reason)

    def expect_progress_within(self, seconds: float) -> None:
        """A fixed deadline instead of one learned from experience."""
        self._owner.deadline.floor = self._owner.deadline.ceiling = seconds

    def close(self) -> None:
        """Ends every connection and thread; bounded in time."""
        self._closed = True
        self._listener.close()
        with self._lock:
            rings = [*self._old, *([self._ring] if self._ring else [])]
            early, self._early = list(self._early), deque()
        for accepted in early:
            accepted.close()
        for ring in rings:
            ring.close()
        for ring in rings:
            ring.join(2.0)

    def _ring_of(self, quorum_id: QuorumId) -> Ring:
        ring = self._ring
        if ring is None or ring.quorum_id != quorum_id:
            raise LocalProtocolError(f"no ring of quorum {quorum_id} is configured here")
        return ring

    # --- who may connect (the listener's threads) -------------------------------------------------------------

    def _admit(self, hello: RingHello) -> str:
        if self._is_over(hello) and self._ring is not None:
            return f"stale: quorum {hello.quorum_id} is over, this is quorum {self._ring.quorum_id}"
        return ""

    def _is_over(self, hello: RingHello) -> bool:
        ring = self._ring
        return self._ordered and ring is not None and hello.quorum_id < ring.quorum_id

    def _on_peer(self, accepted: Accepted) -> None:
        with self._lock:
            ring, welcome = self._ring, not self._closed and not self._is_over(accepted.hello)
            if welcome and (ring is None or accepted.hello.quorum_id != ring.quorum_id):
                if len(self._early) == MAX_EARLY:
                    self._early.popleft().close()
                self._early.append(accepted)
                return
        if welcome and ring is not None and _from(accepted) == _who(ring.previous):
            ring.offer(accepted)
        else:
            accepted.close()


def _from(accepted: Accepted) -> tuple[ReplicaId, Incarnation]:
    return accepted.hello.replica_id, accepted.hello.incarnation


def _who(peer: Peer) -> tuple[ReplicaId, Incarnation]:
    return peer.replica_id, peer.incarnation
