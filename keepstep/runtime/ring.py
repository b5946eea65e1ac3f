"""One ring of the FTAR engine: two links, two threads, from connecting to broken (FT-HSDP section 4).

The *sender* forwards what is complete as fast as credits allow; the *receiver* adds each chunk to ours as it comes. Where sending
never waits (shared memory), the receiver itself sends on what it has just completed, partial sums without touching the output;
`_turn` says whose turn it is. Buckets are queued as they fill, and exchanges run in that order. Building the ring happens in the
sender's thread, in the background, while the model still computes.

Errors: whatever goes wrong with a peer breaks the ring: it says so on both its links, so that the abort travels around at once,
and the step that runs fails with the suspect's name. Both threads end between two chunks, and links that are still good are left
to the next ring. Inputs are never written: another ring can repeat the step. Wrong arguments or an exception while reducing are
*fatal*: retrying would not help.

Calls may come from any thread and never block for the network; events are told from the ring's threads.
"""

import logging
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
from keepstep.protocol.ring import Receive
from keepstep.runtime.connecting import Connecting, Kept, Stopped
from keepstep.runtime.engine_events import (
    ENDLESS,
    EngineEvent,
    EngineSettings,
    RingBroken,
    RingReady,
    StepDone,
    StepFailed,
)
from keepstep.runtime.handshake import Identity
from keepstep.runtime.links import NO_CHECKSUM, LinkError, ReceiveLink, RingEnded, SendLink, Wake
from keepstep.runtime.listener import Accepted

log = logging.getLogger("keepstep")


@dataclass(slots=True)
class _Running:
    """One submitted bucket on its way around the ring."""

    seq: Seq
    number: int
    buffer: ExchangeBuffer
    progress: Exchange
    submitted: float = field(default_factory=time.monotonic)
    sides_done: int = 0
    checksums: dict[int, int] = field(default_factory=dict)  # of chunks that go on unchanged, by number of receive


