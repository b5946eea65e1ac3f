"""One picture of a run: the loss over steps, who took part over time, and each replica's life.

Stalls and kills are marked in all three, so that the eye can follow one failure from the loss down to the replica that died.
Needs matplotlib (`pip install 'keepstep[demo]'`); without it `draw` raises ConfigError. Draws without a display.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.observe.records import Record, Run
from keepstep.observe.summary import chain, decisions, losses_by_step, stall, step_times, summarize
from keepstep.protocol.errors import ConfigError

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
LOSS, WORKERS, CATCHING_UP, KILL, STALL = "#2f6fbb", "#3fa579", "#f0a429", "#d64545", "#f0b4b4"
NOTE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}  # text stays readable over lines
LIFE = {"up": WORKERS, "catching up": CATCHING_UP, "down": GRID}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A replica's condition over some time (monotonic seconds)."""

    state: str  # "up", "catching up" or "down" (also: starting)
    start: float
    end: float


def lives(run: Run, replica: int) -> list[Span]:
    """What the replica was, from the run's first event to its last, without holes."""
    if not run.events:
        return []
    changes: list[tuple[float, str]] = [(run.events[0]["mono"], "down")]
    changes += [(f["mono"], "down") for f in run.faults if f["replica"] == replica and f.get("action") == "kill"]
    changes += [(e["mono"], "down") for e in run.of("exit") if e.get("replica") == replica]
    dead = {f.get("incarnation"): f["mono"] for f in run.faults if f["replica"] == replica}
    for decision in decisions(run).values():
        for m in decision["members"]:
            if m["replica"] == replica and decision["mono"] < dead.get(m["incarnation"], float("inf")):
                changes.append((decision["mono"], "up" if m["role"] == "worker" else "catching up"))
    changes.sort(key=lambda change: change[0])
    merged = [c for i, c in enumerate(changes) if i == 0 or c[1] != changes[i - 1][1]]
    ends = [*(c[0] for c in merged[1:]), run.events[-1]["mono"]]
    return [Span(state=s, start=t, end=end) for (t, s), end in zip(merged, ends, strict=True) if end > t]


def draw(run: Run, path: Path, *, title: str = "Training goes on when a replica dies") -> None:
    """Writes the picture as PNG. Raises ConfigError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("the picture needs matplotlib: pip install 'keepstep[demo]'") from None
    with pyplot.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID}):
        figure, (top, middle, bottom) = pyplot.subplots(
            3, 1, figsize=(10.5, 8.6), height_ratios=[2.6, 1.5, 1.2], layout="constrained"
        )
        figure.suptitle(title, x=0.02, ha="left", fontsize=15, fontweight="bold")
        _loss(top, run)
        _members(middle, run)
        _lives(bottom, run)
        bottom.sharex(middle)
        for axes in (top, middle, bottom):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(color=GRID, labelcolor=FAINT)
        figure.savefig(path, dpi=130, facecolor="white")
        pyplot.close(figure)


def _loss(axes: Any, run: Run) -> None:
    links = chain(run)
    losses = losses_by_step(run, links)
    summary = summarize(run)
    axes.set_title(_subtitle(summary), loc="left", fontsize=10, color=FAINT, pad=10)
    axes.plot(list(losses), list(losses.values()), color=LOSS, linewidth=1.6)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    top = max(losses.values(), default=1.0)
    height = top - min(losses.values(), default=0.0)
    for number, kill in enumerate(summary["kills"]):
        y = top - 0.14 * height * (number % 3)
        if kill["step"] is not None:
            axes.axvline(kill["step"], color=KILL, linewidth=1.1)
            axes.annotate(
                f"kill -9 replica {kill['replica']}, rank {kill['rank']}\n{_words(kill['phase'])}, {_stalled(kill)}",
                (kill["step"], y),
                xytext=(5, 0),
                textcoords="offset points",
                va="top",
                fontsize=8.5,
                color=KILL,
                bbox=NOTE,
            )
        if kill["rejoined_at_step"] is not None:
            axes.axvline(kill["rejoined_at_step"], color=WORKERS, linewidth=1.1, linestyle=(0, (4, 3)))
            axes.annotate(
                f"replica {kill['replica']} back",
                (kill["rejoined_at_step"], y - 0.1 * height),
                xytext=(5, 0),
                textcoords="offset points",
                va="top",
                fontsize=8.5,
                color=WORKERS,
                bbox=NOTE,
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


def _stalled(kill: Record) -> str:
    return "survivors did not stall" if not kill["stall_s"] else f"survivors stalled {kill['stall_s']:.2f} s"


def _members(axes: Any, run: Run) -> None:
    links = chain(run)
    times = step_times(run, links)
    start = run.events[0]["mono"] if run.events else 0.0
    x = [times[d["step"]] - start for d in links]
    workers = [sum(m["role"] == "worker" for m in d["members"]) for d in links]
    members = [len(d["members"]) for d in links]
    axes.fill_between(x, members, step="pre", color=CATCHING_UP, linewidth=0, label="catching up")
    axes.fill_between(x, workers, step="pre", color=WORKERS, linewidth=0, label="workers")
    axes.set(ylabel="replicas in the step", ylim=(0, max(members, default=1) + 0.35))
    axes.yaxis.get_major_locator().set_params(integer=True)
    for number, (a, b) in enumerate(_stalls(run)):
        axes.axvspan(a - start, b - start, color=STALL, linewidth=0, label="stall" if number == 0 else None, zorder=3)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False, fontsize=8.5, borderaxespad=0.1)


def _stalls(run: Run) -> Iterator[tuple[float, float]]:
    """Where the survivors' commits were further apart than usual: the part beyond the usual."""
    usual = summarize(run)["step_time_median_s"] or 0.0
    for fault in run.faults:
        gap = stall(run, fault) if fault.get("action") == "kill" else None
        if gap is not None and gap.length > usual:
            yield gap.start + usual, gap.end


def _lives(axes: Any, run: Run) -> None:
    start = run.events[0]["mono"] if run.events else 0.0
    replicas = sorted({e["replica"] for e in run.events if e["event"] in ("spawn", "commit")})
    for replica in replicas:
        for span in lives(run, replica):
            axes.barh(
                replica,
                span.end - span.start,
                left=span.start - start,
                height=0.55,
                color=LIFE[span.state],
                linewidth=0,
            )
    for fault in run.faults:
        if fault.get("action") == "kill":
            axes.plot(fault["mono"] - start, fault["replica"], marker="x", color=KILL, markersize=8, markeredgewidth=2)
    axes.set(xlabel="seconds", yticks=replicas, yticklabels=[f"replica {r}" for r in replicas])
    axes.invert_yaxis()
    patches = [axes.barh([0], [0], color=color, label=state) for state, color in LIFE.items()]
    axes.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=3,
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.1,
    )
