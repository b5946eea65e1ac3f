"""One record for each failure, with its timeline: what died, who saw it when, what it cost the survivors, how it came back.

    fault ─> seen ─> told ─> decided ─> committed          the survivors: stall
                └──> restarted ─> reported ─> admitted ─> fetched ─> loaded ─> worker      the next life

A failure is a life that ended otherwise than because the job did, or that lived on and was left out of a decision (it was frozen,
or cut off), and had to catch up.

Pure: the records of a run in, incidents out. Fails: what was not recorded, or never happened, is None.
"""

import signal
from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from keepstep.observe.history import Gap, History, Life, onward, role
from keepstep.observe.records import Record

AFTER_REJOIN_STEPS = 1  # steps after the first one as WORKER that still count as "around the rejoin"
POINTS = (
    "seen", "told", "decided", "committed",
    "restarted", "reported", "admitted", "fetched", "loaded", "worker",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One failure. Times in monotonic seconds; `fault` is when it began, as closely as anybody knows."""

    replica: int
    incarnation: str
    rank: int | None  # that failed first
    cause: str  # in words
    injected: bool  # so `fault` is exact; else it is when the failure was first seen
    action: str | None  # what was injected
    step: int | None  # in which it happened
    phase: str | None  # at which point of the step, if it was injected
    fault: float
    seen: float | None = None  # the launcher saw the exit
    told: float | None = None  # a survivor knew: its step was voted down, or decided without the lost life
    decided: float | None = None  # the first decision without it
    committed: float | None = None  # the survivors' first commit under such a decision
    restarted: float | None = None  # the next life was started
    reported: float | None = None  # it reported to the quorum
    admitted: float | None = None  # it knew the first decision that names it
    fetched: float | None = None  # its last rank had the state
    loaded: float | None = None  # its tensors held the state
    worker: float | None = None  # its first commit as WORKER
    worker_step: int | None = None
    stall_s: float | None = None  # what the survivors' slowest step took beyond the usual
    rejoin_stall_s: float | None = None  # the same, around the return
    gave_up: str = ""  # why there is no next life

    def after(self, point: str) -> float | None:
        """Seconds from the fault to one of POINTS."""
        at = getattr(self, point)
        return None if at is None else float(at - self.fault)

    @property
    def detected_s(self) -> float | None:
        """From the fault to the first sign of it: the launcher saw the exit, or a survivor was told."""
        signs = [s for s in (self.after("seen"), self.after("told")) if s is not None]
        return min(signs, default=None)

    def as_json(self) -> dict[str, Any]:
        """Plain values; every point as seconds after the fault."""
        return {**asdict(self), "fault": self.fault, **{point: _rounded(self.after(point)) for point in POINTS}}


def incidents(history: History) -> list[Incident]:
    """All failures, first to last."""
    found = []
    for lives in history.lives.values():
        for life, following in zip(lives, (*lives[1:], None), strict=False):
            found += _left_out(history, life)
            if _failed(life, following):
                found.append(_death(history, life, following))
    return sorted(found, key=lambda incident: incident.fault)


def _failed(life: Life, following: Life | None) -> bool:
    if life.well:
        return False
    return life.died is not None or following is not None


def _death(history: History, life: Life, following: Life | None) -> Incident:
    last = life.events[-1]["mono"]
    assert life.died is not None or following is not None
    at = life.died if life.died is not None else last  # torchrun: nobody saw it
    injected = [f for f in history.run.faults if f.get("incarnation") == life.incarnation and f["mono"] == at]
    fault = injected[0] if injected else None
    gave_up = [e for e in history.of("gave_up") if e.get("replica") == life.replica and e["mono"] >= at]
    base = Incident(
        replica=life.replica,
        incarnation=life.incarnation,
        rank=life.rank if fault is None else fault["rank"],
        cause=_cause(life, fault),
        injected=fault is not None,
        action=None if fault is None else fault["action"],
        step=_step_at(life, at) if fault is None else fault.get("step"),
        phase=None if fault is None else fault.get("phase"),
        fault=at,
        seen=life.seen,
        gave_up=str(gave_up[0].get("reason") or "") if gave_up and following is None else "",
    )
    if any(role(d, life.replica, life.incarnation) for d in life.own("decision")):
        base = _survivors(history, base)
    return base if following is None else _return(history, base, following, following.started)


def _cause(life: Life, fault: Record | None) -> str:
    code = life.code if fault is None or fault.get("rank") == life.rank else None
    if fault is not None:
        return f"{fault['action']} (injected)" if code is None else f"{_code(code)} (injected)"
    return "it went away" if code is None else _code(code)


def _code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _step_at(life: Life, at: float) -> int | None:
    """The step after the last that it had committed."""
    done = [c["step"] for c in life.own("commit") if c["mono"] <= at]
    return done[-1] + 1 if done else None


def _left_out(history: History, life: Life) -> list[Incident]:
    """Where a life that had been WORKER was decided without, and had to catch up later."""
    named = [(d, role(d, life.replica, life.incarnation)) for d in life.own("decision")]
    found = []
    for (before, was), (after, now) in pairwise(named):
        if was != "worker" or now != "catching_up":
            continue
        without = [
            d for d in history.between(before["seq"], after["seq"]) if role(d, life.replica, life.incarnation) is None
        ]
        if not without:
            continue
        stops = [
            f for f in history.run.faults
            if f.get("incarnation") == life.incarnation and before["mono"] <= f["mono"] <= without[0]["mono"]
        ]  # fmt: skip
        stop = stops[-1] if stops else None
        at = without[0]["mono"] if stop is None else stop["mono"]
        incident = Incident(
            replica=life.replica,
            incarnation=life.incarnation,
            rank=None if stop is None else stop["rank"],
            cause=_why_left_out(life, before["mono"], after["mono"])
            if stop is None
            else f"{stop['action']} (injected)",
            injected=stop is not None,
            action=None if stop is None else stop["action"],
            step=before["step"],
            phase=None if stop is None else stop.get("phase"),
            fault=at,
        )
        found.append(_return(history, _survivors(history, incident), life, after["mono"]))
    return found


def _why_left_out(life: Life, since: float, until: float) -> str:
    slow = any(e["event"] == "slow" and since <= e["mono"] <= until for e in life.events)
    return f"left out alive: {'no progress' if slow else 'frozen or cut off'}"


def _survivors(history: History, incident: Incident) -> Incident:
    """What the others went through."""
    who = incident.replica, incident.incarnation
    at = incident.fault
    decided = next((d["mono"] for d in history.since(at) if role(d, *who) is None), None)
    retries = history.of("retry")
    later = onward(retries, bisect_left(retries, at, key=_mono))
    retry = next((e["mono"] for e in later if e.get("replica") != who[0]), None)
    told = min([t for t in (decided, retry) if t is not None], default=None)
    longest: Gap | None = None
    committed: float | None = None
    for replica in history.replicas:
        if replica == who[0]:
            continue
        gaps = history.gaps(replica)
        for gap in onward(gaps, bisect_left(gaps, at, key=_end)):
            if longest is None or gap.length > longest.length:
                longest = gap
            decision = history.decisions.get(gap.seq)
            if decision is None or role(decision, *who) is None:
                committed = gap.end if committed is None else min(committed, gap.end)
                break
    usual = history.usual_step_s or 0.0
    return replace(
        incident,
        told=told,
        decided=decided,
        committed=committed,
        stall_s=None if longest is None else _rounded(max(0.0, longest.length - usual)),
    )


def _return(history: History, incident: Incident, life: Life, since: float) -> Incident:
    """How the next life (or the same one, from `since` on) came back."""

    def first(rows: list[Record]) -> float | None:
        return next((float(e["mono"]) for e in rows if e["mono"] >= since), None)

    same = life.incarnation == incident.incarnation
    named = [d for d in life.own("decision") if d["mono"] >= since and role(d, life.replica, life.incarnation)]
    commits = [c for c in life.own("commit") if c["mono"] >= since and c.get("role") == "worker"]
    loaded = first([e for e in life.events if e["event"] == "materialized"])
    fetches = [
        e["mono"]
        for e in life.events
        if e["event"] == "fetch" and e["mono"] >= since and (loaded is None or e["mono"] <= loaded)
    ]
    stall = None
    if named and commits:
        lengths = _around(history, life.replica, named[0], commits[0])
        stall = _rounded(max(0.0, max(lengths) - (history.usual_step_s or 0.0))) if lengths else None
    return replace(
        incident,
        restarted=None if same else life.started,
        reported=None if same else life.first("reported"),
        admitted=named[0]["mono"] if named else None,
        fetched=max(fetches, default=None),
        loaded=loaded,
        worker=commits[0]["mono"] if commits else None,
        worker_step=commits[0]["step"] if commits else None,
        rejoin_stall_s=stall,
    )


def _around(history: History, replica: int, first: Record, last: Record) -> list[float]:
    """How long the others' steps took from the return's first decision to just after its first commit."""
    lengths = []
    for other in history.replicas:
        gaps = history.gaps(other) if other != replica else ()
        for gap in onward(gaps, bisect_left(gaps, first["mono"], key=_end)):
            if gap.start > last["mono"] and gap.step > last["step"] + AFTER_REJOIN_STEPS:
                break
            if first["step"] <= gap.step <= last["step"] + AFTER_REJOIN_STEPS:
                lengths.append(gap.length)
    return lengths


def _end(gap: Gap) -> float:
    return gap.end


def _mono(record: Record) -> float:
    return float(record["mono"])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
