"""What a run came to: pure functions from its records (`observe.records`) to the summary.

A decision is *committed* iff it is on the final chain: reached over `base` links from the newest decision. A decision that some
replica committed and the others revoked is not on it, and its units count again where they were trained anew.

Fails: missing events give None or an empty list, never a guess.
Source: FT-HSDP section 6 (every batch exactly once); what recovery costs the survivors, as in section 7.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from keepstep.observe.records import Record, Run

AFTER_REJOIN_STEPS = 1  # steps after the first one as WORKER that still count as "around the rejoin"


# --- the chain -------------------------------------------------------------------------------------------------


def decisions(run: Run) -> dict[int, Record]:
    """Every decision that a leader saw, by seq; `mono` is when the first one saw it."""
    seen: dict[int, Record] = {}
    for event in run.of("decision"):
        seen.setdefault(event["seq"], event)
    return dict(sorted(seen.items()))


def chain(run: Run) -> list[Record]:
    """The committed decisions of the one history, first to last."""
    by_seq = decisions(run)
    if not by_seq:
        return []
    committed = {c["seq"] for c in run.of("commit")}
    newest = by_seq[max(by_seq)]
    seq = newest["seq"] if newest["seq"] in committed else newest["base"]
    links: list[Record] = []
    while seq in committed and seq in by_seq:
        links.append(by_seq[seq])
        if by_seq[seq]["base"] >= seq:  # the initial state bears the name of the decision that made it the base
            break
        seq = by_seq[seq]["base"]
    return links[::-1]


def units(links: Sequence[Record]) -> list[int]:
    """The units of those decisions in order, with repetitions if there are any."""
    return [u for d in links for m in d["members"] for u in m["units"]]


def lost_units(run: Run, links: Sequence[Record]) -> list[int]:
    """Units that should have been committed and were not.

    Where the replicas' own ledgers say that all data is trained, that is whatever the chain lacks. A job that ended at max_steps
    may have left gaps only for units that a retry of its last step gave back: no step was left to train them in.
    (For `data_policy="pool"`; with "stream", the units of a dead replica rightly wait for it.)
    """
    done = set(units(links))
    if not done:
        return []
    for final in run.of("final"):
        if final["units_total"] is not None and final["units_committed"] >= final["units_total"]:
            return sorted(set(range(final["units_total"])) - done)
    last_step = links[-1]["step"]
    given_back = {u for d in decisions(run).values() if d["step"] >= last_step for u in units([d])}
    return sorted(set(range(max(done))) - done - given_back)


# --- times -----------------------------------------------------------------------------------------------------


def step_times(run: Run, links: Sequence[Record]) -> dict[int, float]:
    """When each step of the chain was first committed, in monotonic seconds."""
    seqs = {d["seq"] for d in links}
    times: dict[int, float] = {}
    for commit in run.of("commit"):
        if commit["seq"] in seqs:
            times[commit["step"]] = min(times.get(commit["step"], commit["mono"]), commit["mono"])
    return dict(sorted(times.items()))


def step_time_median_s(run: Run, links: Sequence[Record]) -> float | None:
    """The ordinary time from commit to commit."""
    gaps = [b - a for a, b in pairwise(step_times(run, links).values())]
    return median(gaps) if gaps else None


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


def gaps(run: Run, replica: int) -> list[Gap]:
    """Between the commits that `replica` took part in as WORKER (replayed steps come in bursts and say nothing)."""
    rows = [c for c in run.of("commit") if c["replica"] == replica and c.get("role") == "worker"]
    return [
        Gap(start=a["mono"], end=b["mono"], step=b["step"], seq=b["seq"])
        for a, b in pairwise(rows)
        if a["incarnation"] == b["incarnation"]
    ]


def stall(run: Run, fault: Record) -> Gap | None:
    """The survivors' longest gap from the kill to the first commit without the victim."""
    by_seq, longest = decisions(run), None
    for replica in _replicas(run) - {fault["replica"]}:
        for gap in gaps(run, replica):
            if gap.end < fault["mono"]:
                continue
            if longest is None or gap.length > longest.length:
                longest = gap
            if not _holds(by_seq.get(gap.seq), fault["replica"], fault.get("incarnation")):
                break
    return longest


def _holds(decision: Record | None, replica: int, incarnation: str | None) -> bool:
    return decision is not None and any(
        m["replica"] == replica and (incarnation is None or m["incarnation"] == incarnation)
        for m in decision["members"]
    )


def _replicas(run: Run) -> set[int]:
    """Every replica that the launcher started or that trained."""
    kinds = {"spawn", "commit", "final"}
    return {e["replica"] for e in run.events if e["event"] in kinds and e.get("replica") is not None}


