"""The picture of `operations.py`: ETTR over the failure rate, and every stall."""

from pathlib import Path
from typing import Any

from keepstep.observe import plots
from keepstep.observe.plots import FAINT, LOST, WORKERS

STYLES = {"keepstep": (WORKERS, "o"), "torchelastic, forked": ("#2f6fbb", "s"), "torchelastic": (LOST, "v")}


def draw(report: dict[str, Any], path: Path) -> None:
    """Two panels. A job that did not end is crossed out."""
    pyplot = plots.pyplot()
    rows = [r for r in report["rows"] if r["failure_rate"]]
    rates = sorted({r["failure_rate"] for r in rows})
    with pyplot.rc_context(plots.STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
        for number, (system, (colour, marker)) in enumerate(STYLES.items()):
            mine = sorted((r for r in rows if r["system"] == system), key=lambda r: float(r["failure_rate"]))
            if not mine:
                continue
            left.plot(
                [r["failure_rate"] for r in mine], [r["ettr"] for r in mine], color=colour, marker=marker, label=system
            )
            lost = [r for r in mine if not r["complete"]]
            left.plot([r["failure_rate"] for r in lost], [r["ettr"] for r in lost], "x", color=colour, markersize=14)
            for r in mine:
                x = rates.index(r["failure_rate"]) + 0.22 * (number - 1)
                floor = [max(s, 0.01) for s in r["stalls_s"]]
                right.plot([x] * len(floor), floor, color=colour, marker=marker, linestyle="", alpha=0.5, markersize=5)
        left.set(
            title="Effective training time", xlabel="failures a minute", ylabel="ETTR", ylim=(0, 1.02), xscale="log"
        )
        left.set_xticks(rates, [f"{rate:g}" for rate in rates])
        left.minorticks_off()
        left.legend(frameon=False)
        right.set(title="Until the job is further than before the kill", xlabel="failures a minute", yscale="log")
        right.set_ylabel("seconds beyond a steady step (0.01: none)")
        right.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        for axes in (left, right):
            plots.plain(axes)
            axes.grid(axis="y", alpha=0.4)
        machine = report["machine"]
        words = (
            f"{report['replicas']} replicas on {machine['cores']} cores, step {report['step_s']['keepstep']:.2f} s, "
        )
        figure.suptitle(words + f"torch {machine['torch']}", fontsize=9, color=FAINT)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, facecolor="white")
        pyplot.close(figure)
