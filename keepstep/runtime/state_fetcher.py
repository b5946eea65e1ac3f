"""Fetches this rank's part of a state from the same rank of other replicas; see `runtime.state_http` for the conversation."""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import xxhash

from keepstep.protocol.errors import TransferError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.messages import StateName
from keepstep.protocol.transfer import Range, Transfer
from keepstep.runtime.memory import big_buffer
from keepstep.runtime.state_http import AUTH, CHECKSUM, PROOF, STOP_S, LoopThread, Signer

log = logging.getLogger("keepstep")

MAX_MANIFEST = 256 << 20
MAX_TOTAL = 1 << 40
RANGE_BYTES = 4 << 20
PER_SOURCE = 2  # requests under way to one source, so that it can read while the other travels
SILENT_S = 6.0  # a source answers within two seconds, if only to say "not yet"
NOT_YET_S = 120.0  # a source may take so long to reach the state that it was named for
CONNECT_S = 5.0

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
    """A source did not give what was asked for, in words."""


class _NotYet(Exception):
    """The source will hold the state in a moment."""


class FetchHandle:
    """A fetch under way."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """It ends soon, and `on_done` isn't called any more (unless it is being called right now). Any thread."""
        self.cancelled = True
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()


class StateFetcher:
    """Fetches this rank's part of states from the same rank of other replicas."""

    def __init__(self, *, part: str, token: bytes, fault: Callable[[str], None] = lambda what: None) -> None:
        self._signer, self._fault = Signer(part, token), fault
        self._thread = LoopThread("keepstep-state-fetcher")
        self._tasks: set[asyncio.Task[None]] = set()

    def fetch(
        self,
        state: StateName,
        sources: Sequence[Source],
        on_done: Callable[[FetchedState | TransferError], None],
        *,
        throttle_bytes_per_s: float | None = None,
    ) -> FetchHandle:
        """Starts fetching `state`; `on_done` gets the verified bytes or why they cannot be had."""
        handle = FetchHandle(self._thread.loop)

        async def run() -> None:
            result: FetchedState | TransferError
            try:
                result = await self._fetch(state, sources, throttle_bytes_per_s)
            except TransferError as error:
                result = error
            except Exception as error:
                log.exception("fetching state %d failed", state.step)
                result = TransferError(f"state {state.step} cannot be had: {type(error).__name__}: {error}")
            if not handle.cancelled:
                on_done(result)

        def start() -> None:
            handle._task = self._thread.loop.create_task(run())
            self._tasks.add(handle._task)
            handle._task.add_done_callback(self._tasks.discard)
            if handle.cancelled:
                handle._end()

        self._thread.loop.call_soon_threadsafe(start)
        return handle

    def close(self) -> None:
        """Ends every fetch; bounded in time."""
        self._thread.call(self._close(), STOP_S)
        self._thread.end()

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, state: StateName, sources: Sequence[Source], throttle: float | None) -> FetchedState:
        if not sources:
            raise TransferError(f"no replica holds state {state.step} any more")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
            manifest = await self._any_manifest(session, state, sources)
            total = _total_of(manifest)
            try:
                data = big_buffer(total)
            except (MemoryError, OSError):
                raise TransferError(f"there is no memory for the {total} bytes of state {state.step}") from None
            size = RANGE_BYTES if throttle is None else max(1024, min(RANGE_BYTES, int(throttle / 8)))
            transfer = Transfer(total, [s[0] for s in sources], range_bytes=size)
            await _Stripes(self, session, state, transfer, data, throttle).run(sources)
        return FetchedState(state=state, manifest=manifest, data=data, bytes_from=transfer.bytes_from)

    async def _any_manifest(self, session: aiohttp.ClientSession, state: StateName, sources: Sequence[Source]) -> bytes:
        """Asks everybody; the first answer is as good as any other."""
        tasks = {asyncio.ensure_future(self.get(session, s, state, "manifest", MAX_MANIFEST)): s for s in sources}
        reasons: list[str] = []
        try:
            for finished in asyncio.as_completed(tasks):
                try:
                    return await finished
                except _Refused as error:
                    reasons.append(str(error))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise TransferError(f"state {state.step} cannot be had: {'; '.join(reasons)}")

    async def get(
        self, session: aiohttp.ClientSession, source: Source, state: StateName, what: str, limit: int
    ) -> bytes:
        """One verified answer of one source. Raises _Refused."""
        deadline = time.monotonic() + NOT_YET_S
        while True:
            try:
                return await self._get_now(session, source, state, what, limit)
            except _NotYet:
                if time.monotonic() > deadline:
                    raise _Refused(f"replica {source[0]} did not reach the state in {NOT_YET_S:.0f} s") from None

    async def _get_now(
        self, session: aiohttp.ClientSession, source: Source, state: StateName, what: str, limit: int
    ) -> bytes:
        replica, host, port = source
        path, nonce = f"/state/{state.step}/{state.lineage}/{what}", secrets.token_hex(16)
        address = f"[{host}]" if ":" in host else host
        headers = {AUTH: f"{nonce}:{self._signer.request(path, nonce)}"}
        try:
            async with session.get(
                f"http://{address}:{port}{path}", headers=headers, allow_redirects=False
            ) as response:
                if response.status == 503:
                    raise _NotYet
                if response.status != 200:
                    text = (await response.content.read(200)).decode(errors="replace")
                    raise _Refused(f"replica {replica} answered {response.status}: {text}")
                if response.content_length is None or response.content_length > limit:
                    raise _Refused(
                        f"replica {replica} answered with {response.content_length} bytes, more than {limit}"
                    )
                body = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise _Refused(f"replica {replica}: {error or type(error).__name__}") from None
        checksum = response.headers.get(CHECKSUM, "")
        if not hmac.compare_digest(
            response.headers.get(PROOF, "").encode(), self._signer.answer(nonce, checksum).encode()
        ):
            raise _Refused(f"replica {replica} does not hold the job token")
        if xxhash.xxh3_64_hexdigest(body) != checksum:
            raise _Refused(f"replica {replica}: its bytes failed their checksum")
        return body

    def received(self) -> None:
        self._fault("range")


