"""Structured events as JSON lines, one file per life of a rank: `run_dir/events/replica{r}-rank{k}-{incarnation}.jsonl`.

A line holds event, t (wall clock), mono (seconds, one clock for all processes of a host), replica, rank, incarnation, and the
event's own fields. `emit` only queues; a thread writes, so that a slow or full disk never stops training. What cannot be written,
or not be queued any more, is lost: counted, said in the log once, and told by an `events_lost` event as soon as one can be
written. A killed process may leave a torn last line.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from keepstep.protocol.errors import ConfigError
from keepstep.runtime.environment import Environment

log = logging.getLogger("keepstep")

CLOSE_S = 5.0
QUEUE_MAX = 10_000  # events, of some hundred bytes each


class EventLog:
    """Implements `ports.EventSink`. Without a path, events are dropped."""

    def __init__(self, path: Path | None, common: Mapping[str, object]) -> None:
        self._common = dict(common)
        self._queue: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.lost = 0  # written by two threads without a lock: it may come out a little too small
        self._told = 0
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = FileIO(path, "a")
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
        if self._thread is None:
            return
        if self._queue.qsize() >= QUEUE_MAX:
            self._lose("they cannot be written as fast as they come")
        else:
            self._queue.put(self._record(event, fields))

    def _record(self, event: str, fields: Mapping[str, object]) -> dict[str, object]:
        return {"event": event, "t": time.time(), "mono": time.monotonic(), **self._common, **fields}

    def _lose(self, why: object) -> None:
        self.lost += 1
        if self.lost == 1:
            log.warning("events are being lost, training goes on: %s", why)

    def close(self) -> None:
        """Writes what is queued; bounded in time."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _write(self, file: FileIO) -> None:
        """One write a line, so that a killed process leaves whole lines."""
        torn = b""
        while (record := self._queue.get()) is not None:
            try:
                lost = self.lost - self._told
                records = [record, self._record("events_lost", {"count": lost})] if lost else [record]
                data = torn + b"".join(json.dumps(r, default=str).encode() + b"\n" for r in records)
                if file.write(data) != len(data):
                    raise OSError("it was written in part only")
                torn, self._told = b"", self._told + lost
            except OSError as error:
                torn = b"\n"  # part of this line may be there: what follows must not be joined to it
                self._lose(error)
        file.close()
