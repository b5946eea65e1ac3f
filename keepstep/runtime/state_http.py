"""State between peers, as HTTP byte ranges (FT-HSDP section 5.6): every rank serves its part, a recovering one reads from all.

    GET /state/STEP/LINEAGE/manifest          JSON that describes the byte space, at least {"total": N}
    GET /state/STEP/LINEAGE/bytes?lo=A&hi=B   bytes [A, B), with their checksum
    401 wrong token    400 malformed    410 not held (any more)    503 not reached yet, ask again

Requests and answers carry an HMAC by the job token over what they say and a nonce, so neither side believes a stranger; the bytes
are not encrypted. The name of the part (job and rank) is signed too: a port that somebody else uses by now answers 401, never
with another rank's bytes. Nothing is unpickled, and sizes are bounded before allocation.

Server (`state_server`) and fetcher (`state_fetcher`) run a loop in a thread of their own; reading the state may block, so it
happens in a small pool. `on_done` and `fault` are called from those threads. Fails: TransferError with each source's reason.
"""

import asyncio
import hmac
import threading
from collections.abc import Coroutine
from typing import Any

STOP_S = 5.0
AUTH, PROOF, CHECKSUM = "X-Keepstep-Auth", "X-Keepstep-Proof", "X-Keepstep-Checksum"


class Signer:
    """Signs for one part of one job."""

    def __init__(self, part: str, token: bytes) -> None:
        self._part, self._token = part, token

    def request(self, path: str, nonce: str) -> str:
        return self._mac("request", path, nonce)

    def answer(self, nonce: str, checksum: str) -> str:
        return self._mac("answer", nonce, checksum)

    def _mac(self, *words: str) -> str:
        return hmac.new(self._token, "\n".join((self._part, *words)).encode(), "sha256").hexdigest()


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
