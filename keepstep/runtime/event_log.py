"""Structured events as JSON lines, one file per life of a rank: `run_dir/events/replica{r}-rank{k}-{incarnation}.jsonl`.

A line holds event, t (wall clock), mono (seconds, one clock for all processes of a host), replica, rank, incarnation, and the
event's own fields. `emit` only queues; a thread writes, so that a slow or full disk never stops training: what cannot be written
is counted and reported in the log once. A killed process may leave a torn last line.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from keepstep.protocol.errors import ConfigError
from keepstep.runtime.environment import Environment

log = logging.getLogger("keepstep")

CLOSE_S = 5.0


class EventLog:
    """Implements `ports.EventSink`. Without a path, events are dropped."""

    def __init__(self, path: Path | None, common: Mapping[str, object]) -> None:
        self._common = dict(common)
        self._queue: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.lost = 0
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = path.open("a")
            except OSError as error:
                raise ConfigError(f"events cannot be written to {path}: {error.strerror}") from None
            self._thread = threading.Thread(target=self._write, args=(file,), name="keepstep-events", daemon=True)
            self._thread.start()

    @staticmethod
    def for_rank(env: Environment) -> "EventLog":
        """The file of this life of this rank."""
        name = f"replica{env.replica_id}-rank{env.rank}-{env.incarnation}.jsonl"
        path = env.run_dir / "events" / name if env.run_dir is not None else None
        return EventLog(path, {"replica": env.replica_id, "rank": env.rank, "incarnation": env.incarnation})

    def emit(self, event: str, fields: Mapping[str, object]) -> None:
        """Queues one event. Never blocks, never raises."""
        if self._thread is not None:
            self._queue.put({"event": event, "t": time.time(), "mono": time.monotonic(), **self._common, **fields})

    def close(self) -> None:
        """Writes what is queued; bounded in time."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _write(self, file: TextIO) -> None:
        with file:
            while (record := self._queue.get()) is not None:
                try:
                    file.write(json.dumps(record, default=str) + "\n")
                    if self._queue.empty():
                        file.flush()
                except OSError as error:
                    self.lost += 1
                    if self.lost == 1:
                        log.warning("events are being lost, training goes on: %s", error)
