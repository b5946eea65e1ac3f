"""How long a killed replica is away, started cold, forked from the zygote, and from a warm spare; and where that time goes.

    .venv/bin/python benchmarks/spares.py [--kills 5] [--only MODE ...] [--json FILE]

Two replicas of one rank, steps of 0.3 s that leave the cores to whoever returns. Replica 1 is killed (SIGKILL) again and again.
*cold* is what happens once the zygote is gone, which the benchmark kills. Times are medians, in seconds after the kill, of:

    exit       the launcher has seen it            joined     torch's process group inside the replica is there
    script     the next life's script begins       attached   the model is built, and what serves its state runs
    entered    it is in keepstep.join()            reported   the store has its first report
    connected  it has reached store and ranks      worker     it has committed its first step as WORKER

*CPU* is what the process had used up when it was attached. *stall* is the survivor's longest step until then beyond the median,
*first* its step in which replica 1 was WORKER for the first time, beyond the median: the first-step effect.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from disturbed import Job, Row, gaps

HERE = Path(__file__).resolve().parent
POINTS = ("exit", "script", "entered", "connected", "joined", "attached", "reported", "worker")
MODES: dict[str, tuple[list[str], list[str]]] = {  # options of the launcher, arguments of the script
    "cold": ([], []),
    "zygote": ([], []),
    "spare": (["--spares", "1"], []),
    "cold, heavy imports": ([], ["--imports", "heavy"]),
    "zygote, heavy imports": ([], ["--imports", "heavy"]),
    "spare, heavy imports": (["--spares", "1"], ["--imports", "heavy"]),
    "spare, warmed up": (["--spares", "1"], ["--warm-up"]),
    "spare, compiled": (["--spares", "1"], ["--compile"]),
    "spare, compiled, warmed up": (["--spares", "1"], ["--compile", "--warm-up"]),
    "zygote, join-wait 0.5": (["--join-wait", "0.5"], []),
    "zygote, join-wait 2": (["--join-wait", "2"], []),
    "spare, join-wait 2": (["--spares", "1", "--join-wait", "2"], []),
    "zygote, heavy, join-wait 1": (["--join-wait", "1"], ["--imports", "heavy"]),
    "zygote, heavy, join-wait 2": (["--join-wait", "2"], ["--imports", "heavy"]),
}
REPLICAS, VICTIM = 2, 1


def kill_once(job: Job, mode: str) -> Row:
    """Kills replica 1 in a quiet moment and follows its return."""
    job.together(REPLICAS, 6, after=job.of("spawn")[-1]["mono"])
    if mode.startswith("spare"):
        job.wait(lambda: (s := job.of("spare")) and s[-1]["state"] == "ready")
    at = time.monotonic()
    job.rank(VICTIM).kill()
    job.together(REPLICAS, 4, after=at)
    return follow(job, at)


def follow(job: Job, at: float) -> Row:
    life = next(e["incarnation"] for e in job.of("spawn", replica=VICTIM) if e["mono"] > at)

    def first(event: str, **fields: object) -> Row:
        return next(e for e in job.of(event, replica=VICTIM, incarnation=life, **fields))

    entered, worker = first("entered"), first("commit", role="worker")
    row: Row = {
        "exit": next(e["mono"] for e in job.of("exit", replica=VICTIM) if e["mono"] > at) - at,
        "script": max(entered["script_at"], first("spawn")["mono"]) - at,
        "entered": entered["mono"] - at,
        "worker": worker["mono"] - at,
        **{point: first(point)["mono"] - at for point in ("connected", "joined", "attached", "reported")},
        "cpu_s": first("attached")["cpu_s"] - (entered["cpu_s"] if entered["spare"] else 0.0),
        "was_spare": entered["spare"],
    }
    steps = gaps(job.of("commit", replica=0))
    usual = statistics.median(gap for _, gap in steps)
    during = [(c, gap) for c, gap in steps if at < c["mono"] and c["step"] < worker["step"]]
    row["stall_s"] = max(gap for _, gap in during) - usual if during else 0.0
    row["alone"] = sum(c["workers"] == 1 for c, _ in during)
    row["first_s"] = next((gap for c, gap in steps if c["step"] == worker["step"]), usual) - usual
    row["step_s"] = usual
    return row


def measure(mode: str, kills: int, folder: Path) -> list[Row]:
    options, args = MODES[mode]
    with Job(
        folder, ["--replicas", str(REPLICAS), "--max-restarts", "1000", *options], HERE / "spares_train.py", args
    ) as job:
        job.together(REPLICAS, 4)
        if mode.startswith("cold"):
            job.zygote().kill()
        return [{"mode": mode, **kill_once(job, mode)} for _ in range(kills)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(MODES), default=list(MODES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    print(f"{'':28}" + "".join(f"{p:>10}" for p in (*POINTS, "CPU", "stall", "alone", "first")))
    for mode in args.only:
        with tempfile.TemporaryDirectory(prefix="keepstep-spares-") as folder:
            mine = measure(mode, args.kills, Path(folder) / "job")
        rows += mine
        medians = [statistics.median(r[k] for r in mine) for k in (*POINTS, "cpu_s", "stall_s", "alone", "first_s")]
        print(f"{mode:28}" + "".join(f"{m:10.2f}" for m in medians), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
