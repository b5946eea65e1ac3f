"""The picture of `allreduce.py`: time over size and over the number of ranks, log-log, with the bound drawn in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
STYLES = {
    "bound": ("bandwidth bound of plain sockets", "black", "--", ""),
    "gloo": ("gloo", "tab:orange", "-", "o"),
    "torchft": ("torchft's gloo group", "tab:red", "-", "v"),
    "pypccl": ("pypccl", "tab:purple", "-", "s"),
    "keepstep-tcp": ("keepstep, TCP", "tab:blue", "-", "o"),
    "keepstep-shm": ("keepstep, shared memory", "tab:green", "-", "o"),
}


def draw(report: Row, path: Path) -> None:
    """One panel for each number of ranks, and one over them at the largest size that all have."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows: list[Row] = [r for r in report["rows"] if "skipped" not in r]
    congestion = rows[-1]["congestion_control"]  # the best of those measured
    rows = [r for r in rows if r["congestion_control"] == congestion]
    ns = sorted({r["n"] for r in rows})
    common = set.intersection(*({r["bytes"] for r in rows if r["n"] == n} for n in ns))
    figure, axes = plt.subplots(1, len(ns) + 1, figsize=(4 * (len(ns) + 1), 4), layout="constrained")
    for axis, n in zip(axes, ns, strict=False):
        lines(axis, [r for r in rows if r["n"] == n], "bytes", 1 / (1 << 20))
        axis.set(title=f"{n} ranks", xlabel="MB")
        sizes = sorted({r["bytes"] / (1 << 20) for r in rows if r["n"] == n})
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    lines(axes[-1], [r for r in rows if r["bytes"] == max(common)], "n", 1)
    axes[-1].set(title=f"{max(common) / (1 << 20):g} MB", xlabel="ranks")
    axes[-1].set_xticks(ns, [str(n) for n in ns])
    axes[0].set_ylabel("time of one sum, ms")
    axes[0].legend(fontsize=8)
    machine = report["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, one machine, {congestion}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def lines(axis: Any, rows: Sequence[Row], key: str, scale: float) -> None:
    for impl, (label, colour, dash, marker) in STYLES.items():
        mine = sorted((r[key] * scale, r["median_s"] * 1e3) for r in rows if r["impl"] == impl)
        if mine:
            x, y = zip(*mine, strict=True)
            axis.plot(x, y, linestyle=dash, marker=marker, color=colour, label=label, markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.3, which="both", axis="y")
    axis.grid(alpha=0.3, axis="x")
