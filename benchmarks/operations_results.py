"""What `operations.py` makes of the steps that were written down: pure functions, and the files of counts that a job leaves."""

import json
import statistics
from bisect import bisect_right
from collections import Counter
from pathlib import Path

from kill import REPLICAS, WARM_UP, Row, analyse, gaps

AROUND = 6  # steps that `rejoin` looks at
STALL_S, REJOIN, STEP = 0.3, 0.02, 1.01  # the goals


def progress(rows: list[Row]) -> list[float]:
    """When the job was further than ever before: the first commit of each step, in order."""
    first: dict[int, float] = {}
    for r in rows:
        if r["committed"] and (not first or r["step"] > max(first)):
            first[r["step"]] = r["mono"]
    return list(first.values())


def stalls(times: list[float], kills: list[Row], step_s: float) -> list[float]:
    """Of each gap that somebody was killed in; the one after counts if it is longer, and nobody was killed in that."""
    struck = [bisect_right(times, kill["mono"]) for kill in kills]
    found = []
    for i in sorted({i for i in struck if 0 < i < len(times)}):
        gap = times[i] - times[i - 1]
        if i + 1 < len(times) and i + 1 not in struck:
            gap = max(gap, times[i + 1] - times[i])
        found.append(gap - step_s)
    return found


def calm_gaps(rows: list[Row], step_s: float) -> list[float]:
    """What `rejoin` would be if nobody came back: longest gap of so many steps in full membership, minus a steady step."""
    found = []
    for pid in {r["pid"] for r in rows}:
        mine = [gap for row, gap in gaps(rows, pid)[WARM_UP:] if row["members"] == REPLICAS]
        found += [max(mine[i : i + AROUND]) - step_s for i in range(0, len(mine) - AROUND + 1, AROUND)]
    return found


def result(rows: list[Row], kills: list[Row], *, units: int, step_s: float, folder: Path) -> Row:
    """One job: what it took, and what became of its units."""
    times = progress(rows)
    due = [kill for kill in kills if kill["mono"] < times[-1]]
    kills = [kill for kill in due if kill["pid"] is not None]
    counts = [json.loads(path.read_text()) for path in folder.glob("units.*")]
    lost = max((c["lost"] for c in counts), default=None)
    again = Counter(r["unit"] for r in rows if r["committed"])
    wall_s = times[-1] - times[0]
    useful = (
        max(0.0, (units - lost) / REPLICAS - 1) if lost is not None else 0.0
    )  # the clock starts after the first step
    found = stalls(times, kills, step_s)
    rejoins = list(analyse(rows, kills, step_s)["rejoins_s"]) if kills else []
    return {
        "complete": lost is not None,  # if not, the job is lost or the time was up: nobody has the weights
        "ettr": useful * step_s / wall_s,
        "wall_s": wall_s,
        "steps": len(times),
        "kills": len(kills),
        "left_alone": len(due) - len(kills),
        "stall_median_s": statistics.median(found) if found else None,
        "stall_worst_s": max(found, default=None),
        "units_lost": lost,
        "units_duplicated": max((c["duplicated"] for c in counts), default=None),
        "units_again": sum(n - 1 for n in again.values()),
        "digests": len({c["digest"] for c in counts}),  # of the final weights; equal bits: 1
        "step_s": step_s,
        "stalls_s": found,
        "rejoins_s": rejoins,
    }


def goals(rows: list[Row], step_s: dict[str, float], calm: list[float], ours: str, plain: str) -> list[Row]:
    """What keepstep was to reach."""
    mine = [r for r in rows if r["system"] == ours and r["kills"]]
    stall = statistics.median(s for r in mine for s in r["stalls_s"])
    rejoin = statistics.median(s for r in mine for s in r["rejoins_s"])
    beyond = (rejoin - statistics.median(calm)) / step_s[ours]
    ratio = step_s[ours] / step_s[plain]
    found = [
        {"goal": f"stall <= {STALL_S} s at the median", "measured": f"{stall:.3f} s", "reached": stall <= STALL_S},
        {
            "goal": f"rejoin <= {REJOIN:.0%} of a step for the others",
            "measured": f"{beyond:.1%} of a step ({rejoin:.3f} s; undisturbed steps have {statistics.median(calm):.3f} s)",
            "reached": beyond <= REJOIN,
        },
        {
            "goal": f"steady step <= {STEP} of the same job without fault tolerance",
            "measured": f"{ratio:.3f}",
            "reached": ratio <= STEP,
        },
    ]
    for r in mine:
        best = max(
            (o for o in rows if o["failure_rate"] == r["failure_rate"] and o is not r), key=lambda o: float(o["ettr"])
        )
        found.append(
            {
                "goal": f"ETTR above torchelastic's at {r['failure_rate']:g} failures a minute",
                "measured": f"{r['ettr']:.3f}, {best['system']} {best['ettr']:.3f}",
                "reached": r["complete"] and r["ettr"] > best["ettr"],
            }
        )
    return found


def print_table(rows: list[Row]) -> None:
    for r in rows:
        stall = f"{r['stall_median_s']:.2f} / {r['stall_worst_s']:.2f} s" if r["stalls_s"] else "-"
        print(
            f"{r['system']:20} {r['failure_rate']:4g}/min: {r['kills']:3} kills, ETTR {r['ettr']:.3f}, {r['wall_s']:6.1f} s, "
            f"{r['steps']:4} steps, stall {stall:>15}, units lost {r['units_lost']}, twice {r['units_duplicated']}, "
            f"again {r['units_again']}" + ("" if r["complete"] else "; NOT COMPLETE"),
            flush=True,
        )