def detected_s(run: Run, fault: Record) -> float | None:
    """From the kill to the first sign of it: the launcher saw the exit, or a survivor's step was retried."""
    for event in run.events:
        if event["mono"] < fault["mono"]:
            continue
        seen_exit = (
            event["event"] == "exit" and event.get("replica") == fault["replica"] and event.get("rank") == fault["rank"]
        )
        if seen_exit or (event["event"] == "retry" and event.get("replica") != fault["replica"]):
            return float(event["mono"] - fault["mono"])
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoin:
    """How the next life of a killed replica came back."""

    incarnation: str
    member_step: int  # the step of its first decision
    worker_step: int  # first step that it committed as WORKER
    worker_mono: float


def rejoin(run: Run, fault: Record) -> Rejoin | None:
    """The first life after the kill that trained again, or None."""
    dead = fault.get("incarnation")
    for commit in run.of("commit"):
        if commit["mono"] <= fault["mono"] or commit["replica"] != fault["replica"] or commit["incarnation"] == dead:
            continue
        if commit.get("role") != "worker":
            continue
        holding = (d for d in decisions(run).values() if _holds(d, fault["replica"], commit["incarnation"]))
        first = next(holding, None)
        if first is None:  # no leader's record of it is left
            continue
        return Rejoin(
            incarnation=commit["incarnation"],
            member_step=first["step"],
            worker_step=commit["step"],
            worker_mono=commit["mono"],
        )
    return None


def rejoin_gap(run: Run, fault: Record, back: Rejoin) -> Gap | None:
    """The survivors' longest gap from the newcomer's first decision to just after its first step as WORKER."""
    longest = None
    for replica in _replicas(run) - {fault["replica"]}:
        for gap in gaps(run, replica):
            around = back.member_step <= gap.step <= back.worker_step + AFTER_REJOIN_STEPS
            if around and (longest is None or gap.length > longest.length):
                longest = gap
    return longest


# --- the summary -----------------------------------------------------------------------------------------------


def kills(run: Run) -> list[Record]:
    """One entry per injected kill, with what it cost the survivors (seconds; None = it did not happen)."""
    usual = step_time_median_s(run, chain(run)) or 0.0
    rows = []
    for fault in run.faults:
        if fault.get("action") != "kill":
            continue
        pause, back = stall(run, fault), rejoin(run, fault)
        return_pause = rejoin_gap(run, fault, back) if back is not None else None
        rows.append(
            {
                "step": fault.get("step"),
                "phase": fault.get("phase"),
                "replica": fault["replica"],
                "rank": fault["rank"],
                "detected_s": _rounded(detected_s(run, fault)),
                "stall_s": None if pause is None else _rounded(max(0.0, pause.length - usual)),
                "rejoined_at_step": None if back is None else back.worker_step,
                "rejoined_after_s": None if back is None else _rounded(back.worker_mono - fault["mono"]),
                "rejoin_stall_s": None if return_pause is None else _rounded(max(0.0, return_pause.length - usual)),
            }
        )
    return rows


def summarize(run: Run) -> Record:
    """The summary as plain JSON values. Times in seconds."""
    links = chain(run)
    done = units(links)
    finals = {e["replica"]: e for e in run.of("final") if e["rank"] == 0}
    total = next((f["units_total"] for f in finals.values()), None)
    losses = losses_by_step(run, links)
    digests = {str(r): f["digest"] for r, f in sorted(finals.items())}
    missing = sorted(_replicas(run) - set(finals))
    return {
        "steps": len(links),
        "replicas": len(_replicas(run)),
        "kills": kills(run),
        "state_digest": digests,
        "replicas_without_digest": missing,
        "digests_equal": bool(digests) and not missing and len(set(digests.values())) == 1,
        "units_total": total,
        "units_committed": len(set(done)),
        "units_duplicated": sum(n - 1 for n in Counter(done).values()),
        "units_lost": len(lost_units(run, links)),
        "ledgers_agree": all(f["units_committed"] == len(set(done)) for f in finals.values()),
        "decisions_revoked": len({c["seq"] for c in run.of("commit")} - {d["seq"] for d in links}),
        "retries": len({e["seq"] for e in run.of("retry")}),
        "loss_first": next(iter(losses.values()), None),
        "loss_last": next(reversed(losses.values()), None),
        "step_time_median_s": _rounded(step_time_median_s(run, links)),
        "wall_s": _rounded(run.events[-1]["mono"] - run.events[0]["mono"]) if run.events else None,
    }


def losses_by_step(run: Run, links: Sequence[Record]) -> dict[int, float]:
    """The job-wide loss of each step of the chain that had one."""
    seqs = {d["seq"] for d in links}
    found = {c["step"]: c["loss"] for c in run.of("commit") if c["seq"] in seqs and c.get("loss") is not None}
    return dict(sorted(found.items()))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
