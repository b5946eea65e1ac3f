"""The records of several hosts as those of one run, on one clock.

Each agent of a job has a run directory of its own, and each host a monotonic clock of its own. Directories whose agents started
under the same boot of a kernel share a clock. Of two clocks we know what leaders on both sides have seen:

    the same decision     both see it when it comes from the store, a few ms apart: the median of the differences is the offset
    a step of both        nobody completes a decision's sums before every member has seen that decision. So each commit here lies
                          after the sight of its decision there, and the other way round: two bounds, which are certain

Clocks that have seen no decision in common are set by the wall clocks of their hosts, which may be wrong by any amount.

Fails: ConfigError if there is no run. Bounds that contradict each other (clocks that have drifted) are said, not hidden.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median

from keepstep.observe.history import role
from keepstep.observe.records import Record, Run, read_run
from keepstep.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """One clock, and how well it is known."""

    names: tuple[str, ...]  # of the directories whose records it stamped
    against: str = ""  # a directory whose clock this one was compared with; empty: all others are set by this one
    shift_s: float = 0.0  # was added to its times
    decisions: int = 0  # that were seen with both; 0: the wall clocks had to do
    likely_s: float | None = None  # nine of ten of these decisions agree on the shift within so much
    certain_s: float | None = None  # the shift is wrong by no more; None: nothing shows that
    drifted_s: float = 0.0  # the two bounds contradict each other by so much

    @property
    def words(self) -> str:
        """How exact its times are."""
        if not self.against:
            return "the clock of this report"
        if not self.decisions:
            return f"set by the wall clocks of this host and of {self.against}, and as wrong as they are"
        about = f"{_s(self.likely_s)} by {self.decisions:,} decisions that {self.against} saw too"
        if self.drifted_s:
            return f"{about}; the two clocks have drifted by {_s(self.drifted_s)}"
        return about if self.certain_s is None else f"{about}; certainly {_s(self.certain_s)}, by the steps of both"


def _s(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.2g} ms"


def read_hosts(directories: Sequence[Path]) -> tuple[Run, tuple[Clock, ...]]:
    """The run directories of one job."""
    alike = len({directory.name for directory in directories}) < len(directories)
    return together({str(d) if alike else d.name: read_run(d) for d in directories})


def run_directories(paths: Iterable[Path]) -> list[Path]:
    """Those that hold records of a run: a path itself, or what lies in it. Raises ConfigError."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(below.parent for below in path.glob("*/events"))
        own = [path] if (path / "events").is_dir() else inside
        if not own:
            raise ConfigError(f"{path} holds no events of a run: name the --run-dir of `keepstep run`, or of an agent")
        found += [directory for directory in own if directory.resolve() not in {f.resolve() for f in found}]
    return found


def together(runs: Mapping[str, Run]) -> tuple[Run, tuple[Clock, ...]]:
    """The records of all directories, by their names, as those of one run."""
    by_clock: dict[str, list[str]] = {}
    for name, run in runs.items():
        by_clock.setdefault(_boot(run) or name, []).append(name)
    sights = {clock: _Sight.of(e for name in names for e in runs[name].events) for clock, names in by_clock.items()}
    first = max(sights, key=lambda clock: len(sights[clock].decided))
    found = {first: Clock(names=tuple(by_clock[first]))}
    while todo := sights.keys() - found.keys():
        clock, anchor = max(
            ((c, a) for c in sorted(todo) for a in found), key=lambda pair: sights[pair[0]].shared(sights[pair[1]])
        )
        found[clock] = _set(sights[clock], sights[anchor], tuple(by_clock[clock]), found[anchor])
    shifts = {name: clock.shift_s for clock in found.values() for name in clock.names}
    events = [_shifted(e, shifts[name]) for name, run in runs.items() for e in run.events]
    faults = [_shifted(f, shifts[name]) for name, run in runs.items() for f in run.faults]
    whole = Run(events=tuple(sorted(events, key=_mono)), faults=tuple(sorted(faults, key=_mono)))
    return whole, tuple(found.values())


def _boot(run: Run) -> str:
    """Which boot of which kernel its clock belongs to, as the launcher wrote down; empty: not known."""
    return next((e["boot"] for e in run.of("start") if isinstance(e.get("boot"), str)), "")


def _shifted(record: Record, by: float) -> Record:
    """On the clock of the report."""
    if not by:
        return record
    phases = record.get("phases")
    moved = {} if phases is None else {"phases": [[name, start + by, end + by] for name, start, end in phases]}
    return {**record, "mono": record["mono"] + by, **moved}


def _mono(record: Record) -> float:
    return float(record["mono"])


# --- one clock against another ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sight:
    """What was seen by one clock, by the seq of decisions."""

    decided: Mapping[int, float]  # when the first leader saw it
    known: Mapping[int, float]  # when the last of its members here did
    committed: Mapping[int, float]  # when its first member here was through with it
    behind: float  # the wall clock less this one

    @staticmethod
    def of(events: Iterable[Record]) -> "_Sight":
        decided: dict[int, float] = {}
        known: dict[int, float] = {}
        committed: dict[int, float] = {}
        behind = []
        for e in events:
            mono, seq = _mono(e), e.get("seq")
            if isinstance(e.get("t"), int | float) and isfinite(e["t"]):
                behind.append(e["t"] - mono)
            if e["event"] == "decision" and seq is not None:
                decided[seq] = min(mono, decided.get(seq, mono))
                if e.get("replica") is not None and role(e, e["replica"], str(e.get("incarnation"))) is not None:
                    known[seq] = max(mono, known.get(seq, mono))
            elif e["event"] == "commit" and seq is not None:
                committed[seq] = min(mono, committed.get(seq, mono))
        return _Sight(decided, known, committed, median(behind) if behind else 0.0)

    def shared(self, other: "_Sight") -> int:
        return len(self.decided.keys() & other.decided.keys())


def _set(mine: _Sight, other: _Sight, names: tuple[str, ...], anchor: Clock) -> Clock:
    """How much must be added to `mine` to have the times of `other`, and then those of the report."""
    seen = sorted(other.decided[seq] - mine.decided[seq] for seq in mine.decided.keys() & other.decided.keys())
    shift = median(seen) if seen else mine.behind - other.behind
    low = max((other.known[s] - mine.committed[s] for s in mine.committed.keys() & other.known.keys()), default=None)
    high = min((other.committed[s] - mine.known[s] for s in other.committed.keys() & mine.known.keys()), default=None)
    certain: float | None = None
    drifted = 0.0
    if low is not None and high is not None and low > high:
        drifted = low - high
    elif low is not None and high is not None:
        shift = min(max(shift, low), high)
        certain = max(high - shift, shift - low)
    if anchor.against:
        certain = None if certain is None or anchor.certain_s is None else certain + anchor.certain_s
    off = sorted(abs(value - shift) for value in seen)
    likely = off[min(len(off) - 1, len(off) * 9 // 10)] if off else None
    return Clock(
        names=names,
        against=anchor.names[0],
        shift_s=shift + anchor.shift_s,
        decisions=len(seen),
        likely_s=likely if likely is None else likely + (anchor.likely_s or 0.0),
        certain_s=certain,
        drifted_s=drifted,
    )
