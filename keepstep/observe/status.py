"""`keepstep status`: how a job does, from its run directory or from its store.

A run directory knows the past too: ETTR, failures. The store knows only the present, but from anywhere.
Fails: ConfigError with one sentence if there is no such run, StoreError if no store answers, or it does not know the job.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keepstep.observe.findings import Findings
from keepstep.observe.goodput import NS
from keepstep.observe.history import History, Life, role
from keepstep.observe.records import Record, Run, read_run
from keepstep.observe.report import duration, title
from keepstep.protocol.errors import ConfigError, StoreError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.messages import Kind
from keepstep.protocol.reasons import names
from keepstep.protocol.roster import Roster
from keepstep.runtime.etcd import EtcdStore, JobRecord
from keepstep.runtime.etcd_view import StoreView

LAST = 5  # incidents shown
ANSWER_S = 5.0  # for the store


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica, now."""

    replica: int
    doing: str  # worker, catching_up, starting, left_out, dead, done, left, given_up, absent
    incarnation: str | None = None
    step: int | None = None  # of the state that it holds
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """One host of a job that agents run, now."""

    host: str
    doing: str  # in the pool, drained, away (the lease of its agent has ended)
    slots: int | None
    label: str
    replicas: tuple[int, ...]  # that it keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A job, now. What is not known is None."""

    job: str
    state: str  # starting, running, complete, failed, lost (its launcher is gone)
    words: str
    replicas: tuple[ReplicaStatus, ...]
    num_replicas: int
    step: int | None  # that is being trained
    quorum_id: int | None
    seq: int | None
    spares: int = 0  # that wait on the launcher's machine; the store does not know of them
    loss: float | None = None
    findings: Findings | None = None
    hosts: tuple[HostStatus, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        found = self.findings
        plain = {name: getattr(self, name) for name in ("job", "state", "words", "num_replicas", "step", "quorum_id")}
        return {
            **plain,
            "seq": self.seq,
            "spares": self.spares,
            "loss": self.loss,
            "workers": sum(r.doing == "worker" for r in self.replicas),
            "replicas": [asdict(r) for r in self.replicas],
            "hosts": [asdict(h) for h in self.hosts],
            "goodput": None if found is None else found.goodput.as_json(),
            "incidents": None if found is None else [i.as_json() for i in found.incidents[-LAST:]],
        }


# --- from the run directory ------------------------------------------------------------------------------------


def of_run_dir(run_dir: Path) -> Status:
    """Reads the run's records. Raises ConfigError."""
    if not run_dir.is_dir():
        raise ConfigError(f"there is no directory {run_dir}: name the --run-dir of a run, or use --store and --job")
    run = read_run(run_dir)
    if not run.events:
        raise ConfigError(f"{run_dir} holds no events of a run: name the --run-dir of `keepstep run`")
    alive = any(_is_launcher(e.get("pid")) for e in run.of("start"))
    return of_run(run, title(run_dir), now=time.monotonic() if alive else None)


def _is_launcher(pid: int | None) -> bool:
    """Whether that process of this machine is a keepstep."""
    try:
        return pid is not None and b"keepstep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def of_run(run: Run, job: str, *, now: float | None) -> Status:
    """What the records say. `now`: monotonic seconds, if the launcher lives."""
    ends = run.of("end")
    findings = Findings.of(run, until=None if ends else now)
    history = findings.history
    newest = history.decisions[max(history.decisions)] if history.decisions else None
    if ends:
        code = ends[-1].get("code")
        state, words = (
            ("complete", "the job is complete") if code == 0 else ("failed", f"it ended with exit code {code}")
        )
    elif now is None:
        state, words = "lost", "its records have no end, and its launcher is not on this machine any more"
    elif newest is None:
        state, words = "starting", "no step is decided yet"
    else:
        state, words = "running", str(newest.get("reason") or "")
    losses = history.losses
    return Status(
        job=job,
        state=state,
        words=words,
        replicas=tuple(_replica(history, r, lives, newest) for r, lives in history.lives.items()),
        num_replicas=len(history.replicas),
        step=None if newest is None else newest["step"],
        quorum_id=None if newest is None else newest.get("quorum_id"),
        seq=None if newest is None else newest["seq"],
        spares=0 if ends or now is None else _spares(run),
        loss=next(reversed(losses.values()), None),
        findings=findings,
    )


def _spares(run: Run) -> int:
    """How many wait. Of those of a launcher before, which left no word of their end, none does."""
    since = max((e["mono"] for e in run.of("start")), default=0.0)
    newest = {str(e.get("number")): e.get("state") for e in run.of("spare") if e["mono"] >= since}
    return sum(state == "ready" for state in newest.values())


def _replica(history: History, replica: int, lives: tuple[Life, ...], newest: Record | None) -> ReplicaStatus:
    gave_up = [e for e in history.of("gave_up") if e.get("replica") == replica]
    life = lives[-1] if lives else None
    if gave_up and (life is None or gave_up[-1]["mono"] >= life.started):  # else it was asked back
        return ReplicaStatus(replica=replica, doing="given_up", words=str(gave_up[-1].get("reason") or ""))
    if life is None:
        return ReplicaStatus(replica=replica, doing="absent")
    commits = life.own("commit")
    step = commits[-1]["step"] + 1 if commits else None
    does = None if newest is None else role(newest, replica, life.incarnation)
    if any(e["event"] == "final" for e in life.events):
        doing = "done"
    elif any(e["event"] == "left" for e in life.events):
        doing = "left"
    elif life.died is not None:
        doing = "dead"
    else:
        doing = does or ("starting" if not life.own("decision") else "left_out")
    return ReplicaStatus(replica=replica, doing=doing, incarnation=life.incarnation, step=step)


# --- from the store --------------------------------------------------------------------------------------------


def of_store(url: str, job: str) -> Status:
    """Asks the store once. Raises ConfigError or StoreError."""

    async def ask() -> tuple[JobRecord | None, StoreView]:
        try:
            store = await EtcdStore.open(url, job, timeout=ANSWER_S)
        except StoreError:
            raise StoreError(f"no etcd answers at {url}: is the address right, and does it run?") from None
        try:
            return await store.job_record(), await store.read()
        finally:
            await store.close()

    record, view = asyncio.run(ask())
    if record is None:
        raise StoreError(f"the store at {url} knows no job {job!r}: is the name right?")
    return of_view(record, view, job)


def of_view(record: JobRecord, view: StoreView, job: str) -> Status:
    """What the store knows."""
    last = view.last
    roles = {} if last is None else {m.replica_id: m for m in last.members}
    replicas = []
    for r in sorted({*range(min(record.num_replicas, 1 << 16)), *roles, *view.reports}):
        member, report = roles.get(r), view.reports[r][0] if r in view.reports else None
        life = report.incarnation if report is not None else member.incarnation if member is not None else None
        if last is not None and last.kind is Kind.END:
            doing = "done" if member is not None else "absent"
        elif report is None or report.incarnation in view.dead:
            doing = "absent" if life is None else "dead"
            if r in view.announced and (life is None or life in view.dead):
                doing = "starting"
        elif member is not None and member.incarnation == report.incarnation:
            doing = member.role.value
        else:
            doing = "starting"
        state = None if report is None else report.state
        step = None if state is None else state.step
        replicas.append(ReplicaStatus(replica=r, doing=doing, incarnation=life, step=step))
    if last is not None and last.kind is Kind.END:
        state_, words = "complete", "the job is complete"
    elif last is None:
        state_, words = "starting", "no step is decided yet"
    elif not view.reports:
        state_, words = "lost", "no replica reports: the job was ended, or everything of it died"
    else:
        state_, words = "running", last.reason
    return Status(
        job=job,
        state=state_,
        words=words,
        replicas=tuple(replicas),
        num_replicas=record.num_replicas,
        step=None if last is None else last.step,
        quorum_id=None if last is None else last.quorum_id,
        seq=None if last is None else last.seq,
        hosts=_hosts(view.roster),
    )


def _hosts(roster: Roster) -> tuple[HostStatus, ...]:
    keeping: dict[str, list[int]] = {}
    for replica, at in sorted(roster.places.items()):
        keeping.setdefault(at.host, []).append(replica)
    found = []
    for name in sorted(roster.hosts.keys() | keeping.keys() | roster.drained.keys()):
        host = roster.hosts.get(name)
        found.append(
            HostStatus(
                host=name,
                doing="drained" if name in roster.drained else "away" if host is None else "in the pool",
                slots=None if host is None else host.slots,
                label="" if host is None else host.label,
                replicas=tuple(keeping.get(name, ())),
            )
        )
    return tuple(found)


# --- for people, and for Prometheus ----------------------------------------------------------------------------


def in_words(status: Status) -> str:
    """Some lines."""
    head = f"{status.job}: {status.state}"
    if status.step is not None and status.state in ("running", "lost", "failed"):
        working = sum(r.doing == "worker" for r in status.replicas)
        head += f", step {status.step}, {working} of {status.num_replicas} replicas train, quorum_id {status.quorum_id}"
    lines = [head, *([f"  {status.words}"] if status.words else [])]
    for r in status.replicas:
        step = "" if r.step is None else f"state {r.step}"
        row = f"  replica {r.replica:<3d} {r.doing.replace('_', ' '):12s} {step:12s} {r.words}"
        lines.append(row.rstrip())
    if status.spares:
        lines.append(f"  spares: {status.spares}")
    for h in status.hosts:
        keeps = names(map(ReplicaId, h.replicas)) if h.replicas else "nothing"
        about = [h.label] if h.label else []
        about += [f"{h.slots} slot{'s' if h.slots != 1 else ''}"] if h.slots is not None else []
        lines.append(f"  host {h.host}: {h.doing}, keeps {keeps}" + (f" ({', '.join(about)})" if about else ""))
    if status.findings is not None:
        lines += _past(status.findings)
    return "\n".join(lines)


def _past(findings: Findings) -> Iterable[str]:
    goodput, incidents = findings.goodput, findings.incidents
    if goodput.ettr_replica is not None and goodput.ettr_wall is not None:
        yield (
            f"  ETTR {100 * goodput.ettr_replica:.1f} % of replica-seconds, {100 * goodput.ettr_wall:.1f} % of the wall clock, "
            f"in {duration(goodput.elapsed / NS)}"
        )
    yield f"  failures: {len(incidents)}" + (f", the last {LAST}:" if len(incidents) > LAST else "")
    for i in incidents[-LAST:]:
        back = "not back" if i.worker is None else f"back after {i.after('worker'):.1f} s"
        stall = "" if i.stall_s is None else f", survivors stalled {i.stall_s:.2f} s"
        yield f"    replica {i.replica}, step {'-' if i.step is None else i.step}: {i.cause}{stall}; {back}"


def for_prometheus(status: Status) -> str:
    """The text format, for a textfile collector. No labels: one job, one file."""
    lines = []

    def add(name: str, kind: str, value: float | None) -> None:
        if value is not None:
            lines.extend([f"# TYPE keepstep_{name} {kind}", f"keepstep_{name} {value:.9g}"])

    if status.findings is not None:
        for state, ns in status.findings.goodput.totals().items():
            add(f"{state.value}_seconds_total", "counter", ns / NS)
        add("incidents_total", "counter", len(status.findings.incidents))
        add("ettr_replica_ratio", "gauge", status.findings.goodput.ettr_replica)
        add("ettr_wall_ratio", "gauge", status.findings.goodput.ettr_wall)
    add("step", "gauge", status.step)
    add("quorum_id", "gauge", status.quorum_id)
    add("replicas", "gauge", status.num_replicas)
    add("spares", "gauge", status.spares)
    add("workers", "gauge", sum(r.doing == "worker" for r in status.replicas))
    return "\n".join(lines) + "\n"
