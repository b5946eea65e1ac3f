"""State between peers, as HTTP byte ranges (FT-HSDP section 5.6): every rank serves its part, a recovering one reads from all.

    GET /state/STEP/LINEAGE/manifest          JSON that describes the byte space, at least {"total": N}
    GET /state/STEP/LINEAGE/bytes?lo=A&hi=B   bytes [A, B), with their checksum
    GET /state/STEP/LINEAGE/done?life=I&since=SEQ   nothing: the fetch that decision SEQ told incarnation I to make is complete
    401 wrong token, or none yet    400 malformed    410 not held (any more)    503 not reached yet, ask again

Every connection begins with a question without a proof. Its 401 brings the connection's challenge; the proof of each further
question is an HMAC by the job token over that, the question's number, what is asked for and a nonce, so a question that
somebody has overheard is of no use to them. The answer carries an HMAC over the nonce and its checksum: neither side believes a
stranger. The bytes are not encrypted, so who can listen can read; and the checksum finds accidents, not whoever changes bytes
on their way. The name of the part (job and rank) is signed too: a port that somebody else uses by now answers 401, never with
another rank's bytes. Nothing is unpickled, and sizes are bounded before allocation.

This module has what both ends share; `state_server` answers, `state_fetcher` asks over `state_connection`s.
"""

import hmac

STOP_S = 5.0
AUTH, CHALLENGE = "X-Keepstep-Auth", "X-Keepstep-Challenge"
PROOF, CHECKSUM = "X-Keepstep-Proof", "X-Keepstep-Checksum"
MAX_TOTAL = 1 << 40  # bytes of a rank's part of a state


class Signer:
    """Signs for one part of one job."""

    def __init__(self, part: str, token: bytes) -> None:
        self._part, self._token = part, token

    def request(self, path: str, nonce: str, challenge: str, number: int) -> str:
        """`number`: how many proofs came before it on this connection."""
        return self._mac("request", path, nonce, challenge, str(number))

    def answer(self, nonce: str, checksum: str) -> str:
        return self._mac("answer", nonce, checksum)

    def _mac(self, *words: str) -> str:
        return hmac.new(
            self._token, "\n".join((self._part, *words)).encode(errors="surrogateescape"), "sha256"
        ).hexdigest()
