"""`keepstep report`: one self-contained HTML page of what a run came to. No script, nothing from elsewhere.

Everything that comes from the run's records is escaped: reasons and causes are whatever some process said.
Fails: ConfigError if there is no run in the directory, it cannot be written to, or matplotlib is missing.
"""

import io
import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from keepstep.observe import plots
from keepstep.observe.findings import Findings
from keepstep.observe.goodput import NS, State
from keepstep.observe.hosts import Clock, read_hosts, run_directories
from keepstep.observe.incidents import Incident
from keepstep.observe.records import Record, Run
from keepstep.observe.summary import summarize
from keepstep.protocol.errors import ConfigError
from keepstep.version import __version__

ROWS_MAX = 200  # of the table of incidents
CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; margin: 0 auto; max-width: 62rem;
       padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p, .note { color: #52606d; margin: .2rem 0 .8rem; max-width: 44rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin: 1.2rem 0; }
.facts div { border: 1px solid #e4e7eb; border-radius: .5rem; padding: .5rem .75rem; }
.facts b { display: block; font-size: 1.25rem; font-weight: 600; }
.facts span { color: #52606d; font-size: .85rem; }
.bad b { color: #c93c3c; }
.wide { overflow-x: auto; }
.wide svg { display: block; width: 100%; min-width: 40rem; height: auto; }
.bar { display: flex; height: 1.1rem; border-radius: .3rem; overflow: hidden; margin: .6rem 0 .8rem; }
.bar i { display: block; min-width: 1px; }
.key { display: inline-block; width: .75rem; height: .75rem; border-radius: .15rem; margin-right: .45rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th { text-align: left; font-weight: 600; color: #52606d; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #e4e7eb; vertical-align: top; white-space: nowrap; }
td.words { white-space: normal; min-width: 14rem; }
.n { text-align: right; }
"""
MEANING = {
    State.PRODUCTIVE: "training steps that stayed",
    State.DATA_WAIT: "waiting for the batch",
    State.CKPT_BLOCKING: "held up by a checkpoint",
    State.QUORUM_WAIT: "waiting for a decision",
    State.STALL: "waiting because another replica was lost or came back, or left out although alive",
    State.DETECT: "dead, and nobody had noticed",
    State.RESTART: "the next life starts",
    State.TRANSFER: "fetching the state",
    State.CATCH_UP: "loading and replaying",
    State.DISCARDED: "computed, and not kept",
    State.INIT: "the first life starts",
    State.SPARE: "waiting to take over",
    State.IDLE: "done, or given up",
    State.UNATTRIBUTED: "no record says",
}


def write_report(*paths: Path) -> Path:
    """report.html in the first of them, of what there is: also while the run goes on. `paths`: run directories of one job, or
    directories that hold them. Raises ConfigError."""
    directories = run_directories(paths)
    run, clocks = read_hosts(directories)
    if not run.events:
        raise ConfigError(f"{paths[0]} holds no events of a run: name the --run-dir of `keepstep run`")
    jobs = {title(d) for d in directories if (d / "run.json").exists()}
    if len(jobs) > 1:
        raise ConfigError(f"these are the records of several jobs, {', '.join(sorted(jobs))}: name those of one")
    path = paths[0] / "report.html"
    try:
        path.write_text(render(run, next(iter(jobs), title(paths[0])), clocks), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return path


def title(run_dir: Path) -> str:
    """The job's name if it is known."""
    try:
        about = json.loads((run_dir / "run.json").read_text())
        return str(about["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return run_dir.resolve().name


def render(run: Run, name: str, clocks: Sequence[Clock] = ()) -> str:
    """The whole page. `clocks`: whose records these are."""
    findings = Findings.of(run)
    summary = summarize(run, findings)
    parts = [
        f"<h1>{escape(name)}</h1>",
        f"<p>{escape(_verdict(run, summary))}</p>",
        _facts(findings, summary),
        _figure("What each replica was doing", _timeline_note(findings), _drawn(findings, _timeline, rows=True)),
        _where(findings),
        _figure(
            "Effective training time",
            "Productive replica-seconds over all replica-seconds.",
            _drawn(findings, plots.ettr),
        ),
        _figure("Who took part", "Members of each step that stayed.", _drawn(findings, plots.members)),
    ]
    if findings.history.losses:
        note = "Red: a replica was lost in this step. Green: one trained again from this step on."
        parts.append(_figure("Loss", note, _drawn(findings, plots.loss)))
    parts.append(_incidents(findings.incidents))
    if sum(len(clock.names) for clock in clocks) > 1:
        parts.append(_hosts(clocks))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head><title>{escape(name)}</title>{head}</head>\n<body>\n'
        + "\n".join(parts)
        + f"\n<p>keepstep {escape(__version__)}</p>\n</body></html>\n"
    )


# --- numbers ---------------------------------------------------------------------------------------------------


def _end(run: Run) -> Record | None:
    """The job's. One of several agents may end before, by a signal or for good, while the others go on."""
    ends = run.of("end")
    if len(run.of("start")) > len(ends):
        ends = [e for e in ends if (e.get("code") or 0) < 128]
    decided = max((d["mono"] for d in run.of("decision")), default=0.0)
    return ends[-1] if ends and ends[-1]["mono"] >= decided else None


def _verdict(run: Run, summary: dict[str, Any]) -> str:
    end = _end(run)
    if end is None:
        return "The records end without the run's end: it goes on, or its launcher was killed."
    if end.get("code") != 0:
        return f"The job ended with exit code {end.get('code')}."
    same = (
        "all replicas ended with the same bits"
        if summary["digests_equal"]
        else "not every replica ended with the same bits"
    )
    return f"The job is complete; {same}."


def _facts(findings: Findings, summary: dict[str, Any]) -> str:
    goodput = findings.goodput
    stalls = [i.stall_s for i in findings.incidents if i.stall_s is not None]
    facts = [
        (_percent(goodput.ettr_replica), "ETTR, replica-seconds", False),
        (_percent(goodput.ettr_wall), "ETTR, wall clock", False),
        (duration(goodput.elapsed / NS), "elapsed", False),
        (f"{summary['steps']:,}", "steps", False),
        (_seconds(findings.history.usual_step_s), "usual step", False),
        (f"{len(findings.incidents):,}", "failures", False),
        (_seconds(max(stalls, default=None)), "longest stall", False),
        (f"{summary['units_committed']:,}", "units of data trained", False),
        (f"{summary['units_lost']} / {summary['units_duplicated']}", "units lost / trained twice",
         bool(summary["units_lost"] or summary["units_duplicated"])),
    ]  # fmt: skip
    if summary["events_lost"]:
        facts.append((f"{summary['events_lost']:,}", "events lost", True))
    cells = (
        f"<div{' class=bad' if bad else ''}><b>{escape(value)}</b><span>{escape(words)}</span></div>"
        for value, words, bad in facts
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def _where(findings: Findings) -> str:
    totals = {state: ns for state, ns in findings.goodput.totals().items() if ns}
    everything = sum(totals.values()) or 1
    bar = "".join(
        f'<i style="flex:{ns / everything:.6f};background:{plots.COLOURS[s]}" title="{s.value}"></i>'
        for s, ns in totals.items()
    )
    rows = (
        [
            f'<span class="key" style="background:{plots.COLOURS[state]}"></span>{state.value}',
            f"{ns / NS:,.1f}",
            f"{100 * ns / everything:.2f} %",
            escape(MEANING[state]),
        ]
        for state, ns in totals.items()
    )
    table = _table(["state", "replica-seconds", "share", "what it is"], rows, numbers=(1, 2), words=(3,))
    return (
        '<h2>Where the time went</h2><p>Every second of every replica is in exactly one state.</p><div class="bar">'
        f"{bar}</div>{table}"
    )


def _incidents(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return "<h2>Failures</h2><p>None.</p>"
    heads = ["at step", "replica", "what", "seen after", "new decision", "survivors' stall", "restarted", "reported"]
    heads += ["fetched", "worker again", "cost of the return"]
    rows = (
        [
            "-" if i.step is None else str(i.step),
            f"{i.replica}" if i.rank is None else f"{i.replica}, rank {i.rank}",
            escape(f"{i.cause}, {i.phase.replace('_', ' ')}" if i.phase else i.cause)
            + (f"<br>given up: {escape(i.gave_up)}" if i.gave_up else ""),
            _seconds(i.detected_s),
            _seconds(i.after("decided")),
            _seconds(i.stall_s),
            *(_seconds(i.after(point)) for point in ("restarted", "reported", "fetched", "worker")),
            _seconds(i.rejoin_stall_s),
        ]
        for i in incidents[-ROWS_MAX:]
    )
    shown = f"The last {ROWS_MAX} of {len(incidents)}. " if len(incidents) > ROWS_MAX else ""
    note = f"{shown}Times count from the failure; stalls are what a step took beyond the usual."
    return f"<h2>Failures</h2><p>{note}</p>{_table(heads, rows, numbers=tuple(range(3, 11)), words=(2,))}"


def _hosts(clocks: Sequence[Clock]) -> str:
    rows = ([escape(", ".join(clock.names)), f"{clock.shift_s:+,.3f} s", escape(clock.words)] for clock in clocks)
    note = (
        "Whose records these are. Each host has a clock of its own: what was added to its times, and how exact that is."
    )
    table = _table(["records", "added", "how exact"], rows, numbers=(1,), words=(0, 2))
    return f"<h2>Hosts</h2><p>{note}</p>{table}"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: tuple[int, ...], words: tuple[int, ...]
) -> str:
    kinds = [' class="n"' if i in numbers else ' class="words"' if i in words else "" for i in range(len(heads))]
    top = "".join(f"<th{kind}>{escape(head)}</th>" for kind, head in zip(kinds, heads, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


# --- pictures --------------------------------------------------------------------------------------------------


def _figure(head: str, note: str, svg: str) -> str:
    return f'<h2>{escape(head)}</h2><p>{escape(note)}</p><div class="wide">{svg}</div>'


def _timeline(axes: Any, findings: Findings) -> None:
    plots.legend_of_states(axes, plots.timeline(axes, findings))


def _timeline_note(findings: Findings) -> str:
    return "A red mark is a failure." if findings.incidents else "No failures."


def _drawn(findings: Findings, draw: Callable[[Any, Findings], None], *, rows: bool = False) -> str:
    """As SVG, without the XML around it."""
    pyplot = plots.pyplot()
    height = min(9.0, 1.5 + 0.42 * len(findings.goodput.slots)) if rows else 2.5
    with pyplot.rc_context(plots.STYLE):
        figure, axes = pyplot.subplots(figsize=(9.6, height), layout="constrained")
        draw(axes, findings)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


# --- small parts -----------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """4.2 s, 3 min 20 s, 5 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
