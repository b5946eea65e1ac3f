"""The records of a run: JSON lines that ranks and launcher have written, read as far as they can be read.

A run directory holds `events/*.jsonl` (each rank's and the launcher's) and `faults.jsonl` (what was injected). `mono` is one
clock for all processes of the machine, in seconds.

Fails: what is not a whole line (its writer was killed), or not a record of its kind as far as anybody reads it, is left out.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that a run wrote down, in order of time."""

    events: tuple[Record, ...]
    faults: tuple[Record, ...] = ()

    def of(self, event: str) -> list[Record]:
        """The events of one kind, oldest first."""
        return [e for e in self.events if e["event"] == event]


def read_run(run_dir: Path) -> Run:
    """Reads what `keepstep run --run-dir` left behind. Also works while the run goes on."""
    events = [e for path in sorted((run_dir / "events").glob("*.jsonl")) for e in read_lines(path)]
    faults = [f for f in read_lines(run_dir / "faults.jsonl") if "action" in f]
    return Run(
        events=tuple(sorted((e for e in events if "event" in e), key=_mono)), faults=tuple(sorted(faults, key=_mono))
    )


def read_lines(path: Path) -> list[Record]:
    """The whole JSON lines of a file; none if there is no file."""
    if not path.exists():
        return []
    return list(whole_lines(path.read_text(errors="replace").splitlines()))


def whole_lines(lines: Iterable[str]) -> Iterator[Record]:
    """Decodes lines and leaves out those that a killed process could not finish, or that are no records."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and _fits(record):
            yield record


def _mono(record: Record) -> float:
    return float(record["mono"])


# --- what a record must have, for those who read it ------------------------------------------------------------


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _loss(value: Any) -> bool:
    return isinstance(value, int | float)  # which may be NaN or infinite, and then that is what happened


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62


def _count(value: Any) -> bool:
    return _whole(value) and value >= 0


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _members(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(m, dict) and _has(m, MEMBER) for m in value)


def _units(value: Any) -> bool:
    return isinstance(value, list) and all(_count(u) for u in value)


def _phases(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(p, list) and len(p) == 3 and _text(p[0]) and _number(p[1]) and _number(p[2]) for p in value
    )


MEMBER: Mapping[str, Check] = {"replica": _count, "incarnation": _text, "units": _units}
LIFE: Mapping[str, Check] = {"replica": _count, "incarnation": _text}
EVENTS: Mapping[str, Mapping[str, Check]] = {
    "decision": {"seq": _count, "base": _count, "step": _count, "members": _members},
    "commit": {**LIFE, "seq": _count, "step": _count},
    "retry": {"seq": _count},
    "spawn": LIFE,
    "events_lost": {"count": _count},
    "final": {
        "replica": _count,
        "rank": _count,
        "units_total": _or_none(_count),
        "units_committed": _count,
        "digest": _text,
    },
}
FAULT: Mapping[str, Check] = {"action": _text, "replica": _count, "rank": _count}
OPTIONAL: Mapping[str, Check] = {
    "replica": _or_none(_count), "rank": _or_none(_count), "loss": _or_none(_loss), "incarnation": _or_none(_text),
    "step": _or_none(_count), "role": _or_none(_text), "code": _or_none(_whole), "reason": _or_none(_text),
    "num_replicas": _or_none(_count), "quorum_id": _or_none(_count), "phases": _or_none(_phases),
    "pid": _or_none(_count), "kind": _or_none(_text), "samples": _or_none(_number), "phase": _or_none(_text),
}  # fmt: skip


def _has(record: Mapping[str, Any], fields: Mapping[str, Check]) -> bool:
    return all(name in record and check(record[name]) for name, check in fields.items())


def _fits(record: Record) -> bool:
    if not _number(record.get("mono")) or not all(check(record.get(name)) for name, check in OPTIONAL.items()):
        return False
    event = record.get("event")
    if event is None:
        return "action" not in record or _has(record, FAULT)
    return isinstance(event, str) and _has(record, EVENTS.get(event, {}))
