"""Chunks moved by two threads in Python: the one that needs nothing built, and the oracle of `native`.

The *sender* forwards what is complete as fast as credits allow; the *receiver* adds each chunk to ours as it comes. Where sending
never waits (shared memory), the receiver itself sends on what it has just completed, partial sums without touching the output;
`turn` says whose turn it is.
"""

import threading
import time
from typing import TYPE_CHECKING

from keepstep.protocol.ring import Receive
from keepstep.runtime.links import NO_CHECKSUM, LinkError, ReceiveLink, SendLink, Wake
from keepstep.runtime.movement import Running
from keepstep.runtime.shared_memory import SharedSendLink

if TYPE_CHECKING:
    from keepstep.runtime.ring import Ring


class TwoThreads:
    """`movement.Movement`: `run` sends, a second thread receives."""

    def __init__(self, ring: "Ring", send: SendLink, receive: ReceiveLink) -> None:
        self._ring, self._out, self._in = ring, send, receive
        self.turn = threading.Lock()  # who holds it may send
        self._sender_waits = False
        self._hungry = False  # a chunk could be sent if there was a credit
        self._awaits_credits = False  # and the sender waits for it
        self._wake = Wake()  # of the receiver
        send.attach(ring.wake)
        receive.attach(self._wake)

    def run(self) -> None:
        self._ring.spawn(self._receive, "receive")
        self._send()

    def interrupt(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._wake.close()

    @property
    def chunks_sent(self) -> int:
        return self._out.chunks

    # --- sending ----------------------------------------------------------------------------------------------

    def _send(self) -> None:
        ring, link = self._ring, self._out
        try:
            while ring.broken is None:
                self._send_ready()
                self._sender_waits = True
                phase = self._send_ready()  # what came up before the receiver knew that we wait
                if ring.broken is None:
                    self._awaits_credits = self._hungry
                    link.wait(phase, self._hungry)
                self._sender_waits = self._awaits_credits = False
        except LinkError as error:
            ring.lost(error, ring.to_send, ring.to_receive)
        with self.turn:
            link.end_ring(ring.suspect)

    def _send_ready(self) -> str:
        """Sends whatever is complete and has a credit; returns the phase."""
        with self.turn:
            return self._send_all()

    def _send_all(self) -> str:
        ring, phase, self._hungry = self._ring, "idle", False
        while ring.broken is None and (running := ring.head(ring.to_send)) is not None:
            phase = self._send_some(running)
            if not running.progress.sent_all:
                break
            ring.side_done(ring.to_send, running)
        return phase

    def _send_some(self, running: Running) -> str:
        progress, buffer, link, phase = running.progress, running.buffer, self._out, "reduce-scatter"
        while not progress.sent_all and self._ring.broken is None:
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

    def _receive(self) -> None:
        ring, link = self._ring, self._in
        try:
            while ring.broken is None:
                running = ring.head(ring.to_receive)
                if running is None:
                    link.wait_for_work()
                elif self._receive_all(running):
                    ring.side_done(ring.to_receive, running)
        except LinkError as error:
            ring.lost(error, ring.to_receive, ring.to_send)
        link.end_ring(ring.suspect)

    def _receive_all(self, running: Running) -> bool:
        """Every chunk of the exchange; False: the ring was broken meanwhile."""
        progress, link, since = running.progress, self._in, time.monotonic()
        link.expect_life_within(self._ring.owner.silence.seconds)
        progress.window = min(progress.window, link.window)
        while not progress.received_all and self._ring.broken is None:
            expected = progress.next_receive()
            phase = "reduce-scatter" if expected.reduce else "all-gather"
            link.grant(progress.grant(), phase)
            length = expected.hi - expected.lo
            checksum = link.header(running.seq, running.number, progress.received, length, phase)
            if checksum is None:
                self._check_progress(since, phase)
                continue
            if self._ring.owner.fault is not None:
                self._ring.owner.fault("chunk", running.number)
            self._take(running, expected, checksum)
            since = time.monotonic()
        return progress.received_all

    def _take(self, running: Running, chunk: Receive, checksum: int) -> None:
        """One chunk: adds it up or puts it in its place, and sees to it that it goes on."""
        progress, buffer, phase = running.progress, running.buffer, "reduce-scatter" if chunk.reduce else "all-gather"
        if chunk.reduce:
            data = self._in.payload(chunk.hi - chunk.lo, checksum, phase)
            if self._out.inline and not chunk.final and self._reduce_onwards(running, chunk, data):
                return
            buffer.reduce(chunk.lo, chunk.hi, data)
        else:
            self._in.payload_into(buffer.output(chunk.lo, chunk.hi), checksum, phase)
            if checksum != NO_CHECKSUM:
                running.checksums[progress.received] = checksum  # it goes on unchanged
        progress.on_received()
        if self._out.inline and self.turn.acquire(blocking=False):
            try:
                self._send_all()
                if self._hungry and not self._awaits_credits:
                    self._ring.wake.set()  # the sender shall wait for credits, we wait for chunks
            finally:
                self.turn.release()
        elif self._out.inline or self._sender_waits:
            self._ring.wake.set()
        if chunk.final:
            buffer.final(chunk.lo, chunk.hi)

    def _reduce_onwards(self, running: Running, chunk: Receive, data: memoryview) -> bool:
        """Adds a partial sum straight into the next link's slot, if that is the next thing to send and has a credit."""
        out, ring = self._out, self._ring
        if not isinstance(out, SharedSendLink) or not self.turn.acquire(blocking=False):
            return False
        try:
            if ring.head(ring.to_send) is not running or not running.progress.next_forwards_this:
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
            self.turn.release()

    def _check_progress(self, since: float, phase: str) -> None:
        limit = self._ring.owner.deadline.seconds
        if time.monotonic() - since > limit:
            raise LinkError(f"it is alive, but has sent nothing for {limit:.1f} s", phase, self._ring.previous)
