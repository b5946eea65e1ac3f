"""Chunks moved by one thread in C (`pump.c`): no interpreter lock, so a busy main thread does not slow exchanges down.

    pump_run(state) ──> an event: nothing happened for a while, an exchange is complete, something that is not a chunk came ...

C moves expected chunks, credits and heartbeats; everything else is decided here. Sums that are not plain additions (or that are
converted) call back into Python. The library is built when keepstep is installed and a C compiler is there; where it is
missing, or links have several streams, `two_threads` does the same.
"""

import ctypes
import functools
import importlib
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from keepstep.ports import Addition
from keepstep.runtime.links import HEADER, LinkError, ReceiveLink, SendLink
from keepstep.runtime.movement import Running
from keepstep.runtime.shared_memory import SLOTS

if TYPE_CHECKING:
    from keepstep.runtime.ring import Ring

log = logging.getLogger("keepstep")

LIBRARY = Path(__file__).with_name("_pump.so")
(
    TICK,
    WOKEN,
    SENT_ALL,
    RECEIVED_ALL,
    STRANGE_HEADER,
    BACKWARDS,
    IN_FAILED,
    OUT_FAILED,
    CALLBACK_FAILED,
    BAD_CHECKSUM,
    STOPPED,
) = range(11)
PREPARE, REDUCE, FINAL, CHUNK = range(4)
KINDS = {  # what travels, and the dtype of our own part
    ("float32", "float32"): 1, ("float64", "float64"): 2, ("int8", "int8"): 3, ("uint8", "uint8"): 3, ("int16", "int16"): 4,
    ("int32", "int32"): 5, ("int64", "int64"): 6, ("float32", "bfloat16"): 7, ("float32", "float16"): 8,
}  # fmt: skip
BY_PYTHON = 0
SENDS = np.dtype([("lo", np.int64), ("hi", np.int64), ("after", np.int64)])
RECEIVES = np.dtype([("lo", np.int64), ("hi", np.int64), ("reduce", np.int32), ("final", np.int32)])
_Callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def _fields(text: str) -> list[tuple[str, Any]]:
    """C declarations as ctypes fields: `int32: a b; pointer: c`."""
    types: dict[str, Any] = {
        "int32": ctypes.c_int32, "int64": ctypes.c_int64, "uint64": ctypes.c_uint64, "uint32": ctypes.c_uint32,
        "pointer": ctypes.c_void_p, "callback": _Callback, "header": ctypes.c_char * HEADER.size, "bytes": ctypes.c_char * 256,
    }  # fmt: skip
    groups = [part.strip().split(": ") for part in text.split(";")]
    return [(name, types[kind]) for kind, names in groups for name in names.split()]


class _Exchange(ctypes.Structure):
    _fields_ = _fields(
        "pointer: input output sends receives checksums next_send next_receive;"
        "int64: n_sends n_receives sent received granted window; uint64: seq; uint32: number; int32: kind prepare tell_final"
    )


class _Pump(ctypes.Structure):
    _fields_ = _fields(
        "int32: fd_in fd_out wake attention stopping checked raw_back tell_chunks heartbeat error;"
        "int64: patience_ms heard_ms taken_ms; uint64: quorum; pointer: to_send to_receive; int64: credits owed;"
        "pointer: in_slots out_slots; int64: slot_bytes slots; uint64: chunks_in chunks_out bytes_out; pointer: stage hash;"
        "callback: python; pointer: prepared; header: in_header out_header; int64: in_header_at body_at out_header_at;"
        "int64: body_out_at body_out_bytes; pointer: body_out; int32: sends_chunk back_bytes; bytes: back"
    )


@functools.cache
def library() -> Any:
    """The library, or None where chunks are moved in Python; says why, once."""
    try:
        found = ctypes.CDLL(str(LIBRARY))
        found.pump_sizes.restype = ctypes.c_int64
        sizes = [found.pump_sizes(which) for which in range(3)]
    except (OSError, AttributeError) as error:
        log.info("chunks are moved in Python, since the part in C was not built when keepstep was installed: %s", error)
        return None
    if sizes != [ctypes.sizeof(_Pump), ctypes.sizeof(_Exchange), HEADER.size]:
        log.warning(
            "%s was built from another version of keepstep: install it again; chunks are moved in Python", LIBRARY
        )
        return None
    return found


@functools.cache
def _hash() -> int | None:
    """The address of xxhash's 64-bit hash, which its Python module has inside; None if this one has not."""
    probe = b"keepstep"
    try:
        function = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__).XXH3_64bits
        function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
        same = function(probe, len(probe)) == xxhash.xxh3_64_intdigest(probe)
    except (ImportError, OSError, AttributeError) as error:
        log.info("chunks are moved in Python: this xxhash cannot be called from C: %s", error)
        return None
    return ctypes.cast(function, ctypes.c_void_p).value if same else None


