"""What an attack may cost its victim: measured on this process while it lasts."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import pytest

EVERY_S = 0.02


@dataclass
class Cost:
    """The most that this process had more than at the beginning."""

    descriptors: int = 0
    threads: int = 0
    rss_mib: float = 0.0
    lines: list[str] = field(default_factory=list)


@contextlib.contextmanager
def measured(caplog: pytest.LogCaptureFixture) -> Iterator[Cost]:
    """Looks at this process every few milliseconds; and collects what it says."""
    cost, over, me = Cost(), threading.Event(), psutil.Process()
    before = me.num_fds(), threading.active_count(), me.memory_info().rss

    def look() -> None:
        while not over.wait(EVERY_S):
            cost.descriptors = max(cost.descriptors, me.num_fds() - before[0])
            cost.threads = max(cost.threads, threading.active_count() - before[1])
            cost.rss_mib = max(cost.rss_mib, (me.memory_info().rss - before[2]) / 2**20)

    caplog.clear()
    looker = threading.Thread(target=look)
    looker.start()
    try:
        with caplog.at_level(logging.INFO):
            yield cost
    finally:
        over.set()
        looker.join()
        cost.lines = [r.getMessage() for r in caplog.records]
