"""One picture of a run: the loss over steps, who took part over time, and what each replica was doing.

Stalls and kills are marked in all three, so that the eye can follow one failure from the loss down to the replica that died.
Fails: ConfigError without matplotlib.
"""

from pathlib import Path
from typing import Any

from keepstep.observe import plots
from keepstep.observe.findings import Findings
from keepstep.observe.incidents import Incident
from keepstep.observe.plots import FAINT, LOST, NOTE, WORKERS
from keepstep.observe.records import Record, Run
from keepstep.observe.summary import summarize


def draw(run: Run, path: Path, *, title: str = "Training goes on when a replica dies") -> None:
    """Writes the picture as PNG. Raises ConfigError without matplotlib."""
    pyplot, findings = plots.pyplot(), Findings.of(run)
    with pyplot.rc_context(plots.STYLE):
        figure, (top, middle, bottom) = pyplot.subplots(
            3, 1, figsize=(10.5, 8.6), height_ratios=[2.6, 1.5, 1.2], layout="constrained"
        )
        figure.suptitle(title, x=0.02, ha="left", fontsize=15, fontweight="bold")
        plots.loss(top, findings)
        top.set_title(_subtitle(summarize(run, findings)), loc="left", fontsize=10, color=FAINT, pad=10)
        _notes(top, findings)
        plots.members(middle, findings)
        plots.legend_of_states(bottom, plots.timeline(bottom, findings))
        middle.sharex(bottom)
        middle.set_xlabel("")
        figure.savefig(path, dpi=130, facecolor="white")
        pyplot.close(figure)


def _notes(axes: Any, findings: Findings) -> None:
    """What was killed, what it cost, and when it was back, beside the lines of the loss."""
    losses = findings.history.losses.values()
    top = max(losses, default=1.0)
    height = top - min(losses, default=0.0)
    for number, kill in enumerate(i for i in findings.incidents if i.action == "kill"):
        y = top - 0.14 * height * (number % 3)
        if kill.step is not None:
            words = f"kill -9 replica {kill.replica}, rank {kill.rank}\n{_words(kill.phase)}, {_stalled(kill)}"
            _note(axes, words, kill.step, y, LOST)
        if kill.worker_step is not None:
            _note(axes, f"replica {kill.replica} back", kill.worker_step, y - 0.1 * height, WORKERS)


def _note(axes: Any, words: str, x: float, y: float, color: str) -> None:
    axes.annotate(
        words, (x, y), xytext=(5, 0), textcoords="offset points", va="top", fontsize=8.5, color=color, bbox=NOTE
    )


def _subtitle(summary: Record) -> str:
    equal = "all replicas equal bit for bit" if summary["digests_equal"] else "REPLICAS DIFFER OR ARE MISSING"
    parts = [
        f"{summary['steps']} steps",
        f"{summary['units_committed']} units trained, {summary['units_lost']} lost, {summary['units_duplicated']} twice",
        equal,
    ]
    return "   ·   ".join(parts)


def _words(phase: object) -> str:
    return str(phase or "at any time").replace("_", " ")


def _stalled(kill: Incident) -> str:
    return "survivors did not stall" if not kill.stall_s else f"survivors stalled {kill.stall_s:.2f} s"
