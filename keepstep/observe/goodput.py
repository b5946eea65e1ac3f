"""Where the time of a run went: every nanosecond of every replica slot is in exactly one state.

A *slot* is one of the job's R replicas from the run's first event to its last, whatever lives it has meanwhile. What the records
say about it is painted in layers, later over earlier; what nobody painted is `unattributed`. So the states of a slot add up to
the elapsed time whatever records there are, torn, out of order or cut off.

    init          the first life: processes start, the model is built, until it reports
    restart       from the exit that was seen to the report of the next life
    quorum_wait   reported, or ready for the step, and no decision yet; at the end, waiting for the others
    transfer      fetching the state                    catch_up   loading and replaying, until a WORKER
    productive    the rest of the time of steps that stayed: computing, exchanging, the optimizer
    data_wait     in them, waiting for the batch        ckpt_blocking   in them, held up by a checkpoint
    stall         waiting for a decision or a ring because another replica was lost or came back; left out although alive
    discarded     computed, and not kept: in a step that was revoked, that somebody else trained, or that it died in
    detect        dead, and nobody had noticed
    spare         waiting to take a slot over           idle       done, or given up

*ETTR*, the effective training time ratio, comes both ways: productive replica-seconds over all replica-seconds (the paper's: 7
minutes with 11 of 12 replicas count as 7 x 11/12), and the wall-clock time in which any replica was productive over all of it.

Pure. Times are integer nanoseconds of the run's one clock. The recorded floats of seconds are exact to a microsecond.
Source: FT-HSDP section 7.1. Departs from the paper: it counts whole stops only; we also count what is waited for inside a step.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, TypeVar

from keepstep.observe.history import OVER, History, Life, role
from keepstep.observe.incidents import Incident
from keepstep.observe.records import Record

T = TypeVar("T", int, float)
NS = 1_000_000_000


class State(StrEnum):
    """What a slot is doing."""

    PRODUCTIVE = "productive"
    DATA_WAIT = "data_wait"
    CKPT_BLOCKING = "ckpt_blocking"
    QUORUM_WAIT = "quorum_wait"
    STALL = "stall"
    DETECT = "detect"
    RESTART = "restart"
    TRANSFER = "transfer"
    CATCH_UP = "catch_up"
    DISCARDED = "discarded"
    INIT = "init"
    SPARE = "spare"
    IDLE = "idle"
    UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True)
class Segment:
    """[start, end) in nanoseconds."""

    start: int
    end: int
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The states of every slot from `start` to `end`, without holes or overlaps."""

    start: int
    end: int
    slots: Mapping[int, tuple[Segment, ...]]

    @property
    def elapsed(self) -> int:
        return self.end - self.start

    def totals(self, slot: int | None = None) -> dict[State, int]:
        """Nanoseconds in each state, in one slot or all of them."""
        sums = dict.fromkeys(State, 0)
        for segments in self.slots.values() if slot is None else [self.slots[slot]]:
            for s in segments:
                sums[s.state] += s.end - s.start
        return sums

    @property
    def ettr_replica(self) -> float | None:
        """Productive replica-seconds over all; None without any."""
        everything = self.elapsed * len(self.slots)
        return self.totals()[State.PRODUCTIVE] / everything if everything else None

    @property
    def ettr_wall(self) -> float | None:
        """The part of the elapsed time in which some replica was productive."""
        return sum(b - a for a, b in self.when(State.PRODUCTIVE)) / self.elapsed if self.elapsed else None

    def when(self, state: State) -> list[tuple[int, int]]:
        """When any replica was in that state: disjoint, in order."""
        return union((s.start, s.end) for own in self.slots.values() for s in own if s.state is state)

    def ettr_over_time(self, *, points: int, window: int) -> list[tuple[int, float, float]]:
        """(when, ETTR in replica-seconds since the start, the same of the last `window` ns) at evenly spaced times."""
        times = sorted({self.start + self.elapsed * i // points for i in range(1, points + 1)} - {self.start})
        worked = [_Sums([(s.start, s.end) for s in own if s.state is State.PRODUCTIVE]) for own in self.slots.values()]
        rows = []
        for at in times if worked else ():
            since = max(self.start, at - window)
            total = sum(sums.until(at) for sums in worked)
            recent = total - sum(sums.until(since) for sums in worked)
            rows.append((at, total / ((at - self.start) * len(worked)), recent / ((at - since) * len(worked))))
        return rows

    def as_json(self) -> dict[str, Any]:
        """Plain values; replica-seconds."""
        return {
            "elapsed_s": self.elapsed / NS,
            "replicas": len(self.slots),
            "ettr_replica": self.ettr_replica,
            "ettr_wall": self.ettr_wall,
            "seconds": {state.value: ns / NS for state, ns in self.totals().items()},
        }


class _Sums:
    """How much of some disjoint, ordered spans lies before a time."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = spans
        self._before = [0, *accumulate(b - a for a, b in spans)]

    def until(self, at: int) -> int:
        i = bisect_left(self._spans, (at, at))
        inside = self._spans[i - 1][1] - at if i else 0
        return self._before[i] - max(0, inside)


Paint = tuple[float, float, State]


def account(history: History, incidents: Sequence[Incident], *, until: float | None = None) -> Goodput:
    """From the run's first event to its last; to `until` (monotonic seconds) if it goes on."""
    monos = [e["mono"] for e in history.run.events]
    first, last = min(monos, default=0.0), max(monos, default=0.0)
    if until is not None:
        last = max(first, until)
    start, end = _ns(first), _ns(last)
    stalls = [(i.fault, i.committed, i.replica) for i in incidents if i.committed is not None]
    slots = {}
    for replica, lives in history.lives.items():
        windows = [(a, b) for a, b, lost in stalls if lost != replica]
        paints = _slot(history, lives, union(windows), first=first, last=last)
        slots[replica] = flatten(start, end, [(_ns(a), _ns(b), state) for a, b, state in paints])
    return Goodput(start=start, end=end, slots=slots)


def flatten(start: int, end: int, paints: Sequence[tuple[int, int, State]]) -> tuple[Segment, ...]:
    """One state at a time from `start` to `end`: the last paint that covers it; unattributed where there is none."""
    todo = sorted((max(a, start), min(b, end), -i, state) for i, (a, b, state) in enumerate(paints))
    todo = [paint for paint in todo if paint[0] < paint[1]]
    active: list[tuple[int, int, State]] = []  # a heap: the last paint first
    segments: list[Segment] = []
    now, i = start, 0
    while now < end:
        while i < len(todo) and todo[i][0] <= now:
            _, stop, order, state = todo[i]
            heapq.heappush(active, (order, stop, state))
            i += 1
        while active and active[0][1] <= now:
            heapq.heappop(active)
        state = active[0][2] if active else State.UNATTRIBUTED
        until = min(active[0][1] if active else end, todo[i][0] if i < len(todo) else end)
        if segments and segments[-1].state is state:
            segments[-1] = Segment(segments[-1].start, until, state)
        else:
            segments.append(Segment(now, until, state))
        now = until
    return tuple(segments)


def union(spans: Iterable[tuple[T, T]]) -> list[tuple[T, T]]:
    """The same time in disjoint spans, in order."""
    found: list[tuple[T, T]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _ns(seconds: float) -> int:
    return round(seconds * NS)


# --- what the records say of a slot ----------------------------------------------------------------------------


def _slot(
    history: History, lives: Sequence[Life], windows: Sequence[tuple[float, float]], *, first: float, last: float
) -> Iterable[Paint]:
    if not lives:
        return
    yield first, lives[0].started, State.INIT
    for life, following in zip(lives, (*lives[1:], None), strict=False):
        yield from _life(history, life, windows, again=life is not lives[0])
        ended, seen = life.died, life.seen
        if life.well:
            over = [e["mono"] for e in life.events if e["event"] in OVER and e.get("rank", 0) == 0]
            yield over[0] if over else (last if seen is None else seen), last, State.IDLE
        elif ended is not None:
            yield ended, seen if seen is not None else ended, State.DETECT
            yield seen if seen is not None else ended, last, State.RESTART
        elif following is not None:  # nobody saw it end
            yield life.events[-1]["mono"], last, State.RESTART
    for e in (*history.of("gave_up"), *history.of("replica_done")):
        if e.get("replica") == lives[0].replica and e["mono"] >= lives[-1].started:  # else it was asked back
            yield e["mono"], last, State.IDLE


def _life(history: History, life: Life, windows: Sequence[tuple[float, float]], *, again: bool) -> Iterable[Paint]:
    """What this life did, up to its end; what comes after its end is painted over it."""
    last = life.events[-1]["mono"]
    named = [d for d in life.own("decision") if role(d, life.replica, life.incarnation) is not None]
    admitted = named[0]["mono"] if named else None
    reported = life.first("reported") or admitted
    until = life.died if life.died is not None else last
    yield life.started, reported if reported is not None else until, State.RESTART if again else State.INIT
    if reported is not None:
        yield reported, admitted if admitted is not None else until, State.QUORUM_WAIT
    yield from _Steps(history, life, windows).paints()


class _Steps:
    """From the first decision on: reads a life's events in order and paints up to each."""

    def __init__(self, history: History, life: Life, windows: Sequence[tuple[float, float]]) -> None:
        self._history, self._life, self._windows = history, life, windows
        self._mark: float | None = None  # painted up to here
        self._now: State | None = None  # PRODUCTIVE: it is a WORKER; TRANSFER, CATCH_UP; None: not admitted, or done
        self._seq = 0  # of the newest decision that it knew
        self._decided: dict[int, tuple[float, int | None]] = {}
        self._rings: dict[int, float] = {}  # when its leader's link to each ring was ready
        self._retried = 0.0

    def paints(self) -> Iterable[Paint]:
        for e in self._life.events:
            leader = e.get("rank", 0) == 0
            match e["event"]:
                case "fetch":
                    yield from self._caught_up_to(e["mono"], State.TRANSFER, State.CATCH_UP)
                case "decision" if leader:
                    yield from self._on_decision(e)
                case "commit" if leader:
                    yield from self._on_commit(e)
                case "ring" if leader and e.get("quorum_id") is not None:
                    self._rings.setdefault(e["quorum_id"], e["mono"])
                case "retry" if leader:
                    self._retried = e["mono"]
                case "final" | "over" | "left" if leader and self._now is not None and self._mark is not None:
                    yield self._mark, e["mono"], State.QUORUM_WAIT
                    self._now = None
        yield from self._at_the_end()

    def _caught_up_to(self, at: float, state: State, then: State) -> Iterable[Paint]:
        if self._now in (State.TRANSFER, State.CATCH_UP) and self._mark is not None:
            yield self._mark, at, state
            self._mark, self._now = at, then

    def _on_decision(self, e: Record) -> Iterable[Paint]:
        does = role(e, self._life.replica, self._life.incarnation)
        if does is None:
            return
        at, before = e["mono"], self._seq
        self._seq = e["seq"]
        self._decided[e["seq"]] = at, e.get("quorum_id")
        if does == "worker":
            if self._now is not State.PRODUCTIVE:
                yield from self._caught_up_to(at, State.CATCH_UP, State.PRODUCTIVE)
                self._mark, self._now = at, State.PRODUCTIVE
        elif self._now is State.PRODUCTIVE:
            yield from self._left_out(before, e["seq"], at)
            self._mark, self._now = at, State.TRANSFER
        elif self._now is None:
            self._mark, self._now = at, State.TRANSFER

    def _left_out(self, before: int, after: int, at: float) -> Iterable[Paint]:
        """A WORKER must catch up: what it computed is lost, and then it stood aside while the others went on."""
        assert self._mark is not None
        without = [d["mono"] for d in self._history.between(before, after) if self._is_without(d)]
        out = max(self._mark, min(without, default=at))
        yield self._mark, out, State.DISCARDED
        yield out, at, State.STALL

    def _is_without(self, decision: Record) -> bool:
        return role(decision, self._life.replica, self._life.incarnation) is None

    def _on_commit(self, e: Record) -> Iterable[Paint]:
        at, since, worker = e["mono"], self._mark, e.get("role") == "worker"
        if since is None:
            return
        if not worker or self._now is not State.PRODUCTIVE:
            yield from self._caught_up_to(at, self._now or State.CATCH_UP, self._now or State.CATCH_UP)
            return
        self._mark = at
        if e["seq"] not in self._history.kept:
            yield since, at, State.DISCARDED
            return
        yield since, at, State.PRODUCTIVE
        decided, quorum_id = self._decided.get(e["seq"], (since, None))
        ring = self._rings.get(quorum_id, decided) if quorum_id is not None else decided
        for name, a, b in e.get("phases") or ():
            a, b = max(a, since), min(b, at)
            if name == "wait":
                yield from self._waited(a, b, decided, ring, since)
            elif name in ("data_wait", "ckpt_blocking", "discarded"):
                yield a, b, State(name)
        yield self._gone_on_without(e["seq"], since, at), at, State.STALL

    def _gone_on_without(self, seq: int, since: float, at: float) -> float:
        """When the others left this replica out before it wrote, at `at`, that it has completed decision `seq`: it was frozen
        or cut off on the way; `at` if they did not."""
        for d in self._history.since(since):
            if d["mono"] >= at:
                break
            if d["seq"] > seq and self._is_without(d):
                return float(d["mono"])
        return at

    def _waited(self, a: float, b: float, decided: float, ring: float, since: float) -> Iterable[Paint]:
        """Waiting before the decision that counts, or for its ring. What is waited for after that is the exchange: productive."""
        lost = self._retried > since
        yield a, min(b, decided), State.STALL if lost else State.QUORUM_WAIT
        if not lost:
            first = max(0, bisect_left(self._windows, (a, a)) - 1)
            for start, end in self._windows[first:]:
                if start >= b:
                    break
                yield max(a, start), min(b, end, decided), State.STALL
        yield max(a, decided), min(b, ring), State.STALL

    def _at_the_end(self) -> Iterable[Paint]:
        """It died, or the records end, in the middle of something."""
        end, mark = self._life.died, self._mark
        if mark is None or self._now is None:
            return
        if end is None:  # it lives: whether the step that it is in will stay, nobody knows
            if self._now is not State.PRODUCTIVE:
                yield mark, self._life.events[-1]["mono"], self._now
            return
        if self._now is not State.PRODUCTIVE:
            yield mark, end, self._now
            return
        out = next((d["mono"] for d in self._history.since(mark) if d["seq"] > self._seq and self._is_without(d)), end)
        yield mark, min(out, end), State.DISCARDED
        yield out, end, State.DETECT  # the others went on without it
