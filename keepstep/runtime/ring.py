"""One ring of the FTAR engine: two connections, two threads, from connecting to broken (FT-HSDP section 4).

The *sender* forwards what is complete as fast as credits allow; the *receiver* adds each chunk to ours as it comes. Buckets are
queued as they fill, and exchanges run in that order. Building the ring happens in the sender's thread, in the background,
while the model still computes.

Errors: whatever goes wrong with a peer breaks the ring: both its connections are shut, so that the abort travels around it at
once, and the step that runs fails with the suspect's name. Inputs are never written: another ring can repeat the step. Wrong
arguments or an exception while reducing are *fatal*: retrying would not help.

Calls may come from any thread and never block for the network; events are told from the ring's threads.
"""

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keepstep.ports import ExchangeBuffer
from keepstep.protocol.errors import JobMismatch, KeepstepError, Unauthorized
from keepstep.protocol.exchange import Deadline, Exchange
from keepstep.protocol.ids import QuorumId, ReplicaId, Seq
from keepstep.protocol.messages import Peer
from keepstep.protocol.ring import Shape
from keepstep.runtime.handshake import Identity, connect_hello, greet
from keepstep.runtime.links import LinkError, LinkSettings, ReceiveLink, SendLink, Wake, shut, tune

log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What may be tuned. All members of a job must agree on chunk_bytes and window. Times in seconds."""

    chunk_bytes: int = 1 << 20
    window: int = 4
    progress_floor_s: float = 10.0
    progress_ceiling_s: float = 60.0
    link: LinkSettings = field(default_factory=LinkSettings)

    @property
    def shape(self) -> Shape:
        return Shape(self.chunk_bytes, self.window)


@dataclass(frozen=True, slots=True)
class StepDone:
    """Every exchange of decision `seq` is complete: the outputs hold the sums."""

    seq: Seq


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Decision `seq` cannot be completed on this ring. Not fatal: a new ring can repeat it."""

    seq: Seq
    quorum_id: QuorumId
    exchange: int
    suspect: ReplicaId | None
    phase: str
    reason: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class RingReady:
    """Both neighbours are connected."""

    quorum_id: QuorumId


@dataclass(frozen=True, slots=True)
class RingBroken:
    """A link failed while no exchange was running."""

    quorum_id: QuorumId
    suspect: ReplicaId | None
    reason: str


EngineEvent = StepDone | StepFailed | RingReady | RingBroken


