"""Events never hold training up; what is lost is counted and told."""

import json
import os
from pathlib import Path

import pytest

from keepstep.runtime.event_log import QUEUE_MAX, EventLog


def test_events_that_cannot_be_written_as_fast_as_they_come_are_counted_and_told(tmp_path: Path) -> None:
    path = tmp_path / "slow"  # a pipe that nobody empties for now: the writer stands still
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = EventLog(path, {"replica": 0})
    extra = 2000
    for i in range(QUEUE_MAX + extra):
        log.emit("commit", {"step": i, "padding": "x" * 200})
    assert 0 < log.lost < extra  # a pipe holds some
    with os.fdopen(reader) as file:
        os.set_blocking(reader, True)
        log.emit("end", {})
        rows = []
        while not rows or rows[-1]["event"] != "events_lost":
            rows.append(json.loads(file.readline()))
        log.close()
        rows += [json.loads(line) for line in file]
    written = [r for r in rows if r["event"] != "events_lost"]
    assert len(written) + log.lost == QUEUE_MAX + extra + 1
    assert sum(r["count"] for r in rows if r["event"] == "events_lost") == log.lost


def test_a_full_disk_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(Path("/dev/full"), {})
    for _ in range(3):
        log.emit("commit", {})
    log.close()
    assert log.lost > 0
    assert caplog.text.count("events are being lost") == 1
