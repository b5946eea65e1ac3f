"""The pictures of `keepstep simulate`, `plan` and `scale quorum`. Drawing only; needs matplotlib, without it ConfigError."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepstep.observe import plots
from keepstep.observe.plots import CATCHING_UP, FAINT, LOSS, LOST, WORKERS
from keepstep.scale.ladder import Row, Spread
from keepstep.scale.recovery import Phase

COLOURS = {
    Phase.ALLOCATION: "#b3bac3",
    Phase.START: "#d5dbe1",
    Phase.HEALTH: "#9cc3e6",
    Phase.INIT: LOST,
    Phase.LOAD: CATCHING_UP,
    Phase.FETCH: "#f8d59b",
    Phase.FIRST_STEP: "#8f7fc0",
}


def breakdown(rows: Mapping[int, Mapping[Phase, float]], cold: float, path: Path) -> None:
    """The paper's Figure 2: what recovery of so many GPUs is made of. `cold`: what an empty reserve adds."""
    with _figure(path, "Recovery of a sync job from a checkpoint", (8.5, 4.6)) as axes:
        names = [_thousands(gpus) for gpus in rows]
        bottom = [0.0] * len(rows)
        for phase in COLOURS:
            heights = [phases.get(phase, 0.0) / 60 for phases in rows.values()]
            if any(heights):
                axes.bar(names, heights, 0.6, bottom=bottom, color=COLOURS[phase], label=phase.value)
                bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        axes.bar(
            names, [cold / 60] * len(rows), 0.6, bottom=bottom, fill=False, edgecolor=FAINT, linestyle=":",
            label="with an empty reserve",
        )  # fmt: skip
        axes.set_xlabel("GPUs")
        axes.set_ylabel("minutes")
        _legend(axes)


def ladder(rows: Sequence[Row], path: Path) -> None:
    """ETTR of each rung, with what it adds."""
    with _figure(path, "Effective training time, from the paper to keepstep", (9.5, 5.4)) as axes:
        at = range(len(rows), 0, -1)
        colours = [WORKERS if row.alone is not None else LOSS for row in rows]
        axes.barh(list(at), [100 * row.ettr.mean for row in rows], 0.65, color=colours)
        for y, row in zip(at, rows, strict=True):
            gain = "" if row.gain is None else f"  {100 * row.gain:+.1f}"
            axes.text(100 * row.ettr.mean + 0.7, y, f"{row.ettr.mean:.1%}{gain}", va="center", fontsize=9)
        axes.set_yticks(list(at), [row.name for row in rows])
        axes.set_xlim(0, 112)
        axes.set_xlabel("ETTR, %")


def sizes(curves: Mapping[str, Mapping[int, Spread]], path: Path) -> None:
    """ETTR over the number of GPUs."""
    with _figure(path, "Effective training time over the size of the job", (8.5, 4.6)) as axes:
        for (name, points), colour in zip(curves.items(), (LOST, CATCHING_UP, WORKERS), strict=False):
            x = [gpus / 1000 for gpus in points]
            axes.plot(x, [100 * s.mean for s in points.values()], color=colour, marker="o", markersize=4, label=name)
            low, high = ([100 * getattr(s, end) for s in points.values()] for end in ("low", "high"))
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel("thousand GPUs")
        axes.set_ylabel("ETTR, %")
        axes.set_ylim(0, 101)
        _legend(axes)


def trade_off(points: Sequence[tuple[int, Spread, float]], *, limit: float, chosen: int, path: Path) -> None:
    """Replica count against ETTR, and against the memory that a replica's share of the state takes of a GPU."""
    with _figure(path, "More replicas lose less, and hold more", (8.5, 4.6)) as axes:
        x = list(range(len(points)))
        axes.plot(x, [100 * s.mean for _, s, _ in points], color=WORKERS, marker="o", markersize=4, label="ETTR")
        axes.fill_between(
            x, [100 * s.low for _, s, _ in points], [100 * s.high for _, s, _ in points], color=WORKERS, alpha=0.2
        )
        axes.set_xticks(x, [str(replicas) for replicas, _, _ in points])
        axes.set_xlabel("replicas")
        axes.set_ylabel("ETTR, %")
        mark = next(i for i, (replicas, _, _) in enumerate(points) if replicas == chosen)
        axes.axvline(mark, color=FAINT, linewidth=0.8, linestyle=":")
        other = axes.twinx()
        other.bar(x, [memory / 1e9 for _, _, memory in points], 0.4, color=LOSS, alpha=0.35, label="state, GB of a GPU")
        other.axhline(limit / 1e9, color=LOST, linewidth=0.9, label="room for it")
        other.set_ylabel("GB")
        other.set_ylim(0, 2.5 * limit / 1e9)
        axes.set_zorder(other.get_zorder() + 1)
        axes.patch.set_visible(False)
        handles, names = (
            a + b for a, b in zip(axes.get_legend_handles_labels(), other.get_legend_handles_labels(), strict=True)
        )
        axes.legend(handles, names, frameon=False, loc="center", bbox_to_anchor=(0.5, 0.6))


def quorum(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Seconds of a decision over the number of ranks."""
    kinds = (("change", "one replica lost", LOST), ("rejoin", "one back", CATCHING_UP), ("steady", "steady", WORKERS))
    with _figure(path, "From the last rank's vote to the last rank's decision", (8.5, 4.6)) as axes:
        for kind, name, colour in (*kinds, ("commit", "commit alone", "#8f7fc0")):
            points = [r for r in results if r[f"{kind}_median_s"] is not None]
            x = [r["ranks"] / 1000 for r in points]
            axes.plot(x, [r[f"{kind}_median_s"] for r in points], color=colour, marker="o", markersize=4, label=name)
            low, high = ([r[f"{kind}_s"][end] for r in points] for end in ("p10", "p90"))
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel("thousand ranks")
        axes.set_ylabel("seconds; shaded: 10 to 90% of the rounds")
        axes.set_ylim(bottom=0)
        _legend(axes)


class _figure:
    """A figure with one plot, written when the block ends."""

    def __init__(self, path: Path, title: str, size: tuple[float, float]) -> None:
        self._path, self._title, self._size = path, title, size
        self._pyplot = plots.pyplot()

    def __enter__(self) -> Any:
        self._style = self._pyplot.rc_context(plots.STYLE)
        self._style.__enter__()
        self._figure, axes = self._pyplot.subplots(figsize=self._size, layout="constrained")
        axes.set_title(self._title, loc="left", fontweight="bold")
        plots.plain(axes)
        return axes

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._figure.savefig(self._path, dpi=130, facecolor="white")
        self._pyplot.close(self._figure)
        self._style.__exit__(None, None, None)


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _thousands(gpus: int) -> str:
    return f"{gpus / 1000:.0f}K" if gpus >= 1000 else str(gpus)