class _Job:
    """One exchange as C sees it, and what must stay alive for it."""

    def __init__(self, running: Running, adds: Any, window: int) -> None:
        self.running, buffer, progress = running, running.buffer, running.progress
        addition = buffer.addition or Addition(
            travels="", own="", input=0, output=_address(buffer.output(0, buffer.nbytes))
        )
        kind = KINDS.get((addition.travels, addition.own), BY_PYTHON)
        if not adds(kind):
            kind = BY_PYTHON
        self.sends = np.array([(s.lo, s.hi, -1 if s.after is None else s.after) for s in progress.sends], SENDS)
        self.receives = np.array([(r.lo, r.hi, r.reduce, r.final) for r in progress.receives], RECEIVES)
        self.checksums = np.zeros(len(self.receives), np.uint64)
        ours = kind == BY_PYTHON or addition.own != addition.travels
        self.c = _Exchange(
            input=addition.input, output=addition.output, sends=self.sends.ctypes.data, receives=self.receives.ctypes.data,
            checksums=self.checksums.ctypes.data, n_sends=len(self.sends), n_receives=len(self.receives), window=window,
            seq=running.seq, number=running.number, kind=kind, prepare=ours, tell_final=ours,
        )  # fmt: skip
        self.address = ctypes.addressof(self.c)

    def phase(self, receiving: bool) -> str:
        """Of what is received next, or sent next."""
        if receiving:
            at = self.c.received
        else:
            at = int(self.sends[min(self.c.sent, len(self.sends) - 1)]["after"])
        reduce = at < 0 or bool(self.receives[min(at, len(self.receives) - 1)]["reduce"])
        return "reduce-scatter" if reduce else "all-gather"


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class NativeThread:
    """`movement.Movement` in one thread, most of it in C."""

    @staticmethod
    def fits(send: SendLink, receive: ReceiveLink) -> bool:
        """Whether these links can be used by C."""
        one_stream = len(send.socks) == len(receive.socks) == 1
        return one_stream and library() is not None and _hash() is not None

    def __init__(self, ring: "Ring", send: SendLink, receive: ReceiveLink) -> None:
        self._ring, self._out, self._in = ring, send, receive
        self._settings = ring.settings
        self._sending: deque[_Job] = deque()
        self._receiving: deque[_Job] = deque()
        self._error: Exception | None = None  # of a callback
        self._prepared: memoryview | None = None
        self._bytes_out = 0
        self._event = TICK
        self._began = 0.0  # the exchange that is being received
        self._silent_s = 0.0
        self._callback = _Callback(self._python)
        self._segments = [getattr(link, "segment", None) for link in (receive, send)]  # stay mapped as long as we run
        self._stage = np.empty(ring.settings.chunk_bytes, np.uint8)
        slots = [None if s is None else _address(s.view) for s in self._segments]
        self._pump = _Pump(
            fd_in=receive.fileno(), fd_out=send.fileno(), wake=ring.wake.fileno(), checked=send.checked,
            tell_chunks=ring.owner.fault is not None, quorum=ring.quorum_id, credits=send.credits, in_slots=slots[0],
            out_slots=slots[1], slot_bytes=ring.settings.chunk_bytes, slots=SLOTS, stage=self._stage.ctypes.data, hash=_hash(),
            python=self._callback, body_at=-1, out_header_at=-1,
        )  # fmt: skip

    def interrupt(self) -> None:
        self._pump.attention = 1

    def close(self) -> None:
        self._segments.clear()

    @property
    def chunks_sent(self) -> int:
        return int(self._pump.chunks_out)

    # --- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        ring = self._ring
        while ring.broken is None:
            try:
                self._take_new()
                self._step()
            except LinkError as error:
                self._forget_failed()
                if self._event in (OUT_FAILED, BACKWARDS):
                    ring.lost(error, ring.to_send, ring.to_receive)
                    side = "fd_out"
                else:
                    ring.lost(error, ring.to_receive, ring.to_send)
                    side = "fd_in"
                if ring.broken is None:  # the other side is enough for what still runs
                    setattr(self._pump, side, -1)
        self._stop()
        self._in.end_ring(ring.suspect)  # first: the next member may be slow to take what it is told
        self._out.end_ring(ring.suspect)

    def _take_new(self) -> None:
        """Gives C what was submitted since."""
        with self._ring.lock:
            fresh = [running for running in self._ring.to_receive if not running.taken]
        for running in fresh:
            running.taken = True
            if not running.progress.sends:  # nothing in it
                for side in (self._ring.to_send, self._ring.to_receive):
                    self._ring.side_done(side, running)
                continue
            window = min(running.progress.window, self._in.window)
            job = _Job(running, library().pump_adds, window)
            if not self._receiving:
                self._begin_receiving()
            for queue, link in ((self._sending, "send"), (self._receiving, "receive")):
                if queue:
                    setattr(queue[-1].c, f"next_{link}", job.address)
                else:
                    setattr(self._pump, f"to_{link}", job.address)
                queue.append(job)

    def _begin_receiving(self) -> None:
        self._began = time.monotonic()
        self._silent_s = self._ring.owner.silence.seconds

    def _step(self) -> None:
        """One call of C, and what it came back for."""
        pump, ring = self._pump, self._ring
        beat = min(self._settings.link.silent_floor_s, self._settings.link.silent_s) / 4
        pump.patience_ms = int(1000 * (min(beat, self._silent_s / 8) if self._receiving else beat))
        self._event = event = library().pump_run(ctypes.byref(pump))
        if event == WOKEN:
            pump.attention = 0
            ring.wake.clear()
        elif event == TICK:
            self._tick()
        elif event == SENT_ALL:
            self._prepared = None
            ring.side_done(ring.to_send, self._sending.popleft().running)
        elif event == RECEIVED_ALL:
            ring.side_done(ring.to_receive, self._receiving.popleft().running)
            self._begin_receiving()
        elif event == BACKWARDS:
            got, pump.back_bytes = ctypes.string_at(ctypes.addressof(pump) + _Pump.back.offset, pump.back_bytes), 0
            self._out.understand(got, self._phase(receiving=False))
            pump.credits += self._out.credits
            self._out.credits = 0
            pump.raw_back = self._out.expects_more
        elif event == CALLBACK_FAILED:
            assert self._error is not None
            raise self._error
        elif event != STOPPED:
            raise self._failure(event)

    def _failure(self, event: int) -> LinkError:
        pump, receiving = self._pump, event != OUT_FAILED
        phase, link = self._phase(receiving), self._in if receiving else self._out
        if event == BAD_CHECKSUM:
            return link.error("a chunk from it failed its checksum", phase)
        if event == STRANGE_HEADER:
            pump.in_header_at = 0
            header = HEADER.unpack(ctypes.string_at(ctypes.addressof(pump) + _Pump.in_header.offset, HEADER.size))
            return self._in.unexpected(header, self._expected(), phase)
        if pump.error:
            return link.error(OSError(pump.error, os.strerror(pump.error)), phase)
        return link.closed(phase)

    def _expected(self) -> tuple[int, int, int, int] | None:
        if not self._receiving:
            return None
        job = self._receiving[0]
        chunk = job.running.progress.receives[job.c.received]
        return job.running.seq, job.running.number, job.c.received, chunk.hi - chunk.lo

    def _phase(self, receiving: bool) -> str:
        queue = self._receiving if receiving else self._sending
        return queue[0].phase(receiving) if queue else "idle"

    def _tick(self) -> None:
        """Nothing has happened for a while: shows life, and looks for it."""
        pump = self._pump
        if pump.fd_out >= 0 and pump.bytes_out == self._bytes_out and pump.out_header_at < 0:
            pump.heartbeat = 1
        self._bytes_out = pump.bytes_out
        if not self._receiving or pump.fd_in < 0:
            return
        now, limit = time.monotonic(), self._ring.owner.deadline.seconds
        if now - max(self._began, pump.heard_ms / 1000) > self._silent_s:
            raise self._in.error(f"it has been silent for {self._silent_s:.3g} s", self._phase(receiving=True))
        if now - max(self._began, pump.taken_ms / 1000) > limit:
            raise LinkError(
                f"it is alive, but has sent nothing for {limit:.1f} s", self._phase(receiving=True), self._in.peer
            )

    def _stop(self) -> None:
        """Ends between two chunks on each link that is still good."""
        pump, limit = self._pump, time.monotonic() + self._settings.link.silent_s
        pump.stopping, pump.heartbeat = 1, 0
        while True:
            self._forget_failed()
            pump.attention = 0
            event = library().pump_run(ctypes.byref(pump))
            if event == STOPPED:
                return
            if event == WOKEN:
                self._ring.wake.clear()
            elif event == BACKWARDS:
                pump.back_bytes = 0  # it is over, whatever they say
            elif event == CALLBACK_FAILED:
                log.error("the end of a chunk could not be taken: %s", self._error)
                self._in.failed = True
            elif event in (IN_FAILED, OUT_FAILED, BAD_CHECKSUM, STRANGE_HEADER):
                self._failure(event)  # marks the link, unless the other end has only ended the ring
            if time.monotonic() > limit:
                self._in.failed, self._out.failed = True, True

    def _forget_failed(self) -> None:
        if self._in.failed:
            self._pump.fd_in = -1
        if self._out.failed:
            self._pump.fd_out = -1

    # --- called by C ------------------------------------------------------------------------------------------

    def _python(self, what: int, lo: int, hi: int, data: int | None) -> int:
        try:
            if what == PREPARE:
                self._prepared = self._sending[0].running.buffer.input(lo, hi)
                self._pump.prepared = _address(self._prepared)
            elif what == REDUCE:
                assert data is not None
                came = memoryview((ctypes.c_char * (hi - lo)).from_address(data)).cast("B")
                self._receiving[0].running.buffer.reduce(lo, hi, came)
            elif what == FINAL:
                self._receiving[0].running.buffer.final(lo, hi)
            elif self._ring.owner.fault is not None:
                self._ring.owner.fault("chunk", lo)
        except Exception as error:  # noqa: BLE001  it is raised in `_step`, behind the C code
            self._error = error
            return 1
        return 0
