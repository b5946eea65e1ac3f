"""One connection of a fetch to one source; see `runtime.state_http` for the conversation.

The source may be anybody by now. It has to prove itself before its answer's body is read; only the beginning of a refusal is
read; and an answer that takes for ever, a byte at a time, is given up. Fails: `Refused`, in words that do not name the source.
One thread; `shut` and `give_up_if_late` may come from any.
"""

import contextlib
import hmac
import http.client
import secrets
import socket
import time
from collections.abc import Callable

import xxhash

from keepstep.protocol.ids import ReplicaId
from keepstep.runtime.refusals import plain
from keepstep.runtime.state_http import AUTH, CHALLENGE, CHECKSUM, PROOF, Signer

MAX_REFUSAL = 4096
SILENT_S = 6.0  # a source answers within two seconds, if only to say "not yet"
ANSWER_S = 60.0  # for one answer, of a few MB; by then it goes to another source
AGAIN_S, AGAIN_FOR_S = 0.02, 10.0
NOT_YET_S = 120.0  # a source may take so long to reach the state that it was named for

Source = tuple[ReplicaId, str, int]
"""A replica, and the host and port where the same rank of it serves."""


class Refused(Exception):
    """A source did not give what was asked for, in words that do not name it."""


class Damaged(Refused):
    """What it gave failed its checksum."""


class _Response(http.client.HTTPResponse):
    """An answer that does not say "continue" for ever: a source never does."""

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]  # not in typeshed
        if status == http.client.CONTINUE:
            raise http.client.BadStatusLine(f"{status} {reason}")
        return version, status, reason


class Connection:
    """One thread's connection to one source."""

    def __init__(self, source: Source, signer: Signer, check: Callable[[], None]) -> None:
        """`check` raises when nobody wants an answer any more."""
        _, host, port = source
        self._signer, self._check = signer, check
        self._http = http.client.HTTPConnection(host, port, timeout=SILENT_S)
        self._http.response_class = _Response
        self._sock: socket.socket | None = None
        self._challenge, self._asked = "", 0
        self._known = False  # it has answered a proof on this connection
        self._give_up_at = float("inf")
        self._given_up = False

    def get(self, path: str, target: memoryview | None, limit: int) -> bytes | memoryview:
        """One verified answer: in `target`, or in bytes of its own if that is None. Raises Refused."""
        began = time.monotonic()
        while time.monotonic() < began + NOT_YET_S:
            self._check()
            try:
                body = self._ask(path, target, limit)
            except (OSError, http.client.HTTPException, ValueError, Refused) as error:
                self._check()  # we may have shut the connection ourselves
                if self._given_up:
                    raise Refused(f"its answer was not complete in {ANSWER_S:g} s") from None
                if isinstance(error, Refused):
                    raise
                dropped = isinstance(error, ConnectionResetError | BrokenPipeError)
                if self._known or not dropped or time.monotonic() > began + AGAIN_FOR_S:
                    raise Refused(str(error) or type(error).__name__) from None
                # Where strangers flood its port, we may have had to make room for them.
                time.sleep(AGAIN_S)
                continue
            if body is not None:
                return body
        raise Refused(f"it did not reach the state in {NOT_YET_S:.0f} s")

    def _ask(self, path: str, target: memoryview | None, limit: int) -> bytes | memoryview | None:
        """None: not yet."""
        nonce = secrets.token_hex(16)
        self._give_up_at = time.monotonic() + ANSWER_S
        response = None
        try:
            response = self._ask_with(path, nonce)
            if response.status == 401 and not self._challenge:
                self._challenge = response.headers.get(CHALLENGE, "")
                self._refusal(response)
                response = self._ask_with(path, nonce)
            return self._body(response, nonce, target, limit)
        except BaseException:
            if response is not None:
                response.close()  # it may hold the socket by itself
            self._http.close()
            raise
        finally:
            self._give_up_at = float("inf")

    def _ask_with(self, path: str, nonce: str) -> http.client.HTTPResponse:
        if self._http.sock is None:
            self._challenge, self._asked, self._known = "", 0, False
            self._http.connect()
            self._sock = self._http.sock  # which the connection lets go of where an answer has no length
            self._check()  # cancelled while there was no socket yet that could be shut
        proof = self._signer.request(path, nonce, self._challenge, self._asked) if self._challenge else ""
        self._http.request("GET", path, headers={AUTH: f"{nonce}:{proof}"})
        self._asked += bool(proof)
        response = self._http.getresponse()
        self._known = bool(proof)
        return response

    def _refusal(self, response: http.client.HTTPResponse) -> str:
        """What it says instead of an answer, as far as we want to know."""
        text = response.read(MAX_REFUSAL)
        if not response.isclosed():  # there is more
            self._http.close()
        return plain(text[:200].decode(errors="replace"))

    def _body(
        self, response: http.client.HTTPResponse, nonce: str, target: memoryview | None, limit: int
    ) -> bytes | memoryview | None:
        if response.status != 200:
            text = self._refusal(response)
            if response.status == 503:
                return None
            raise Refused(f"it answered {response.status}: {text}")
        length = response.length
        if length is None or length > limit or (target is not None and length != len(target)):
            raise Refused(f"it sent {length} bytes instead of {limit}")
        checksum = response.headers.get(CHECKSUM, "")
        proof = response.headers.get(PROOF, "")
        if not hmac.compare_digest(proof.encode(), self._signer.answer(nonce, checksum).encode()):
            raise Refused("it does not hold the job token")
        body = response.read() if target is None else _read_into(response, target)
        if xxhash.xxh3_64_hexdigest(body) != checksum:
            raise Damaged("its bytes failed their checksum")
        return body

    def give_up_if_late(self) -> None:
        """The coordinator's, now and then."""
        if time.monotonic() > self._give_up_at:
            self._given_up = True
            self.shut()

    def shut(self) -> None:
        """Wakes whoever reads from it. Any thread."""
        sock = self._sock
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
