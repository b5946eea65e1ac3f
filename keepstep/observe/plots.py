"""The plots that `keepstep demo` and `keepstep report` draw: pure drawing on matplotlib axes.

Time runs from the run's first event, in seconds, minutes or hours. However long a run was, a plot has a bounded number of shapes.
Needs matplotlib (`pip install 'keepstep[demo]'`); without it ConfigError. Draws without a display.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from keepstep.observe.findings import Findings
from keepstep.observe.goodput import NS, Segment, State
from keepstep.protocol.errors import ConfigError

INK, FAINT, GRID = "#1f2933", "#6b7785", "#e4e7eb"
LOSS, WORKERS, CATCHING_UP, LOST = "#2f6fbb", "#4c9f70", "#f0a429", "#c93c3c"
NOTE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}  # text stays readable over lines
COLOURS = {
    State.PRODUCTIVE: WORKERS,
    State.DATA_WAIT: "#b5d8a6",
    State.CKPT_BLOCKING: "#8f7fc0",
    State.QUORUM_WAIT: "#e8d48a",
    State.STALL: "#e0605e",
    State.DETECT: "#7a1f2b",
    State.RESTART: "#b3bac3",
    State.TRANSFER: CATCHING_UP,
    State.CATCH_UP: "#f8d59b",
    State.DISCARDED: "#e39c82",
    State.INIT: "#d5dbe1",
    State.SPARE: "#9cc3e6",
    State.IDLE: "#eef1f4",
    State.UNATTRIBUTED: "#d9b8d9",
}
SHAPES_MAX = 1500  # of a slot in the time line, and points of a curve
STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "keepstep",  # the same run gives the same file
}


def pyplot() -> Any:
    """matplotlib.pyplot, without a display."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'keepstep[demo]'") from None
    return pyplot