@dataclass(slots=True)
class _Running:
    """One submitted bucket on its way around the ring."""

    seq: Seq
    number: int
    buffer: ExchangeBuffer
    progress: Exchange
    sides_done: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What rings get from the engine that makes them."""

    identity: Identity
    settings: EngineSettings
    deadline: Deadline
    tell: Callable[[EngineEvent], None]
    fault: Callable[[str, int], None]


class Ring:
    """One membership, from connecting to broken. Never reused."""

    def __init__(self, owner: Owner, quorum_id: QuorumId, peers: Sequence[Peer], position: int) -> None:
        self.owner, self.quorum_id, self.peers, self.position = owner, quorum_id, tuple(peers), position
        self.size = len(self.peers)
        self.previous, self.next = self.peers[position - 1], self.peers[(position + 1) % self.size]
        self.settings = owner.settings
        self.broken: tuple[ReplicaId | None, str, str, bool] | None = None
        self.ready = self.size == 1
        self._lock = threading.Lock()
        self._wakes = [Wake(), Wake()] if self.size > 1 else []
        self._to_send: deque[_Running] = deque()
        self._to_receive: deque[_Running] = deque()
        self._accepted: socket.socket | None = None
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._open: dict[str, socket.socket] = {}  # closed by the thread of that name
        self._seq: Seq | None = None  # of the running step
        self._exchanges = 0
        self._done = 0
        self._first_submit = 0.0
        self._closed = False

    # --- the engine's calls -----------------------------------------------------------------------------------

    def start(self) -> None:
        if self.size == 1:
            self.owner.tell(RingReady(self.quorum_id))
            return
        self._spawn(self._connect_and_send, "send")

    def offer(self, sock: socket.socket) -> None:
        """The previous member has connected."""
        with self._lock:
            if self._accepted is None and not self.broken:
                self._accepted = sock
                self._sockets.append(sock)
                self._wakes[0].set()
                return
        sock.close()

    def begin(self, seq: Seq, exchanges: int) -> None:
        with self._lock:
            self._seq, self._exchanges, self._done = seq, exchanges, 0
            broken = self.broken
        if broken is not None:
            self._tell_failed(seq, 0, broken)

    def submit(self, seq: Seq, number: int, buffer: ExchangeBuffer) -> None:
        with self._lock:
            if self.broken or seq != self._seq:
                return  # StepFailed says so, or has said so
            if number == 0:
                self._first_submit = time.monotonic()
            if self.size > 1:
                shape = self.settings.shape
                progress = Exchange(
                    nbytes=buffer.nbytes, itemsize=buffer.itemsize, size=self.size, position=self.position, shape=shape
                )
                running = _Running(seq, number, buffer, progress)
                self._to_send.append(running)
                self._to_receive.append(running)
        if self.size == 1:
            buffer.copy_through(0, buffer.nbytes)
            self._one_done()
        for wake in self._wakes:
            wake.set()

    def abort(self, suspect: ReplicaId, reason: str) -> None:
        self._break(suspect, "told", f"ring {self.quorum_id}: {reason}", fatal=False)

    def close(self) -> None:
        """Quietly: what still runs here is not told about."""
        self._closed = True
        self._break(None, "", "closed", fatal=False)

    def join(self, timeout: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout)
        self.release()

    def release(self) -> bool:
        """Whether nothing of it runs any more; frees what is left then."""
        if any(thread.is_alive() for thread in self._threads):
            return False
        for wake in self._wakes:
            wake.close()
        return True

    # --- breaking ---------------------------------------------------------------------------------------------

    def _break(self, suspect: ReplicaId | None, phase: str, reason: str, *, fatal: bool) -> None:
        with self._lock:
            if self.broken is not None:
                return
            self.broken = (suspect, phase, reason, fatal)
            sockets, seq = list(self._sockets), self._seq
            number = self._to_receive[0].number if self._to_receive else 0
            running = seq is not None and self._done < self._exchanges
            self._to_send.clear()
            self._to_receive.clear()
        for sock in sockets:
            shut(sock)
        for wake in self._wakes:
            wake.set()
        if self._closed:
            return
        if running or fatal:
            self._tell_failed(seq or Seq(0), number, self.broken)
        else:
            self.owner.tell(RingBroken(self.quorum_id, suspect, reason))

    def _tell_failed(self, seq: Seq, number: int, why: tuple[ReplicaId | None, str, str, bool]) -> None:
        suspect, phase, reason, fatal = why
        self.owner.tell(StepFailed(seq, self.quorum_id, number, suspect, phase, reason, fatal))

    def _blame(self, peer: Peer, error: Exception, phase: str) -> None:
        fatal = isinstance(error, JobMismatch)
        reason = f"ring {self.quorum_id}, {phase}: replica {peer.replica_id}: {error}"
        self._break(peer.replica_id, phase, reason, fatal=fatal)

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                log.exception("the FTAR %s thread failed", name)
                self._break(None, name, f"{type(error).__name__}: {error}", fatal=True)
            finally:  # after the ring is broken for its own reason, not before: peers would be blamed for our bug
                if name in self._open:
                    self._open[name].close()

        thread = threading.Thread(target=guarded, name=f"keepstep-{name}-{self.quorum_id}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # --- connecting (the sender's thread) ---------------------------------------------------------------------

    def _connect_and_send(self) -> None:
        link = self.settings.link
        sock = socket.socket(socket.AF_INET6 if ":" in self.next.endpoint.host else socket.AF_INET)
        self._open["send"] = sock
        with self._lock:
            self._sockets.append(sock)
        try:
            self._dial(sock)
            self._await_previous(sock)
            if self.broken is None:
                self.ready = True
                self.owner.tell(RingReady(self.quorum_id))
                self._spawn(self._receive, "receive")
                self._send(SendLink(sock, self.quorum_id, self._wakes[0], link))
        finally:
            if not self.ready and self._accepted is not None:
                self._accepted.close()

    def _await_previous(self, dialled: socket.socket) -> None:
        """Until the previous member has connected. Notices if the next one gives this ring up meanwhile."""
        wait_s, previous = self.settings.link.connect_s, self.previous.replica_id
        deadline = time.monotonic() + wait_s
        poll = select.poll()
        poll.register(dialled, select.POLLRDHUP)
        poll.register(self._wakes[0].fileno(), select.POLLIN)
        while self._accepted is None and self.broken is None:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                reason = f"ring {self.quorum_id}: replica {previous} has not connected in {wait_s:g} s"
                self._break(previous, "connect", reason, fatal=False)
            for fd, _ in ready:
                if fd == self._wakes[0].fileno():
                    self._wakes[0].clear()
                else:
                    self._blame(self.next, ConnectionResetError("it gave this ring up"), "connect")

    def _dial(self, sock: socket.socket) -> None:
        link, me, to = self.settings.link, self.owner.identity, self.next
        tune(sock, link)
        try:
            sock.settimeout(link.connect_s)
            sock.connect((to.endpoint.host, to.endpoint.ftar_port))
            greet(sock, connect_hello(me, self.quorum_id, to.replica_id, to.incarnation), me.token)
            sock.settimeout(None)
        except Unauthorized as error:
            self._break(to.replica_id, "connect", f"replica {to.replica_id}: {error}", fatal=True)
        except (OSError, KeepstepError) as error:
            self._blame(to, error, "connect")

    def _head(self, queue: "deque[_Running]") -> _Running | None:
        with self._lock:
            return queue[0] if queue else None

    # --- sending ----------------------------------------------------------------------------------------------

    def _send(self, link: SendLink) -> None:
        phase = "idle"
        try:
            while self.broken is None:
                running = self._head(self._to_send)
                phase = "idle" if running is None else self._send_some(running, link)
                if running is not None and running.progress.sent_all:
                    with self._lock:
                        if self.broken is None:
                            self._to_send.popleft()
                    self._side_done(running)
                elif self.broken is None:
                    link.wait(phase)
        except LinkError as error:
            self._blame(self.next, error, error.phase)

    def _send_some(self, running: _Running, link: SendLink) -> str:
        """Sends what is ready and has a credit; returns the phase."""
        progress, buffer, phase = running.progress, running.buffer, "reduce-scatter"
        while not progress.sent_all and self.broken is None:
            send = progress.next_send()
            if link.credits == 0:
                link.take_credits(phase)
            if send is None or link.credits == 0:
                break
            data = (buffer.input if send.after is None else buffer.output)(send.lo, send.hi)
            if send.after is not None and not progress.receives[send.after].reduce:
                phase = "all-gather"
            link.send(running.seq, running.number, progress.sent, data, phase)
            progress.on_sent()
        return phase

    # --- receiving --------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        sock = self._accepted
        assert sock is not None
        self._open["receive"] = sock
        link = ReceiveLink(sock, self.quorum_id, self._wakes[1], self.settings.link)
        stage = memoryview(bytearray(self.settings.chunk_bytes))
        try:
            while self.broken is None:
                running = self._head(self._to_receive)
                if running is None:
                    link.wait_for_work()
                    continue
                self._receive_all(running, link, stage)
                with self._lock:
                    if self.broken is None:
                        self._to_receive.popleft()
                self._side_done(running)
        except LinkError as error:
            self._blame(self.previous, error, error.phase)

    def _receive_all(self, running: _Running, link: ReceiveLink, stage: memoryview) -> None:
        progress, buffer, since = running.progress, running.buffer, time.monotonic()
        while not progress.received_all:
            phase = "reduce-scatter" if progress.next_receive().reduce else "all-gather"
            link.grant(progress.grant(), phase)
            expected = progress.next_receive()
            length = expected.hi - expected.lo
            checksum = link.header(running.seq, running.number, progress.received, length, phase)
            if checksum is None:
                self._check_progress(since, phase)
                continue
            self.owner.fault("chunk", running.number)
            if expected.reduce:
                link.body(stage[:length], checksum, phase)
                buffer.reduce(expected.lo, expected.hi, stage[:length])
            else:
                link.body(buffer.output(expected.lo, expected.hi), checksum, phase)
            progress.on_received()
            since = time.monotonic()
            self._wakes[0].set()

    def _check_progress(self, since: float, phase: str) -> None:
        limit = self.owner.deadline.seconds
        if time.monotonic() - since > limit:
            raise LinkError(f"it is alive, but has sent nothing for {limit:.1f} s", phase)

    def _side_done(self, running: _Running) -> None:
        with self._lock:
            running.sides_done += 1
            done = running.sides_done == 2 and self.broken is None
        if done:
            self._one_done()

    def _one_done(self) -> None:
        with self._lock:
            self._done += 1
            seq = self._seq if self._done == self._exchanges else None
            took = time.monotonic() - self._first_submit
        if seq is not None:
            self.owner.deadline.observe(took)
            self.owner.tell(StepDone(seq))
