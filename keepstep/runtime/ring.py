"""One ring of the FTAR engine: two links and what moves chunks over them, from connecting to broken (FT-HSDP section 4).

Buckets are queued as they fill, and exchanges run in that order. The ring is built in a thread of its own, in the background,
while the model still computes; then a `Movement` takes over in that thread.

Errors: whatever goes wrong with a peer breaks the ring: it says so on both its links, so that the abort travels around at once,
and the step that runs fails with the suspect's name. Movement ends between two chunks, and links that are still good are left
to the next ring. Inputs are never written: another ring can repeat the step. Wrong arguments or an exception while reducing are
*fatal*: retrying would not help.

Calls may come from any thread and never block for the network; events are told from the ring's threads.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepstep.ports import ExchangeBuffer
from keepstep.protocol.errors import JobMismatch, KeepstepError, Unauthorized
from keepstep.protocol.exchange import Deadline, Exchange
from keepstep.protocol.ids import QuorumId, ReplicaId, Seq
from keepstep.protocol.messages import Peer
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
from keepstep.runtime.links import LinkError, PeerClosed, RingEnded
from keepstep.runtime.listener import OURS, Accepted
from keepstep.runtime.movement import Movement, Running
from keepstep.runtime.native import NativeThread
from keepstep.runtime.two_threads import TwoThreads

log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class _Broken:
    """Why a ring has ended."""

    suspect: ReplicaId | None
    phase: str
    reason: str
    fatal: bool
    own_link: bool = False  # ours to or from the suspect failed; else we were told


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What rings get from the engine that makes them."""

    identity: Identity
    settings: EngineSettings
    deadline: Deadline  # for progress
    silence: Deadline  # for any byte at all
    tell: Callable[[EngineEvent], None]
    fault: Callable[[str, int], None] | None  # called for every chunk, where faults are injected


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
        self.wake = self._connecting.wake  # of the ring's own thread
        self.lock = threading.Lock()
        self.to_send: deque[Running] = deque()
        self.to_receive: deque[Running] = deque()
        self._movement: Movement | None = None
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
        self.spawn(lambda: self._connect_and_move(before), "send")

    def offer(self, accepted: Accepted) -> None:
        """The previous member has connected."""
        self._connecting.offer(accepted)

    def begin(self, seq: Seq, exchanges: int) -> None:
        with self.lock:
            self._seq, self._exchanges, self._submitted, self._done = seq, exchanges, 0, 0
            broken = self.broken
        if broken is not None:
            self._tell_failed(seq, 0, broken)

    def submit(self, seq: Seq, number: int, buffer: ExchangeBuffer) -> None:
        with self.lock:
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
                running = Running(seq, number, buffer, progress)
                self.to_send.append(running)
                self.to_receive.append(running)
        if self.size == 1:
            buffer.copy_through(0, buffer.nbytes)
            buffer.final(0, buffer.nbytes)
            buffer.done()
            self._one_done(time.monotonic())
        self._interrupt()
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
        self.wake.close()
        if self._movement is not None:
            self._movement.close()
        if self._unwanted:
            self._kept.close()
        return True

    # --- breaking ---------------------------------------------------------------------------------------------

    def _break(self, why: "_Broken", failed: Sequence[Peer] = ()) -> None:
        """Ends the ring, once. Links to `failed` are shut, the others are told by the thread that uses them."""
        with self.lock:
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
            number = self.to_receive[0].number if self.to_receive else 0
            running = seq is not None and self._done < self._exchanges
            self.to_send.clear()
            self.to_receive.clear()
        self._connecting.stop()
        for link in bad:
            link.shut()
        self._interrupt()
        if self._closed:
            return
        if running or why.fatal:
            self._tell_failed(seq or Seq(0), number, why)
        else:
            self.owner.tell(RingBroken(self.quorum_id, why.suspect, why.reason, why.own_link))

    def _links_to(self, suspect: ReplicaId | None) -> list[Peer]:
        """A thread may hang on the suspect: its links must not wait for the end of a chunk."""
        return [peer for peer in (self.previous, self.next) if peer.replica_id == suspect]

    def _shut_links(self) -> None:
        for link in (self._kept.send, self._kept.receive):
            if link is not None:
                link.shut()

    def _tell_failed(self, seq: Seq, number: int, why: "_Broken") -> None:
        who, phase = why.suspect, why.phase
        self.owner.tell(StepFailed(seq, self.quorum_id, number, who, phase, why.reason, why.fatal, why.own_link))

    def _blame(self, error: LinkError) -> None:
        """A link has failed, or its other end has ended the ring and may know why."""
        reason = f"ring {self.quorum_id}, {error.phase}: replica {error.peer.replica_id}: {error}"
        if isinstance(error, RingEnded):
            self._break(_Broken(error.suspect, error.phase, reason, fatal=False), failed=self._links_to(error.suspect))
        else:
            own = not isinstance(error, PeerClosed)
            why = _Broken(error.peer.replica_id, error.phase, reason, fatal=False, own_link=own)
            self._break(why, failed=[error.peer])

    def lost(self, error: LinkError, own: "deque[Running]", other: "deque[Running]") -> None:
        """A link is of no use any more. What runs may still complete on the other one, if it needs only that.

        A member that is through with an exchange may leave before its neighbours are. If it died instead, whoever needs it knows.
        """
        named = isinstance(error, RingEnded) and error.suspect is not None
        with self.lock:
            all_here = self._exchanges in (self._submitted, ENDLESS)
            if all_here and not named and not own and other and self._late is None and self.broken is None:
                self._late = error
                return
        self._blame(error)

    def _blame_next(self, error: Exception) -> None:
        ours = isinstance(error, OSError) and error.errno in OURS
        fatal = ours or isinstance(error, JobMismatch | Unauthorized)
        reason = f"ring {self.quorum_id}, connect: replica {self.next.replica_id}: {error}"
        self._break(_Broken(self.next.replica_id, "connect", reason, fatal=fatal, own_link=True))

    def spawn(self, work: Callable[[], None], name: str) -> None:
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
    def suspect(self) -> ReplicaId | None:
        return None if self.broken is None else self.broken.suspect

    # --- the ring's own thread --------------------------------------------------------------------------------

    def _connect_and_move(self, before: "Ring | None") -> None:
        kept = Kept() if before is None else before.leave_links(self._connecting)
        try:
            send, receive = self._connecting.links(kept)
        except Stopped:
            return
        except (OSError, KeepstepError) as error:
            self._blame_next(error)
            return
        with self.lock:
            self._kept = Kept(send, receive)
        fits = self.settings.native and NativeThread.fits(send, receive)
        self._movement = (NativeThread if fits else TwoThreads)(self, send, receive)
        if self.broken is None:
            self.owner.tell(RingReady(self.quorum_id, (send is kept.send) + (receive is kept.receive)))
        self._movement.run()

    def _interrupt(self) -> None:
        self.wake.set()
        if self._movement is not None:
            self._movement.interrupt()

    # --- what the movement tells ------------------------------------------------------------------------------

    def head(self, queue: "deque[Running]") -> Running | None:
        with self.lock:
            return queue[0] if queue else None

    def side_done(self, queue: "deque[Running]", running: Running) -> None:
        """Everything of an exchange in this queue has been sent, or received."""
        with self.lock:
            if self.broken is None:
                queue.remove(running)
            running.sides_done += 1
            done = running.sides_done == 2 and self.broken is None
        if done:
            running.buffer.done()
            self._one_done(running.submitted)

    def _one_done(self, submitted: float) -> None:
        with self.lock:
            self._done += 1
            seq = self._seq if self._done == self._exchanges else None
            endless, since = self._exchanges == ENDLESS, self._first_submit
            late = None if self.to_send or self.to_receive else self._late
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