@dataclass(frozen=True, slots=True)
class _Broken:
    """Why a ring has ended."""

    suspect: ReplicaId | None
    phase: str
    reason: str
    fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What rings get from the engine that makes them."""

    identity: Identity
    settings: EngineSettings
    deadline: Deadline  # for progress
    silence: Deadline  # for any byte at all
    tell: Callable[[EngineEvent], None]
    fault: Callable[[str, int], None]


class Ring:
    """One membership, from connecting to broken. Never reused."""

    def __init__(self, owner: Owner, quorum_id: QuorumId, peers: Sequence[Peer], position: int) -> None:
        self.owner, self.quorum_id, self.peers, self.position = owner, quorum_id, tuple(peers), position
        self.size = len(self.peers)
        self.previous, self.next = self.peers[position - 1], self.peers[(position + 1) % self.size]
        self.settings = owner.settings
        self.broken: _Broken | None = None
        self._connecting = Connecting(
            owner.identity, quorum_id, self.previous, self.next, self.settings.link, self.settings.shape
        )
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # who holds it may send
        self._sender_waits = False
        self._hungry = False  # a chunk could be sent if there was a credit
        self._awaits_credits = False  # and the sender waits for it
        self._wakes = [self._connecting.wake, Wake()]  # of the sender, of the receiver
        self._to_send: deque[_Running] = deque()
        self._to_receive: deque[_Running] = deque()
        self._kept = Kept()
        self._threads: list[threading.Thread] = []
        self._seq: Seq | None = None  # of the running step
        self._exchanges = 0
        self._submitted = 0
        self._done = 0
        self._late: LinkError | None = None  # of a link that is not needed for what still runs
        self._first_submit = 0.0
        self._closed = False  # events are not told any more
        self._unwanted = False  # nobody takes the links over

    # --- the engine's calls -----------------------------------------------------------------------------------

    def start(self, before: "Ring | None") -> None:
        """Connects in the background, with the good links of the ring `before`, which is closed."""
        if self.size == 1:
            if before is not None:
                before.close()
            self.owner.tell(RingReady(self.quorum_id))
            return
        self._spawn(lambda: self._connect_and_send(before), "send")

    def offer(self, accepted: Accepted) -> None:
        """The previous member has connected."""
        self._connecting.offer(accepted)

    def begin(self, seq: Seq, exchanges: int) -> None:
        with self._lock:
            self._seq, self._exchanges, self._submitted, self._done = seq, exchanges, 0, 0
            broken = self.broken
        if broken is not None:
            self._tell_failed(seq, 0, broken)

    def submit(self, seq: Seq, number: int, buffer: ExchangeBuffer) -> None:
        with self._lock:
            if self.broken or seq != self._seq:
                return  # StepFailed says so, or has said so
            late = self._late
            self._submitted += 1
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
            buffer.final(0, buffer.nbytes)
            buffer.done()
            self._one_done(time.monotonic())
        for wake in self._wakes:
            wake.set()
        if late is not None:
            self._blame(late)

    def abort(self, suspect: ReplicaId, reason: str) -> None:
        why = _Broken(suspect, "told", f"ring {self.quorum_id}: {reason}", fatal=False)
        self._break(why, failed=self._links_to(suspect))

    def retire(self) -> None:
        """Quietly: another ring comes. Its threads end between two chunks."""
        self._closed = True
        self._break(_Broken(None, "", "closed", fatal=False))

    def close(self) -> None:
        """The same at once, and the others see us leave."""
        self._closed = self._unwanted = True
        self._break(_Broken(None, "", "closed", fatal=False), failed=[self.previous, self.next])
        self._shut_links()
        self.release()

    def leave_links(self, to: "Connecting") -> Kept:
        """Good links to and from the members that `to` wants, once our threads have let go of them; the rest is closed."""
        deadline = time.monotonic() + self.settings.link.connect_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._unwanted = True
            self._shut_links()  # a thread hangs on a peer that does nothing
            return Kept()
        self.release()
        kept, self._kept = self._kept, Kept()
        for link, wanted in ((kept.send, to.next), (kept.receive, to.previous)):
            if link is not None and (link.failed or _who(link.peer) != _who(wanted)):
                link.close()
        send, receive = kept.send, kept.receive
        return Kept(
            send if send is not None and not send.failed else None,
            receive if receive is not None and not receive.failed else None,
        )

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
        if self._unwanted:
            self._kept.close()
        return True

    # --- breaking ---------------------------------------------------------------------------------------------

    def _break(self, why: "_Broken", failed: Sequence[Peer] = ()) -> None:
        """Ends the ring, once. Links to `failed` are shut, the others are told by the thread that uses them."""
        with self._lock:
            if self.broken is not None:
                return
            bad = [
                link
                for link in (self._kept.send, self._kept.receive)
                if link is not None and (why.fatal or link.peer in failed)
            ]
            for link in bad:  # before a thread can see that the ring is broken: it must not tell them
                link.failed = True
            self.broken = why
            seq = self._seq
            number = self._to_receive[0].number if self._to_receive else 0
            running = seq is not None and self._done < self._exchanges
            self._to_send.clear()
            self._to_receive.clear()
        self._connecting.stop()
        for link in bad:
            link.shut()
        for wake in self._wakes:
            wake.set()
        if self._closed:
            return
        if running or why.fatal:
            self._tell_failed(seq or Seq(0), number, why)
        else:
            self.owner.tell(RingBroken(self.quorum_id, why.suspect, why.reason))

    def _links_to(self, suspect: ReplicaId | None) -> list[Peer]:
        """A thread may hang on the suspect: its links must not wait for the end of a chunk."""
        return [peer for peer in (self.previous, self.next) if peer.replica_id == suspect]

    def _shut_links(self) -> None:
        for link in (self._kept.send, self._kept.receive):
            if link is not None:
                link.shut()

    def _tell_failed(self, seq: Seq, number: int, why: "_Broken") -> None:
        self.owner.tell(StepFailed(seq, self.quorum_id, number, why.suspect, why.phase, why.reason, why.fatal))

    def _blame(self, error: LinkError) -> None:
        """A link has failed, or its other end has ended the ring and may know why."""
        reason = f"ring {self.quorum_id}, {error.phase}: replica {error.peer.replica_id}: {error}"
        if isinstance(error, RingEnded):
            self._break(_Broken(error.suspect, error.phase, reason, fatal=False), failed=self._links_to(error.suspect))
        else:
            self._break(_Broken(error.peer.replica_id, error.phase, reason, fatal=False), failed=[error.peer])

    def _lost(self, error: LinkError, own: "deque[_Running]", other: "deque[_Running]") -> None:
        """A link is of no use any more. What runs may still complete on the other one, if it needs only that.

        A member that is through with an exchange may leave before its neighbours are. If it died instead, whoever needs it knows.
        """
        named = isinstance(error, RingEnded) and error.suspect is not None
        with self._lock:
            all_here = self._exchanges in (self._submitted, ENDLESS)
            if all_here and not named and not own and other and self._late is None and self.broken is None:
                self._late = error
                return
        self._blame(error)

    def _blame_next(self, error: Exception) -> None:
        fatal = isinstance(error, JobMismatch | Unauthorized)
        reason = f"ring {self.quorum_id}, connect: replica {self.next.replica_id}: {error}"
        self._break(_Broken(self.next.replica_id, "connect", reason, fatal=fatal))

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                work()
            except LinkError as error:
                self._blame(error)
            except Exception as error:
                log.exception("the FTAR %s thread failed", name)
                self._break(_Broken(None, name, f"{type(error).__name__}: {error}", fatal=True))

        thread = threading.Thread(target=guarded, name=f"keepstep-{name}-{self.quorum_id}", daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def _suspect(self) -> ReplicaId | None:
        return None if self.broken is None else self.broken.suspect

    # --- connecting (the sender's thread) ---------------------------------------------------------------------

    def _connect_and_send(self, before: "Ring | None") -> None:
        kept = Kept() if before is None else before.leave_links(self._connecting)
        try:
            send, receive = self._connecting.links(kept)
        except Stopped:
            return
        except (OSError, KeepstepError) as error:
            self._blame_next(error)
            return
        with self._lock:
            self._kept = Kept(send, receive)
        send.attach(self._wakes[0])
        receive.attach(self._wakes[1])
        if self.broken is None:
            self.owner.tell(RingReady(self.quorum_id, (send is kept.send) + (receive is kept.receive)))
        self._spawn(lambda: self._receive(receive, send), "receive")
        self._send(send)

    # --- sending ----------------------------------------------------------------------------------------------

    def _send(self, link: SendLink) -> None:
        try:
            while self.broken is None:
                self._send_ready(link)
                self._sender_waits = True
                phase = self._send_ready(link)  # what came up before the receiver knew that we wait
                if self.broken is None:
                    self._awaits_credits = self._hungry
                    link.wait(phase, self._hungry)
                self._sender_waits = self._awaits_credits = False
        except LinkError as error:
            self._lost(error, self._to_send, self._to_receive)
        with self._turn:
            link.end_ring(self._suspect)

    def _send_ready(self, link: SendLink) -> str:
        """Sends whatever is complete and has a credit; returns the phase."""
        with self._turn:
            return self._send_all(link)

    def _send_all(self, link: SendLink) -> str:
        phase, self._hungry = "idle", False
        while self.broken is None and (running := self._head(self._to_send)) is not None:
            phase = self._send_some(running, link)
            if not running.progress.sent_all:
                break
            with self._lock:
                if self.broken is None:
                    self._to_send.popleft()
            self._side_done(running)
        return phase

    def _head(self, queue: "deque[_Running]") -> _Running | None:
        with self._lock:
            return queue[0] if queue else None

    def _send_some(self, running: _Running, link: SendLink) -> str:
        progress, buffer, phase = running.progress, running.buffer, "reduce-scatter"
        while not progress.sent_all and self.broken is None:
            send = progress.next_send()
            if send is None:
                break
            if link.credits == 0:
                link.take_credits(phase)
            if link.credits == 0:
                self._hungry = True
                break
            checksum = None if send.after is None else running.checksums.pop(send.after, None)
            data = (buffer.input if send.after is None else buffer.output)(send.lo, send.hi)
            if send.after is not None and not progress.receives[send.after].reduce:
                phase = "all-gather"
            link.send(running.seq, running.number, progress.sent, data, phase, checksum)
            progress.on_sent()
        return phase

    # --- receiving --------------------------------------------------------------------------------------------

    def _receive(self, link: ReceiveLink, out: SendLink) -> None:
        try:
            while self.broken is None:
                running = self._head(self._to_receive)
                if running is None:
                    link.wait_for_work()
                elif self._receive_all(running, link, out):
                    with self._lock:
                        if self.broken is None:
                            self._to_receive.popleft()
                    self._side_done(running)
        except LinkError as error:
            self._lost(error, self._to_receive, self._to_send)
        link.end_ring(self._suspect)

    def _receive_all(self, running: _Running, link: ReceiveLink, out: SendLink) -> bool:
        """Every chunk of the exchange; False: the ring was broken meanwhile."""
        progress, since = running.progress, time.monotonic()
        link.expect_life_within(self.owner.silence.seconds)
        progress.window = min(progress.window, link.window)
        while not progress.received_all and self.broken is None:
            expected = progress.next_receive()
            phase = "reduce-scatter" if expected.reduce else "all-gather"
            link.grant(progress.grant(), phase)
            length = expected.hi - expected.lo
            checksum = link.header(running.seq, running.number, progress.received, length, phase)
            if checksum is None:
                self._check_progress(since, phase)
                continue
            self.owner.fault("chunk", running.number)
            self._take(running, expected, checksum, link, out)
            since = time.monotonic()
        return progress.received_all

    def _take(self, running: _Running, chunk: Receive, checksum: int, link: ReceiveLink, out: SendLink) -> None:
        """One chunk: adds it up or puts it in its place, and sees to it that it goes on."""
        progress, buffer, phase = running.progress, running.buffer, "reduce-scatter" if chunk.reduce else "all-gather"
        if chunk.reduce:
            data = link.payload(chunk.hi - chunk.lo, checksum, phase)
            if out.inline and not chunk.final and self._reduce_onwards(running, chunk, data, out):
                return
            buffer.reduce(chunk.lo, chunk.hi, data)
        else:
            link.payload_into(buffer.output(chunk.lo, chunk.hi), checksum, phase)
            if checksum != NO_CHECKSUM:
                running.checksums[progress.received] = checksum  # it goes on unchanged
        progress.on_received()
        if out.inline and self._turn.acquire(blocking=False):
            try:
                self._send_all(out)
                if self._hungry and not self._awaits_credits:
                    self._wakes[0].set()  # the sender shall wait for credits, we wait for chunks
            finally:
                self._turn.release()
        elif out.inline or self._sender_waits:
            self._wakes[0].set()
        if chunk.final:
            buffer.final(chunk.lo, chunk.hi)

    def _reduce_onwards(self, running: _Running, chunk: Receive, data: memoryview, out: SendLink) -> bool:
        """Adds a partial sum straight into the next link's slot, if that is the next thing to send and has a credit."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self._head(self._to_send) is not running or not running.progress.next_forwards_this:
                return False
            if out.credits == 0:
                out.take_credits("reduce-scatter")
            if out.credits == 0:
                return False
            progress, length = running.progress, chunk.hi - chunk.lo
            running.buffer.reduce(chunk.lo, chunk.hi, data, out.slot(length))
            progress.on_received()
            out.announce(running.seq, running.number, progress.sent, length, "reduce-scatter")
            progress.on_sent()
            return True
        finally:
            self._turn.release()

    def _check_progress(self, since: float, phase: str) -> None:
        limit = self.owner.deadline.seconds
        if time.monotonic() - since > limit:
            raise LinkError(f"it is alive, but has sent nothing for {limit:.1f} s", phase, self.previous)

    def _side_done(self, running: _Running) -> None:
        with self._lock:
            running.sides_done += 1
            done = running.sides_done == 2 and self.broken is None
        if done:
            running.buffer.done()
            self._one_done(running.submitted)

    def _one_done(self, submitted: float) -> None:
        with self._lock:
            self._done += 1
            seq = self._seq if self._done == self._exchanges else None
            endless, since = self._exchanges == ENDLESS, self._first_submit
            late = None if self._to_send or self._to_receive else self._late
        if seq is not None or endless:
            took = time.monotonic() - (submitted if endless else since)
            self.owner.deadline.observe(took)
            self.owner.silence.observe(took)
        if seq is not None:
            self.owner.tell(StepDone(seq))
        if late is not None:
            self._blame(late)


def _who(peer: Peer) -> tuple[ReplicaId, str]:
    return peer.replica_id, peer.incarnation
