"""Says that somebody was refused, without letting whoever knocks fill the log.

The first refusal of a kind is one sentence in the log. Those of the next `EVERY_S` seconds are counted, and the sentence after
that tells how many they were. What a stranger sent is quoted in printable characters, and cut short. Any thread.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.protocol.errors import StaleQuorum

log = logging.getLogger("keepstep")

EVERY_S = 30.0
MAX_KINDS = 32  # of refusals that are told apart
MAX_WORDS = 300


@dataclass(slots=True)
class _Kind:
    quiet_until: float = 0.0
    unsaid: int = 0


class Refusals:
    """Those of one listener or reader; `what` was refused, in words."""

    def __init__(self, what: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}
        self.count = 0

    def note(self, who: object, why: BaseException | str, kind: str = "") -> None:
        """One more. Equal kinds are said once in a while; without one, the error's class is the kind."""
        kind = kind or type(why).__name__
        now = self._clock()
        with self._lock:
            self.count += 1
            if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
                kind = "other"
            known = self._kinds.setdefault(kind, _Kind())
            if now < known.quiet_until:
                known.unsaid += 1
                return
            before, known.unsaid, known.quiet_until = known.unsaid, 0, now + EVERY_S
        more = f" ({before} more like this since the last such line)" if before else ""
        # A member of an older ring, or of an older life, is nobody's fault.
        level = logging.INFO if isinstance(why, StaleQuorum) else logging.WARNING
        log.log(level, "refused %s from %s: %s%s", self._what, plain(who), plain(why), more)


def plain(what: object) -> str:
    """Words that somebody else may have chosen: printable, and not too many."""
    text = str(what)
    text = text if len(text) <= MAX_WORDS else text[:MAX_WORDS] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
