"""What a run came to: from its records (`observe.records`) to the summary. Pure.

Fails: missing events give None or an empty list, never a guess.
Source: FT-HSDP section 6 (every batch exactly once); what recovery costs the survivors, as in section 7.
"""

from collections import Counter

from keepstep.observe.findings import Findings
from keepstep.observe.history import History, units
from keepstep.observe.incidents import Incident
from keepstep.observe.records import Record, Run


def lost_units(history: History) -> list[int]:
    """Units that should have been committed and were not.

    Where the replicas' own ledgers say that all data is trained, that is whatever the chain lacks. A job that ended at max_steps
    may have left gaps only for units that a retry of its last step gave back: no step was left to train them in.
    (For `data_policy="pool"`; with "stream", the units of a dead replica rightly wait for it.)
    """
    run, links = history.run, history.chain
    done = set(units(links))
    if not done:
        return []
    for final in run.of("final"):
        if final["units_total"] is not None and final["units_committed"] >= final["units_total"]:
            return sorted(set(range(final["units_total"])) - done)
    last_step = links[-1]["step"]
    given_back = {u for d in history.decisions.values() if d["step"] >= last_step for u in units([d])}
    return sorted(set(range(max(done))) - done - given_back)


def kill_row(incident: Incident) -> Record:
    """An injected kill, with what it cost the survivors (seconds; None = it did not happen)."""
    return {
        "step": incident.step,
        "phase": incident.phase,
        "replica": incident.replica,
        "rank": incident.rank,
        "detected_s": _rounded(incident.detected_s),
        "stall_s": incident.stall_s,
        "rejoined_at_step": incident.worker_step,
        "rejoined_after_s": _rounded(incident.after("worker")),
        "rejoin_stall_s": incident.rejoin_stall_s,
    }


def summarize(run: Run, findings: Findings | None = None) -> Record:
    """The summary as plain JSON values. Times in seconds. `findings`: of this run, if they are known already."""
    findings = findings or Findings.of(run)
    history, found = findings.history, findings.incidents
    done = units(history.chain)
    finals = {e["replica"]: e for e in run.of("final") if e["rank"] == 0}
    total = next((f["units_total"] for f in finals.values()), None)
    losses = history.losses
    missing = sorted(set(history.replicas) - set(finals))
    return {
        "steps": len(history.chain),
        "replicas": len(history.replicas),
        "kills": [kill_row(i) for i in found if i.action == "kill"],
        "incidents": [i.as_json() for i in found],
        "goodput": findings.goodput.as_json(),
        "state_digest": {str(r): f["digest"] for r, f in sorted(finals.items())},
        "replicas_without_digest": missing,
        "digests_equal": bool(finals) and not missing and len({f["digest"] for f in finals.values()}) == 1,
        "units_total": total,
        "units_committed": len(set(done)),
        "units_duplicated": sum(n - 1 for n in Counter(done).values()),
        "units_lost": len(lost_units(history)),
        "ledgers_agree": all(f["units_committed"] == len(set(done)) for f in finals.values()),
        "decisions_revoked": len({c["seq"] for c in run.of("commit")} - history.kept),
        "retries": len({e["seq"] for e in run.of("retry")}),
        "loss_first": next(iter(losses.values()), None),
        "loss_last": next(reversed(losses.values()), None),
        "step_time_median_s": _rounded(history.usual_step_s),
        "wall_s": _rounded(run.events[-1]["mono"] - run.events[0]["mono"]) if run.events else None,
        "events_lost": sum(e["count"] for e in run.of("events_lost")),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