def plain(axes: Any) -> None:
    """No frame, quiet ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(color=GRID, labelcolor=FAINT)
    axes.set_axisbelow(True)


def unit_of_time(elapsed: int) -> tuple[str, float]:
    """For an axis of so many nanoseconds: its unit, and nanoseconds per unit."""
    if elapsed < 600 * NS:
        return "seconds", float(NS)
    return ("minutes", 60.0 * NS) if elapsed < 4 * 3600 * NS else ("hours", 3600.0 * NS)


def thin(segments: Sequence[Segment], least: int) -> list[Segment]:
    """The same time in fewer segments: what is shorter than `least` is drawn as what there was most of around it."""
    found: list[Segment] = []
    short: list[Segment] = []

    def draw(start: int, end: int, state: State) -> None:
        if found and found[-1].state is state:
            start = found.pop().start
        found.append(Segment(start, end, state))

    def settle() -> None:
        if short:
            spent: Counter[State] = Counter()
            for s in short:
                spent[s.state] += s.end - s.start
            draw(short[0].start, short[-1].end, spent.most_common(1)[0][0])
            short.clear()

    for s in segments:
        if s.end - s.start >= least:
            settle()
            draw(s.start, s.end, s.state)
        else:
            short.append(s)
            if short[-1].end - short[0].start >= least:
                settle()
    settle()
    return found


def every(points: Sequence[Any], most: int = SHAPES_MAX) -> list[Any]:
    """At most so many of the points (and the last one), evenly chosen."""
    step = max(1, math.ceil(len(points) / most))
    return [*points[:-1:step], *points[-1:]]


# --- plots -----------------------------------------------------------------------------------------------------


def timeline(axes: Any, findings: Findings) -> list[State]:
    """A row a replica, coloured by state, with a cross where a failure began. Returns the states that occur."""
    goodput = findings.goodput
    name, unit = unit_of_time(goodput.elapsed)
    least = goodput.elapsed // SHAPES_MAX
    for row, segments in enumerate(goodput.slots.values()):
        drawn = thin(segments, least)
        for state in {s.state for s in drawn}:
            bars = [((s.start - goodput.start) / unit, (s.end - s.start) / unit) for s in drawn if s.state is state]
            axes.broken_barh(bars, (row - 0.36, 0.72), color=COLOURS[state], linewidth=0)
    rows = {replica: row for row, replica in enumerate(goodput.slots)}
    for incident in every(findings.incidents):
        at = (round(incident.fault * NS) - goodput.start) / unit
        axes.plot(at, rows[incident.replica] - 0.44, marker="v", color=LOST, markersize=6, markeredgewidth=0)
    axes.set(xlabel=name, xlim=(0, max(goodput.elapsed / unit, 1e-9)), ylim=(len(rows) - 0.5, -0.7))
    shown = every(list(rows.items()), 40)
    axes.set_yticks([row for _, row in shown], [f"replica {replica}" for replica, _ in shown])
    plain(axes)
    totals = goodput.totals()
    return [state for state in State if totals[state]]


def legend_of_states(axes: Any, states: Iterable[State]) -> None:
    """Beside the axes, so that however many there are, nothing is hidden."""
    patches = [axes.barh([0], [0], color=COLOURS[s], label=s.value.replace("_", " ")) for s in states]
    axes.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=6, frameon=False, fontsize=8.5,
        borderaxespad=0.1, handlelength=1.0, columnspacing=1.2,
    )  # fmt: skip


def members(axes: Any, findings: Findings) -> None:
    """Who took part in the steps that stayed, over time; red where survivors stalled."""
    history, goodput = findings.history, findings.goodput
    name, unit = unit_of_time(goodput.elapsed)
    links = every([d for d in history.chain if d["step"] in history.step_times])
    x = [(round(history.step_times[d["step"]] * NS) - goodput.start) / unit for d in links]
    workers = [sum(m.get("role") == "worker" for m in d["members"]) for d in links]
    everybody = [len(d["members"]) for d in links]
    axes.fill_between(x, everybody, step="pre", color=CATCHING_UP, linewidth=0, label="catching up")
    axes.fill_between(x, workers, step="pre", color=WORKERS, linewidth=0, label="workers")
    end = max(goodput.elapsed / unit, 1e-9)
    axes.set(ylabel="replicas", xlabel=name, xlim=(0, end), ylim=(0, max(everybody, default=1) + 0.35))
    axes.yaxis.get_major_locator().set_params(integer=True)
    for number, (a, b) in enumerate(every(goodput.when(State.STALL))):
        label = "stall" if number == 0 else None
        axes.axvspan(
            (a - goodput.start) / unit, (b - goodput.start) / unit, color=COLOURS[State.STALL], lw=0, label=label
        )
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False, fontsize=8.5, borderaxespad=0.1)
    plain(axes)


def loss(axes: Any, findings: Findings) -> None:
    """Over steps, with a line at every failure."""
    points = every([(step, value) for step, value in findings.history.losses.items() if math.isfinite(value)])
    axes.plot([step for step, _ in points], [value for _, value in points], color=LOSS, linewidth=1.6)
    for incident in every(findings.incidents, 200):
        if incident.step is not None:
            axes.axvline(incident.step, color=LOST, linewidth=0.9, alpha=0.8)
        if incident.worker_step is not None:
            axes.axvline(incident.worker_step, color=WORKERS, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    plain(axes)


def ettr(axes: Any, findings: Findings) -> None:
    """Since the beginning, and of the last twentieth of the run at each time."""
    goodput = findings.goodput
    name, unit = unit_of_time(goodput.elapsed)
    rows = goodput.ettr_over_time(points=240, window=max(1, goodput.elapsed // 20))
    x = [(at - goodput.start) / unit for at, _, _ in rows]
    axes.plot(x, [100 * trailing for _, _, trailing in rows], color="#a9c6e6", linewidth=1.1, label="recent")
    axes.plot(x, [100 * since for _, since, _ in rows], color=LOSS, linewidth=1.8, label="since the beginning")
    axes.set(xlabel=name, ylabel="ETTR, %", ylim=(0, 102), xlim=(0, max(goodput.elapsed / unit, 1e-9)))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False, fontsize=8.5, borderaxespad=0.1)
    plain(axes)
