"""What the launcher shows on its standard output and error, without ever waiting for whoever reads them.

A terminal that is stopped (Ctrl-S), a pager, or a pipe that nobody empties takes no more after 64 KB. The launcher's loop must
see exits and restart replicas all the same, so a thread of its own writes; what it cannot get rid of is dropped beyond
`HELD_MAX`, counted, and said when the reader is back. The logs in the run directory have every line.
"""

import contextlib
import os
import queue
import re
import sys
import threading
from typing import TextIO

HELD_MAX = 1 << 20  # bytes
CLOSE_S = 2.0
PROGRESS = re.compile(r"(step: +\d+)  (loss: +\S+)(  .*  ettr: )(\S+)")  # training.progress


class Screen:
    """Call it in one thread; `close` at the end. Streams that are one file share a writer, so lines keep order."""

    def __init__(self) -> None:
        self._writers: dict[tuple[int, int], _Writer] = {}

    def out(self, text: str) -> None:
        """Whole lines for standard output. Never blocks, never raises."""
        colours = "NO_COLOR" not in os.environ and _is_terminal(sys.stdout)
        self._show(sys.stdout, coloured(text) if colours else text)

    def error(self, text: str) -> None:
        """The same for standard error."""
        self._show(sys.stderr, text)

    def close(self) -> None:
        """Writes what is queued; bounded in time."""
        for writer in self._writers.values():
            writer.close()

    def _show(self, stream: TextIO | None, text: str) -> None:
        if stream is None:
            return
        try:
            fd = stream.fileno()
            file = os.fstat(fd)
        except (OSError, ValueError):  # not a file, or closed: whoever put it there does not block
            with contextlib.suppress(OSError, ValueError):
                stream.write(text)
            return
        key = file.st_dev, file.st_ino
        if key not in self._writers:
            self._writers[key] = _Writer(fd)
        # a terminal of another encoding gets question marks
        self._writers[key].write(text.encode(stream.encoding or "utf-8", "replace"), text.count("\n"))


class _Writer:
    """One file, and the thread that may have to wait for it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held = 0  # bytes, queued or being written
        self._dropped = 0  # lines, since the reader last kept up
        self._thread = threading.Thread(target=self._run, name="keepstep-screen", daemon=True)
        self._thread.start()

    def write(self, data: bytes, lines: int) -> None:
        with self._lock:
            if self._held + len(data) > HELD_MAX:
                self._dropped += lines
                return
            if self._dropped:
                data = f"keepstep: {self._dropped} lines are only in the logs, nobody read them here\n".encode() + data
                self._dropped = 0
            self._held += len(data)
        self._queue.put(data)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            with contextlib.suppress(OSError):  # nobody reads us any more
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            with self._lock:
                self._held -= len(data)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def coloured(text: str) -> str:
    """Lines that say how training goes, for a terminal; any other line as it is."""
    return PROGRESS.sub("\x1b[31m\\1\x1b[0m  \x1b[32m\\2\x1b[0m\\3\x1b[36m\\4\x1b[0m", text)
