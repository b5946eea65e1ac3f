"""Fetches this rank's part of a state from the same rank of other replicas; see `runtime.state_http` for the conversation.

One thread a request under way, reading straight from the socket into a staging buffer that stays warm: a recovering replica
shares its CPU with training (its zeros must flow), so the fetch should cost little more than the kernel's copy. Each verified
range is copied once, into its place.

    fetch ──> manifest from whoever answers first ──> ranges from everybody (protocol.transfer) ──> on_done

`on_done` and `fault` are called from the fetch's threads. Cancelling shuts the connections, so that no thread waits for a peer.
"""

import contextlib
import hmac
import http.client
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from keepstep.protocol.errors import TransferError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.messages import StateName
from keepstep.protocol.transfer import Range, Transfer
from keepstep.runtime.memory import big_buffer
from keepstep.runtime.state_http import AUTH, CHECKSUM, PROOF, STOP_S, Signer

log = logging.getLogger("keepstep")

MAX_MANIFEST = 256 << 20
MAX_TOTAL = 1 << 40
RANGE_BYTES, SMALL_RANGE = 4 << 20, 128 << 10
PER_SOURCE = 2  # requests under way to one source, so that it can read while the other travels
SILENT_S = 6.0  # a source answers within two seconds, if only to say "not yet"
NOT_YET_S = 120.0  # a source may take so long to reach the state that it was named for

Source = tuple[ReplicaId, str, int]
"""A replica, and the host and port where the same rank of it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedState:
    """A verified copy of one rank's part of a state."""

    state: StateName
    manifest: bytes
    data: memoryview
    bytes_from: Mapping[ReplicaId, int]


class _Refused(Exception):
    """A source did not give what was asked for, in words that do not name it."""


class _Damaged(_Refused):
    """What it gave failed its checksum."""


class _Cancelled(Exception):
    """Nobody wants the state any more."""


class _Connection:
    """One thread's connection to one source."""

    def __init__(self, source: Source, signer: Signer, fetch: "FetchHandle") -> None:
        _, host, port = source
        self._signer, self._fetch = signer, fetch
        self._http = http.client.HTTPConnection(host, port, timeout=SILENT_S)

    def get(self, path: str, target: memoryview | None, limit: int) -> bytes | memoryview:
        """One verified answer: in `target`, or in bytes of its own if that is None. Raises _Refused."""
        deadline = time.monotonic() + NOT_YET_S
        while time.monotonic() < deadline:
            self._fetch.check()
            try:
                body = self._ask(path, target, limit)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._fetch.check()  # we may have shut the connection ourselves
                raise _Refused(str(error) or type(error).__name__) from None
            if body is not None:
                return body
        raise _Refused(f"it did not reach the state in {NOT_YET_S:.0f} s")

    def _ask(self, path: str, target: memoryview | None, limit: int) -> bytes | memoryview | None:
        """None: not yet."""
        nonce = secrets.token_hex(16)
        if self._http.sock is None:
            self._http.connect()
            self._fetch.check()  # cancelled while there was no socket yet that could be shut
        self._http.request("GET", path, headers={AUTH: f"{nonce}:{self._signer.request(path, nonce)}"})
        response = self._http.getresponse()
        if response.status != 200:
            text = response.read(200).decode(errors="replace")
            response.read()
            if response.status == 503:
                return None
            raise _Refused(f"it answered {response.status}: {text}")
        length = response.length
        if length is None or length > limit or (target is not None and length != len(target)):
            raise _Refused(f"it sent {length} bytes instead of {limit}")
        body = response.read() if target is None else _read_into(response, target)
        checksum = response.headers.get(CHECKSUM, "")
        proof = response.headers.get(PROOF, "")
        if not hmac.compare_digest(proof.encode(), self._signer.answer(nonce, checksum).encode()):
            raise _Refused("it does not hold the job token")
        if xxhash.xxh3_64_hexdigest(body) != checksum:
            raise _Damaged("its bytes failed their checksum")
        return body

    def shut(self) -> None:
        """Wakes whoever reads from it. Any thread."""
        sock = self._http.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it is gone already
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._http.close()


def _read_into(response: http.client.HTTPResponse, target: memoryview) -> memoryview:
    at = 0
    while at < len(target):
        got = response.readinto(target[at:])
        if not got:
            raise http.client.IncompleteRead(b"", len(target) - at)
        at += got
    return target


