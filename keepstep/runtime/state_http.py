"""State between peers, as HTTP byte ranges (FT-HSDP section 5.6): every rank serves its part, a recovering one reads from all.

    GET /state/STEP/LINEAGE/manifest          JSON that describes the byte space, at least {"total": N}
    GET /state/STEP/LINEAGE/bytes?lo=A&hi=B   bytes [A, B), with their checksum
    401 wrong token    400 malformed    410 not held (any more)    503 not reached yet, ask again

Requests and answers carry an HMAC by the job token over what they say and a nonce, so neither side believes a stranger. The bytes
are not encrypted, and nonces are not remembered: who can listen can read, and ask again what was asked. The name of the part
(job and rank) is signed too: a port that somebody else uses by now answers 401, never with another rank's bytes. Nothing is
unpickled, and sizes are bounded before allocation.

This module has what both ends share; `state_server` answers, `state_fetcher` asks.
"""

import hmac

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
        return hmac.new(
            self._token, "\n".join((self._part, *words)).encode(errors="surrogateescape"), "sha256"
        ).hexdigest()
