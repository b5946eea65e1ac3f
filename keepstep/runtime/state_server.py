"""Serves this rank's part of the states it holds; see `runtime.state_http` for the conversation.

A loop in a thread of its own; reading the state may block, so it happens in a small pool, from which `fault` is called too. Every
request must prove itself before anything else about it is looked at; `runtime.gate` bounds what those cost that do not.
"""

import asyncio
import hmac
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash
from aiohttp import http_exceptions, web

from keepstep.ports import StateSource
from keepstep.protocol.ids import Incarnation, Seq, Step
from keepstep.protocol.messages import Reader, StateName
from keepstep.runtime.gate import AT_ONCE, BACKLOG, Doorway, Gate
from keepstep.runtime.refusals import plain
from keepstep.runtime.state_http import AUTH, CHALLENGE, CHECKSUM, MAX_TOTAL, PROOF, STOP_S, Signer

log = logging.getLogger("keepstep")

MAX_RANGE = 64 << 20
READERS = 8
MAX_LIFE = 64  # characters of an incarnation
NAME = r"/state/{step:[0-9]{1,18}}/{lineage:[0-9]{1,18}}"


class LoopThread:
    """An asyncio loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self.loop.close()


class StateServer:
    """Serves one rank's part. `start`, then `port`; `stop` ends it in bounded time."""

    def __init__(
        self,
        source: StateSource,
        *,
        host: str,
        part: str,
        token: bytes,
        fault: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._source, self._host, self._fault = source, host, fault
        self._signer = Signer(part, token)
        self._thread: LoopThread | None = None
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._doorway = Doorway("a reader of the state")
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="keepstep-state")
        self.port = 0

    def start(self) -> None:
        self._thread = LoopThread("keepstep-state-server")
        self._thread.call(self._start(), STOP_S)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get(NAME + "/manifest", self._manifest)
        app.router.add_get(NAME + "/bytes", self._bytes)
        app.router.add_get(NAME + "/done", self._done)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, logger=self._logger())
        await self._runner.setup()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(self._gate, sock=listener, backlog=AT_ONCE)
        listener.listen(BACKLOG)

    def _gate(self) -> Gate:
        assert self._runner is not None
        assert self._runner.server is not None
        return Gate(self._runner.server(), self._doorway)

    def _logger(self) -> logging.Logger:
        """aiohttp's: what it says about requests that are no HTTP is said as any refusal is."""
        ours = logging.Logger("keepstep.http")
        ours.parent = log

        def by_us(record: logging.LogRecord) -> bool:
            error = record.exc_info[1] if record.exc_info else None
            if not isinstance(error, http_exceptions.HttpProcessingError):
                return True
            self._doorway.refusals.note(record.args[0] if record.args else "somebody", error.message, "http")  # type: ignore[index]
            return False

        ours.addFilter(by_us)
        return ours

    def stop(self) -> None:
        if self._thread is None:
            return
        self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            self._thread.call(self._stop(), STOP_S)
        except TimeoutError:
            log.warning("the state server did not stop in %.0f s", STOP_S)
        self._thread.end()
        self._thread = None

    async def _stop(self) -> None:
        assert self._runner is not None
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _nonce(self, request: web.Request) -> str | None:
        """The nonce of a caller who holds the token, or None."""
        nonce, _, proof = request.headers.get(AUTH, "").partition(":")
        gate = self._doorway.of(request.transport)
        if gate is None or not nonce or not proof:
            return None  # the first question of a connection, or the last
        mine = self._signer.request(request.path_qs, nonce, gate.challenge, gate.asked)
        if hmac.compare_digest(proof.encode(errors="surrogateescape"), mine.encode()):
            gate.proved()
            return nonce
        why = f"it does not hold the job token, and asked for {plain(request.path)}"
        self._doorway.refusals.note(request.remote, why, "token")
        return None

    def _unproved(self, request: web.Request) -> web.Response:
        gate = self._doorway.of(request.transport)
        headers = {} if gate is None else {CHALLENGE: gate.challenge}
        return web.Response(status=401, text="this job's token is needed", headers=headers)

    async def _manifest(self, request: web.Request) -> web.Response:
        nonce, state = self._nonce(request), _state_of(request)
        if nonce is None:
            return self._unproved(request)
        return await self._answer(nonce, lambda: self._source.manifest(state))

    async def _bytes(self, request: web.Request) -> web.Response:
        nonce, state = self._nonce(request), _state_of(request)
        if nonce is None:
            return self._unproved(request)
        try:
            lo, hi = int(request.query["lo"]), int(request.query["hi"])
        except (KeyError, ValueError):
            return web.Response(status=400, text="lo and hi must be whole numbers")
        if not 0 <= lo < hi <= MAX_TOTAL or hi - lo > MAX_RANGE:
            return web.Response(status=400, text=f"0 <= lo < hi and at most {MAX_RANGE} bytes, please")
        return await self._answer(nonce, lambda: self._source.read(state, lo, hi))

    async def _done(self, request: web.Request) -> web.Response:
        nonce = self._nonce(request)
        if nonce is None:
            return self._unproved(request)
        life, since = request.query.get("life", ""), request.query.get("since", "")
        if not 0 < len(life) <= MAX_LIFE or not (since.isascii() and since.isdigit() and len(since) <= 18):
            return web.Response(status=400, text="whose fetch is done? life and since say it")
        reader = Reader(incarnation=Incarnation(life), since=Seq(int(since)))

        def done() -> bytes:
            self._source.done(reader)
            return b""

        return await self._answer(nonce, done)

    async def _answer(self, nonce: str, read: Callable[[], bytes | bytearray | None]) -> web.Response:
        def work() -> tuple[bytes | bytearray, str] | None:
            self._fault("range")
            body = read()
            return None if body is None else (body, xxhash.xxh3_64_hexdigest(body))

        try:
            found = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TimeoutError:
            return web.Response(status=503, text="not reached yet")
        if found is None:
            return web.Response(status=410, text="this state is not held here (any more)")
        body, checksum = found
        return web.Response(body=body, headers={CHECKSUM: checksum, PROOF: self._signer.answer(nonce, checksum)})


def _state_of(request: web.Request) -> StateName:
    return StateName(step=Step(int(request.match_info["step"])), lineage=Seq(int(request.match_info["lineage"])))