class FetchHandle:
    """A fetch under way: the state that is shared by its threads."""

    def __init__(self, state: StateName, sources: Sequence[Source], signer: Signer, throttle: float | None) -> None:
        self.state, self.sources, self.throttle = state, sources, throttle
        self._signer = signer
        self.changed = threading.Condition()
        self._gone = threading.Event()
        self._connections: list[_Connection] = []
        self.threads: list[threading.Thread] = []
        self.error: Exception | None = None

    @property
    def cancelled(self) -> bool:
        return self._gone.is_set()

    def cancel(self) -> None:
        """It ends soon, and `on_done` isn't called any more (unless it is being called right now). Any thread."""
        self._gone.set()
        with self.changed:
            for connection in self._connections:
                connection.shut()
            self.changed.notify_all()

    def check(self) -> None:
        if self.cancelled:
            raise _Cancelled

    def pause(self, seconds: float) -> None:
        """Sleeps, unless cancelled."""
        self._gone.wait(seconds)
        self.check()

    def connect(self, source: Source) -> _Connection:
        connection = _Connection(source, self._signer, self)
        with self.changed:
            self._connections.append(connection)
        return connection

    def spawn(self, work: Callable[[], None]) -> None:
        """A thread of this fetch; what it raises ends the fetch."""

        def guarded() -> None:
            try:
                work()
            except _Cancelled:
                pass
            except Exception as error:  # noqa: BLE001  (top of a thread: the coordinator reports it)
                self.error = error
            finally:
                with self.changed:
                    self.changed.notify_all()

        thread = threading.Thread(target=guarded, name="keepstep-fetch", daemon=True)
        self.threads.append(thread)
        thread.start()

    def close_connections(self) -> None:
        with self.changed:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.shut()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(STOP_S)
        for connection in connections:
            connection.close()


class StateFetcher:
    """Fetches states for one rank."""

    def __init__(self, *, part: str, token: bytes, fault: Callable[[str], None] = lambda what: None) -> None:
        self._signer, self._fault = Signer(part, token), fault
        self._lock = threading.Lock()
        self._running: dict[FetchHandle, threading.Thread] = {}

    def fetch(
        self,
        state: StateName,
        sources: Sequence[Source],
        on_done: Callable[[FetchedState | TransferError], None],
        *,
        throttle_bytes_per_s: float | None = None,
    ) -> FetchHandle:
        """Starts fetching `state`; `on_done` gets the verified bytes or why they cannot be had."""
        handle = FetchHandle(state, sources, self._signer, throttle_bytes_per_s)
        thread = threading.Thread(target=self._run, args=(handle, on_done), name="keepstep-fetch", daemon=True)
        with self._lock:
            self._running[handle] = thread
        thread.start()
        return handle

    def close(self) -> None:
        """Ends every fetch; bounded in time."""
        with self._lock:
            running = dict(self._running)
        for handle, thread in running.items():
            handle.cancel()
            thread.join(STOP_S)

    def _run(self, handle: FetchHandle, on_done: Callable[[FetchedState | TransferError], None]) -> None:
        result: FetchedState | TransferError
        try:
            result = self._fetch(handle)
        except _Cancelled:
            return
        except TransferError as error:
            result = error
        except Exception as error:
            log.exception("fetching state %d failed", handle.state.step)
            result = TransferError(f"state {handle.state.step} cannot be had: {type(error).__name__}: {error}")
        finally:
            handle.close_connections()
            with self._lock:
                self._running.pop(handle, None)
        if not handle.cancelled:
            on_done(result)

    def _fetch(self, handle: FetchHandle) -> FetchedState:
        if not handle.sources:
            raise TransferError(f"no replica holds state {handle.state.step} any more")
        manifest = self._any_manifest(handle)
        total = _total_of(manifest)
        try:
            data = big_buffer(total)
        except (MemoryError, OSError):
            raise TransferError(f"there is no memory for the {total} bytes of state {handle.state.step}") from None
        size = range_size(total, len(handle.sources), handle.throttle)
        transfer = Transfer(total, [s[0] for s in handle.sources], range_bytes=size)
        stripes = _Stripes(handle, transfer, data, size, self._fault)
        for source in handle.sources:
            for _ in range(PER_SOURCE):
                handle.spawn(lambda source=source: stripes.work(source))  # type: ignore[misc]
        with handle.changed:
            handle.changed.wait_for(
                lambda: transfer.complete or transfer.exhausted or handle.cancelled or handle.error is not None
            )
        handle.check()
        if handle.error is not None:
            raise handle.error
        if not transfer.complete:
            raise TransferError(f"state {handle.state.step} cannot be had: {transfer.why}")
        return FetchedState(state=handle.state, manifest=manifest, data=data, bytes_from=transfer.bytes_from)

    def _any_manifest(self, handle: FetchHandle) -> bytes:
        """Asks everybody; the first answer is as good as any other."""
        found: list[bytes] = []
        reasons: list[str] = []
        path = f"/state/{handle.state.step}/{handle.state.lineage}/manifest"

        def ask(source: Source) -> None:
            try:
                found.append(bytes(handle.connect(source).get(path, None, MAX_MANIFEST)))
            except _Refused as error:
                reasons.append(f"replica {source[0]}: {error}")

        for source in handle.sources:
            handle.spawn(lambda source=source: ask(source))  # type: ignore[misc]
        with handle.changed:
            handle.changed.wait_for(
                lambda: (
                    bool(found) or len(reasons) == len(handle.sources) or handle.cancelled or handle.error is not None
                )
            )
        handle.check()
        if handle.error is not None:
            raise handle.error
        if not found:
            raise TransferError(f"state {handle.state.step} cannot be had: {'; '.join(reasons)}")
        return found[0]


