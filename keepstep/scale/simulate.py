"""`keepstep simulate`: the paper's numbers, then ours one mechanism at a time; a table, JSON, pictures.

Deterministic: the same options give the same output. Fails: ConfigError without simpy, without matplotlib if pictures are wanted,
or if a file cannot be written.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keepstep.protocol.errors import ConfigError
from keepstep.scale import figures, ladder, recovery
from keepstep.scale.ladder import Job, Row, Spread
from keepstep.scale.recovery import Phase

SIZES = (8_192, 16_384, 32_768, 65_536, 98_304, 131_072)
RANKS = 8_192  # of a replica, at every size


def simulate(
    job: Job, *, seed: int, seeds: int, days: float, sizes: bool, json_file: Path | None, out: Path | None
) -> str:
    """Runs it, writes what is asked for, returns the text to print."""
    if seeds < 1 or days <= 0:
        raise ConfigError("--seeds and --days must be positive")
    rows = ladder.climb(job, seed=seed, seeds=seeds, days=days)
    parts = breakdown()
    curves = over_sizes(seed=seed, seeds=seeds, days=days) if sizes else {}
    if json_file:
        write_json(json_file, as_json(job, rows, parts, curves, seed=seed, seeds=seeds, days=days))
    if out:
        from keepstep.scale import pictures

        folder(out)
        cold = figures.COLD_ALLOCATION.value - figures.WARM_ALLOCATION.value
        pictures.breakdown(parts, cold, out / "recovery.png")
        pictures.ladder(rows, out / "ladder.png")
        if curves:
            pictures.sizes(curves, out / "sizes.png")
    head = (
        f"{job.gpus:,} GPUs, a failure every {job.between_failures_s / 60:.0f} min; {job.replicas} replicas; "
        f"{seeds} x {days:g} days from seed {seed}"
    )
    return "\n".join(
        [head, "", *table(rows), "", *recovery_table(parts), *(["", *size_table(curves)] if curves else [])]
    )


def breakdown() -> dict[int, dict[Phase, float]]:
    """Seconds of each phase of a sync recovery, by number of GPUs."""
    return {gpus: {p: s for p, s in recovery.from_checkpoint(gpus).phases() if s} for gpus in SIZES}


def over_sizes(*, seed: int, seeds: int, days: float) -> dict[str, dict[int, Spread]]:
    """ETTR of sync training, the paper's FT-HSDP and ours, with everything counted but sync's lost work."""
    kinds: dict[str, Callable[[Job], Any]] = {
        "sync, work done twice not counted": lambda job: ladder.at_random(ladder.paper_sync(job)),
        "FT-HSDP, 1.5 min, rejoin counted": lambda job: ladder.count_rejoin(ladder.at_random(ladder.paper_fixed(job))),
        "keepstep": ladder.ours,
    }
    return {
        name: {
            gpus: Spread.of(ladder.run(make(Job(gpus=gpus, replicas=gpus // RANKS)), seed=seed, seeds=seeds, days=days))
            for gpus in SIZES
            if gpus > RANKS
        }
        for name, make in kinds.items()
    }


def assumptions() -> list[str]:
    """Every figure with its source, as a table."""
    rows = [
        (f.what, f"{f.value:,.7g} {f.unit}".strip(), f.origin.value, f.source) for f in figures.all_figures().values()
    ]
    kinds = [
        (k.name, f"{k.count} of {sum(k.count for k in figures.KINDS)}", k.shows.value, "yes" if k.new_host else "no")
        for k in figures.KINDS
    ]
    return [
        *markdown(("figure", "value", "origin", "source"), rows),
        "",
        *markdown(("failure (paper, Table 1)", "count", "shows as (assumed)", "needs another host (assumed)"), kinds),
    ]


# --- tables ------------------------------------------------------------------------------------------------------------


def table(rows: Iterable[Row]) -> list[str]:
    cells = [
        (
            row.name,
            "" if row.formula is None else f"{row.formula:.1%}",
            f"{row.ettr.mean:.1%}",
            f"{row.ettr.low:.1%} .. {row.ettr.high:.1%}",
            "" if row.gain is None else f"{100 * row.gain:+.1f}",
            "" if row.alone is None else f"{100 * row.alone:+.1f}",
            f"{row.seconds_per_failure:.0f} s",
        )
        for row in rows
    ]
    return markdown(("", "formula", "ETTR", "over seeds", "gain", "alone", "lost per failure"), cells)


def recovery_table(parts: dict[int, dict[Phase, float]]) -> list[str]:
    phases = list(next(iter(parts.values())))
    cells = [
        (f"{gpus:,}", *(f"{own[phase]:.0f}" for phase in phases), f"{sum(own.values()):.0f}")
        for gpus, own in parts.items()
    ]
    return markdown(("GPUs", *(f"{phase.value}, s" for phase in phases), "together"), cells)


def size_table(curves: dict[str, dict[int, Spread]]) -> list[str]:
    sizes = list(next(iter(curves.values())))
    return markdown(
        ("GPUs", *curves), [(f"{gpus:,}", *(f"{curve[gpus].mean:.1%}" for curve in curves.values())) for gpus in sizes]
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table that can be read as it is, and pasted into a page."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    lines.insert(1, ["-" * width for width in widths])
    return ["| " + " | ".join(line) + " |" for line in lines]


# --- files ---------------------------------------------------------------------------------------------------------------


def as_json(
    job: Job,
    rows: Sequence[Row],
    parts: dict[int, dict[Phase, float]],
    curves: dict[str, dict[int, Spread]],
    **settings: float,
) -> dict[str, Any]:
    return {
        "job": {**asdict(job), "mtbf_s": job.between_failures_s},
        **settings,
        "rows": [asdict(row) for row in rows],
        "recovery_s": {str(gpus): own for gpus, own in parts.items()},
        "sizes": {name: {str(gpus): asdict(s) for gpus, s in curve.items()} for name, curve in curves.items()},
        "figures": {name: asdict(figure) for name, figure in figures.all_figures().items()},
    }


def write_json(path: Path, value: object) -> None:
    folder(path.parent)
    try:
        path.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}") from None
