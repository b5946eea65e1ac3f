"""Fetches this rank's part of a state from the same rank of other replicas; see `runtime.state_http` for the conversation.

One thread a request under way, reading straight from the socket into a staging buffer that stays warm: a recovering replica
shares its CPU with training (its zeros must flow), so the fetch should cost little more than the kernel's copy. Each verified
range is copied once, into its place.

    fetch ──> manifest from whoever answers first ──> ranges from everybody (protocol.transfer) ──> on_done
                                                      ──> every source is told that it need not keep the state for us

`on_done` and `fault` are called from the fetch's threads. Cancelling shuts the connections, so that no thread waits for a peer.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from keepstep.protocol.errors import TransferError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.messages import Reader, StateName
from keepstep.protocol.transfer import Range, Transfer
from keepstep.runtime.memory import big_buffer
from keepstep.runtime.state_connection import Connection, Damaged, Refused, Source
from keepstep.runtime.state_http import MAX_TOTAL, STOP_S, Signer

log = logging.getLogger("keepstep")

MAX_MANIFEST = 256 << 20
RANGE_BYTES, SMALL_RANGE = 4 << 20, 128 << 10
PER_SOURCE = 2  # requests under way to one source, so that it can read while the other travels
LOOK_S = 1.0
TOLD_S = 2.0  # sources are told for so long that we are done; whoever does not hear it makes a copy that nobody reads


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedState:
    """A verified copy of one rank's part of a state."""

    state: StateName
    manifest: bytes
    data: memoryview
    bytes_from: Mapping[ReplicaId, int]


class _Cancelled(Exception):
    """Nobody wants the state any more."""


class FetchHandle:
    """A fetch under way: the state that is shared by its threads."""

    def __init__(
        self,
        state: StateName,
        sources: Sequence[Source],
        signer: Signer,
        reader: Reader | None,
        throttle: float | None,
    ) -> None:
        self.state, self.sources, self.reader, self.throttle = state, sources, reader, throttle
        self._signer = signer
        self.changed = threading.Condition()
        self._gone = threading.Event()
        self._over = False  # there is nothing left to fetch
        self._connections: list[Connection] = []
        self.threads: list[threading.Thread] = []
        self.to_tell: set[ReplicaId] = set()  # sources that are still to hear that we are done
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
        if self.cancelled or self._over:
            raise _Cancelled

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """The coordinator's wait; what other threads do changes the condition. Raises what ended the fetch, if something did."""
        with self.changed:
            while not self.changed.wait_for(lambda: condition() or self.cancelled or self.error is not None, LOOK_S):
                for connection in self._connections:
                    connection.give_up_if_late()
        self.check()
        if self.error is not None:
            raise self.error

    def await_told(self) -> None:
        """Until every source that is still asked has heard that we are done; not for long."""
        with self.changed:
            self.changed.wait_for(lambda: not self.to_tell or self.cancelled, TOLD_S)

    def pause(self, seconds: float) -> None:
        """Sleeps, unless cancelled."""
        self._gone.wait(seconds)
        self.check()

    def connect(self, source: Source) -> Connection:
        connection = Connection(source, self._signer, self.check)
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
            self._over = True  # whoever is just connecting has no socket yet that could be shut
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
        reader: Reader | None = None,
        throttle_bytes_per_s: float | None = None,
    ) -> FetchHandle:
        """Starts fetching `state`; `on_done` gets the verified bytes or why they cannot be had. `reader`: who we are for the
        sources, who are told when it is complete."""
        handle = FetchHandle(state, sources, self._signer, reader, throttle_bytes_per_s)
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
        try:
            result = self._result(handle)
            if result is not None and not handle.cancelled:
                on_done(result)
            if isinstance(result, FetchedState):
                handle.await_told()
        finally:
            handle.close_connections()
            with self._lock:
                self._running.pop(handle, None)

    def _result(self, handle: FetchHandle) -> FetchedState | TransferError | None:
        """None: nobody wants it any more."""
        try:
            return self._fetch(handle)
        except _Cancelled:
            return None
        except TransferError as error:
            return error
        except Exception as error:
            log.exception("fetching state %d failed", handle.state.step)
            return TransferError(f"state {handle.state.step} cannot be had: {type(error).__name__}: {error}")

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
        handle.to_tell = {source[0] for source in handle.sources} if handle.reader is not None else set()
        for source in handle.sources:
            for _ in range(PER_SOURCE):
                handle.spawn(lambda source=source: stripes.work(source))  # type: ignore[misc]
        handle.wait_for(lambda: transfer.complete or transfer.exhausted)
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
            except Refused as error:
                reasons.append(f"replica {source[0]}: {error}")

        for source in handle.sources:
            handle.spawn(lambda source=source: ask(source))  # type: ignore[misc]
        handle.wait_for(lambda: bool(found) or len(reasons) == len(handle.sources))
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
        self._state = f"/state/{handle.state.step}/{handle.state.lineage}"
        self._path = f"{self._state}/bytes"
        self._started, self._taken = time.monotonic(), 0
        self._told: set[ReplicaId] = set()

    def work(self, source: Source) -> None:
        """One thread: ranges of one source, until there are none."""
        connection, stage, replica = self._handle.connect(source), memoryview(bytearray(self._size)), source[0]
        while (part := self._next(replica)) is not None:
            try:
                self._take(connection, replica, part, stage[: part[1] - part[0]])
            except Damaged as error:
                log.warning("a range of state %d came damaged from replica %d", self._handle.state.step, replica)
                with self._handle.changed:
                    self._transfer.damaged(replica, part, str(error))
                    self._handle.changed.notify_all()
            except Refused as error:
                log.info("fetching state %d goes on without replica %d: %s", self._handle.state.step, replica, error)
                with self._handle.changed:
                    self._transfer.failed(replica, str(error))
                    self._handle.changed.notify_all()
        self._tell(connection, replica)

    def _tell(self, connection: Connection, replica: ReplicaId) -> None:
        """The first thread of a source that has nothing left to do lets it go."""
        handle, reader = self._handle, self._handle.reader
        with handle.changed:
            if reader is None or replica not in handle.to_tell:
                return
            if not self._transfer.complete:  # it failed
                handle.to_tell.discard(replica)
                return
            if replica in self._told:
                return
            self._told.add(replica)
        try:
            connection.get(f"{self._state}/done?life={reader.incarnation}&since={reader.since}", None, 0)
        except Refused as error:
            log.debug("replica %d did not hear that state %d is fetched: %s", replica, handle.state.step, error)
        finally:
            with handle.changed:
                handle.to_tell.discard(replica)
                handle.changed.notify_all()

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

    def _take(self, connection: Connection, replica: ReplicaId, part: Range, stage: memoryview) -> None:
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
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TransferError("the manifest of the state is not what it should be") from None
    if not isinstance(total, int) or isinstance(total, bool) or not 0 <= total <= MAX_TOTAL:
        raise TransferError(f"the manifest announces {total} bytes, at most {MAX_TOTAL} can be right")
    return total