class _Stripes:
    """The ranges of one fetch: a few threads a source, one plan."""

    def __init__(
        self, handle: FetchHandle, transfer: Transfer, data: memoryview, size: int, fault: Callable[[str], None]
    ) -> None:
        self._handle, self._transfer, self._data, self._size = handle, transfer, data, size
        self._fault = fault
        self._path = f"/state/{handle.state.step}/{handle.state.lineage}/bytes"
        self._started, self._taken = time.monotonic(), 0

    def work(self, source: Source) -> None:
        """One thread: ranges of one source, until there are none."""
        connection, stage, replica = self._handle.connect(source), memoryview(bytearray(self._size)), source[0]
        while (part := self._next(replica)) is not None:
            try:
                self._take(connection, replica, part, stage[: part[1] - part[0]])
            except _Damaged as error:
                log.warning("a range of state %d came damaged from replica %d", self._handle.state.step, replica)
                with self._handle.changed:
                    self._transfer.damaged(replica, part, str(error))
                    self._handle.changed.notify_all()
            except _Refused as error:
                log.info("fetching state %d goes on without replica %d: %s", self._handle.state.step, replica, error)
                with self._handle.changed:
                    self._transfer.failed(replica, str(error))
                    self._handle.changed.notify_all()

    def _next(self, replica: ReplicaId) -> Range | None:
        transfer, changed = self._transfer, self._handle.changed
        if self._handle.throttle is not None:  # before a range is chosen, or others would take it for slow
            self._handle.pause(max(0.0, self._started + self._taken / self._handle.throttle - time.monotonic()))
        with changed:
            while not transfer.complete and replica not in transfer.reasons:
                self._handle.check()
                part = transfer.next_range(replica)
                if part is not None:
                    self._taken += part[1] - part[0]
                    return part
                changed.wait()
        return None

    def _take(self, connection: _Connection, replica: ReplicaId, part: Range, stage: memoryview) -> None:
        lo, hi = part
        connection.get(f"{self._path}?lo={lo}&hi={hi}", stage, hi - lo)
        self._fault("range")
        with self._handle.changed:
            if self._transfer.done(replica, part):
                self._data[lo:hi] = stage
            self._handle.changed.notify_all()


def range_size(total: int, sources: int, throttle: float | None) -> int:
    """Bytes to ask for at once: small enough that what is asked for twice at the end is little of the whole."""
    size = min(RANGE_BYTES, max(SMALL_RANGE, total // (8 * sources)))
    return size if throttle is None else max(1024, min(size, int(throttle / 8)))


def _total_of(manifest: bytes) -> int:
    try:
        total = json.loads(manifest)["total"]
    except (ValueError, KeyError, TypeError):
        raise TransferError("the manifest of the state is not what it should be") from None
    if not isinstance(total, int) or not 0 <= total <= MAX_TOTAL:
        raise TransferError(f"the manifest announces {total} bytes, at most {MAX_TOTAL} can be right")
    return total
