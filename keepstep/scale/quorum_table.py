"""What `keepstep scale quorum` says: one job or a curve over sizes, as a table, JSON and a picture.

A curve has the same number of replicas at each size, of about 1/96, 1/12, 1/3 and all of the ranks (1K, 8K, 32K and 98K of
98,304), and one replica alone.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepstep.protocol.errors import ConfigError
from keepstep.scale.quorum import Settings, measure

PARTS = (96, 12, 3, 1)
HEADS = ("ranks", "replicas", "commit", "steady", "one lost", "one back", "90%", "bytes", "CPU", "memory")


def quorum(
    settings: Settings, *, curve: bool, json_file: Path | None, out: Path | None, say: Callable[[str], None]
) -> str:
    """Measures, writes what is asked for, returns the table."""
    for path in (json_file, None if out is None else out / "quorum.png"):
        if path is not None:
            _writable(path.parent)
    results = [measure(each, say) for each in (sizes(settings) if curve else (settings,))]
    if json_file is not None:
        json_file.write_text(json.dumps({**results[-1], "curve": results} if curve else results[-1], indent=1) + "\n")
    if out is not None:
        from keepstep.scale import pictures

        pictures.quorum([r for r in results if r["replicas"] == settings.replicas], out / "quorum.png")
    return "\n".join(table(results))


def sizes(settings: Settings) -> tuple[Settings, ...]:
    """One replica alone, then from few ranks to all."""
    group = settings.ranks_per_host
    ranks = [max(1, round(settings.ranks / part / group)) * group for part in PARTS]
    alone = () if settings.replicas == 1 else (replace(settings, replicas=1),)
    return (*alone, *(replace(settings, ranks=n) for n in dict.fromkeys(ranks)))


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Seconds, medians; *90%* is of the steady rounds; bytes and CPU of one of them."""
    rows = [[f"{name:>8}" for name in HEADS]]
    for r in results:
        times = [r[f"{kind}_median_s"] for kind in ("commit", "steady", "change", "rejoin")]
        cells = [f"{r['ranks']:,}", str(r["replicas"]), *("" if t is None else f"{t:.3f} s" for t in times)]
        cells += [f"{r['steady_s']['p90']:.3f} s", f"{r['bytes'] / 1e6:.2f} MB", f"{r['cpu_s']:.2f} s"]
        rows.append([f"{cell:>8}" for cell in [*cells, f"{r['rss_bytes'] / 1e6:.0f} MB"]])
    return ["  ".join(row) for row in rows]


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from None