class _Stripes:
    """One fetch: a few workers a source, all writing into one buffer."""

    def __init__(
        self,
        fetcher: StateFetcher,
        session: aiohttp.ClientSession,
        state: StateName,
        transfer: Transfer,
        data: memoryview,
        throttle: float | None,
    ) -> None:
        self._fetcher, self._session, self._state = fetcher, session, state
        self._transfer, self._data = transfer, data
        self._throttle, self._started, self._taken = throttle, time.monotonic(), 0
        self._changed = asyncio.Condition()
        self._changes = 0
        self._error: Exception | None = None

    async def run(self, sources: Sequence[Source]) -> None:
        workers = [asyncio.ensure_future(self._work(source)) for source in sources for _ in range(PER_SOURCE)]
        try:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._transfer.complete or self._transfer.exhausted or self._error is not None
                )
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if self._error is not None:
            raise self._error
        if not self._transfer.complete:
            raise TransferError(f"state {self._state.step} cannot be had: {self._transfer.why}")

    async def _work(self, source: Source) -> None:
        replica = source[0]
        while replica not in self._transfer.reasons and not self._transfer.complete:
            seen = self._changes
            part = self._transfer.next_range(replica)
            if part is None:
                async with self._changed:
                    await self._changed.wait_for(lambda seen=seen: self._changes != seen)  # type: ignore[misc]
                continue
            try:
                await self._take(source, part)
            except _Refused as error:
                log.info("fetching state %d goes on without one source: %s", self._state.step, error)
                self._transfer.failed(replica, str(error))
            except Exception as error:  # noqa: BLE001  (whatever it is ends the whole fetch, in `run`)
                self._error = error
            async with self._changed:
                self._changes += 1
                self._changed.notify_all()

    async def _take(self, source: Source, part: Range) -> None:
        lo, hi = part
        body = await self._fetcher.get(self._session, source, self._state, f"bytes?lo={lo}&hi={hi}", hi - lo)
        if len(body) != hi - lo:
            raise _Refused(f"replica {source[0]} sent {len(body)} bytes instead of {hi - lo}")
        self._fetcher.received()
        if self._throttle is not None:
            self._taken += hi - lo
            await asyncio.sleep(max(0.0, self._started + self._taken / self._throttle - time.monotonic()))
        if self._transfer.done(source[0], part):
            self._data[lo:hi] = body


def _total_of(manifest: bytes) -> int:
    try:
        total = json.loads(manifest)["total"]
    except (ValueError, KeyError, TypeError):
        raise TransferError("the manifest of the state is not what it should be") from None
    if not isinstance(total, int) or not 0 <= total <= MAX_TOTAL:
        raise TransferError(f"the manifest announces {total} bytes, at most {MAX_TOTAL} can be right")
    return total
