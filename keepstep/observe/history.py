"""The one history of a run, and the lives of its replicas: what summary, incidents and goodput are computed from.

A decision is *committed* iff it is on the final chain: reached over `base` links from the newest decision. A decision that some
replica committed and the others revoked is not on it, and its units count again where they were trained anew.

Pure; everything is computed once, when it is first asked for. Times are monotonic seconds, as in the records.
Fails: missing events give None or an empty list, never a guess.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TypeVar

from keepstep.observe.records import Record, Run

T = TypeVar("T")
ENDING = ("kill", "segv", "raise", "exit")  # injected faults that end a life; the others only hold it up
MAX_SLOTS = 1 << 16  # a record that tells of more replicas than this is not believed


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of a replica, as far as it was recorded."""

    replica: int
    incarnation: str
    started: float  # spawned, or its first event
    died: float | None  # the injected fault that ended it, else when its first rank was seen to exit; None: it lives
    seen: float | None  # when the launcher saw the first exit of a rank
    rank: int | None  # the one that exited first
    code: int | None  # its exit code, negative for a signal
    well: bool  # it ended because the job did, or because somebody ended the job
    events: tuple[Record, ...]  # of all its ranks

    def first(self, event: str) -> float | None:
        """When the first event of a kind was."""
        return next((e["mono"] for e in self.events if e["event"] == event), None)

    def own(self, event: str) -> list[Record]:
        """The leader's events of one kind."""
        return [e for e in self.events if e["event"] == event and e.get("rank", 0) == 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The time between two consecutive commits of one replica."""

    start: float
    end: float
    step: int  # the step that was committed at `end`
    seq: int

    @property
    def length(self) -> float:
        return self.end - self.start


class History:
    """What a run's records say."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def of(self, event: str) -> Sequence[Record]:
        """The events of one kind, oldest first."""
        return self._by_kind.get(event, ())

    @cached_property
    def _by_kind(self) -> Mapping[str, list[Record]]:
        found: dict[str, list[Record]] = defaultdict(list)
        for e in self.run.events:
            found[e["event"]].append(e)
        return found

    @cached_property
    def decisions(self) -> dict[int, Record]:
        """Every decision that a leader saw, by seq; `mono` is when the first one saw it."""
        seen: dict[int, Record] = {}
        for event in self.of("decision"):
            seen.setdefault(event["seq"], event)
        return dict(sorted(seen.items()))

    @cached_property
    def chain(self) -> list[Record]:
        """The committed decisions of the one history, first to last."""
        by_seq = self.decisions
        if not by_seq:
            return []
        committed = {c["seq"] for c in self.of("commit")}
        newest = by_seq[max(by_seq)]
        seq = newest["seq"] if newest["seq"] in committed else newest["base"]
        links: list[Record] = []
        while seq in committed and seq in by_seq:
            links.append(by_seq[seq])
            if by_seq[seq]["base"] >= seq:  # the initial state bears the name of the decision that made it the base
                break
            seq = by_seq[seq]["base"]
        return links[::-1]

    def between(self, low: int, high: int) -> Sequence[Record]:
        """The decisions with low < seq < high."""
        found = self._by_seq
        return found[bisect_right(found, low, key=_seq) : bisect_left(found, high, key=_seq)]

    def since(self, mono: float) -> Iterator[Record]:
        """The decisions that somebody first saw at `mono` or later, oldest first."""
        return onward(self._by_time, bisect_left(self._by_time, mono, key=_mono))

    @cached_property
    def _by_seq(self) -> list[Record]:
        return list(self.decisions.values())

    @cached_property
    def _by_time(self) -> list[Record]:
        return sorted(self.decisions.values(), key=_mono)

    @cached_property
    def kept(self) -> frozenset[int]:
        """The seqs of the chain."""
        return frozenset(d["seq"] for d in self.chain)

    @cached_property
    def step_times(self) -> dict[int, float]:
        """When each step of the chain was first committed."""
        times: dict[int, float] = {}
        for commit in self.of("commit"):
            if commit["seq"] in self.kept:
                times[commit["step"]] = min(times.get(commit["step"], commit["mono"]), commit["mono"])
        return dict(sorted(times.items()))

    @cached_property
    def usual_step_s(self) -> float | None:
        """The median time from commit to commit."""
        apart = [b - a for a, b in pairwise(self.step_times.values())]
        return median(apart) if apart else None

    @cached_property
    def losses(self) -> dict[int, float]:
        """The job-wide loss of each step of the chain that had one."""
        commits = self.of("commit")
        found = {c["step"]: c["loss"] for c in commits if c["seq"] in self.kept and c.get("loss") is not None}
        return dict(sorted(found.items()))

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Every replica that the job was meant to have, was started, or trained."""
        meant = max((e.get("num_replicas") or 0 for e in self.run.events), default=0)
        kinds = {"spawn", "commit", "final"}
        found = {e["replica"] for e in self.run.events if e["event"] in kinds and e.get("replica") is not None}
        return tuple(sorted(found | set(range(meant if meant <= MAX_SLOTS else 0))))

    # --- lives ------------------------------------------------------------------------------------------------

    @cached_property
    def lives(self) -> Mapping[int, tuple[Life, ...]]:
        """Of each replica, in the order in which they started."""
        events: dict[tuple[int, str], list[Record]] = defaultdict(list)
        for e in self.run.events:
            if e.get("replica") is not None and e.get("incarnation") is not None:
                events[e["replica"], e["incarnation"]].append(e)
        faults: dict[str | None, Record] = {}
        for f in self.run.faults:
            if f["action"] in ENDING:
                faults.setdefault(f.get("incarnation"), f)
        found: dict[int, list[Life]] = {replica: [] for replica in self.replicas}
        for (replica, incarnation), own in events.items():
            if replica in found:
                found[replica].append(_life(replica, incarnation, own, faults.get(incarnation)))
        return {r: tuple(sorted(lives, key=lambda life: life.started)) for r, lives in found.items()}

    def gaps(self, replica: int) -> Sequence[Gap]:
        """Between the commits that `replica` took part in as WORKER (replayed steps come in bursts and say nothing)."""
        return self._gaps.get(replica, [])

    @cached_property
    def _gaps(self) -> dict[int, list[Gap]]:
        last: dict[int, Record] = {}
        found: dict[int, list[Gap]] = defaultdict(list)
        for c in self.of("commit"):
            if c.get("role") != "worker":
                continue
            a = last.get(c["replica"])
            if a is not None and a["incarnation"] == c["incarnation"]:
                found[c["replica"]].append(Gap(start=a["mono"], end=c["mono"], step=c["step"], seq=c["seq"]))
            last[c["replica"]] = c
        return found


def role(decision: Record, replica: int, incarnation: str) -> str | None:
    """What this life does in the decision; None: it is no member."""
    for m in decision["members"]:
        if (m["replica"], m["incarnation"]) == (replica, incarnation):
            return str(m.get("role"))
    return None


def onward(rows: Sequence[T], first: int) -> Iterator[T]:
    """From one of them on, without a copy and without walking there."""
    return (rows[i] for i in range(first, len(rows)))


def _seq(record: Record) -> int:
    return int(record["seq"])


def _mono(record: Record) -> float:
    return float(record["mono"])


def units(links: Sequence[Record]) -> list[int]:
    """The units of those decisions in order, with repetitions if there are any."""
    return [u for d in links for m in d["members"] for u in m["units"]]


OVER = "final", "over", "left"  # how a life ends that is through: complete, too late for the end, asked to leave


def _life(replica: int, incarnation: str, events: Sequence[Record], fault: Record | None) -> Life:
    exits = [e for e in events if e["event"] == "exit"]
    first = exits[0] if exits else None
    seen = None if first is None else first["mono"]
    died = seen
    if fault is not None and (seen is None or fault["mono"] <= seen):
        died = fault["mono"]
    over = any(e["event"] in OVER and e.get("rank", 0) == 0 for e in events)
    stopped = first is not None and bool(first.get("stopping"))
    return Life(
        replica=replica,
        incarnation=incarnation,
        started=next((e["mono"] for e in events if e["event"] == "spawn"), events[0]["mono"]),
        died=died,
        seen=seen,
        rank=None if first is None else first.get("rank"),
        code=None if first is None else first.get("code"),
        well=over or stopped or (first is not None and first.get("code") == 0 and fault is None),
        events=tuple(events),
    )
