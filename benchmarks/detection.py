"""How soon each kind of fault is found, by which signal, and what it costs the other replicas. Real faults, steps of 0.3 s.

    .venv/bin/python benchmarks/detection.py [--rounds 3] [--only FAULT ...] [--json FILE]       hosts and links: as root

Three replicas of one rank. *found* is the first sign after the fault: its exit seen by the launcher, a survivor's step voted
down, or the rank's own word that its main thread makes no progress. *without* is the first decision without the victim, *stall*
the survivors' longest step beyond the median. Medians, and the worst found.

    exit                  SIGKILL of its rank                    no progress   its main thread hangs, in forward or in the loader;
    frozen                SIGSTOP of its rank                                  timed from when it does
    lock held             a thread holds the interpreter lock    host lost     its port leaves the switch (network namespaces)
                                                                 link lost     two hosts do not reach each other, but the store
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disturbed import ROOT, Job, Row, gaps

sys.path.insert(0, str(ROOT / "tests" / "processes"))

HERE = Path(__file__).resolve().parent
REPLICAS, VICTIM = 3, 1
STEADY = 70  # steps between two faults: by then what the one before has taught is forgotten
TAKES_S = 8.0  # after which nothing is awaited any more
SIGNS = {"exit": "exit seen (pidfd)", "retry": "a link: end or silence", "slow": "its own word", "decision": "left out"}


def found(events: list[Row], at: float, replicas: list[int]) -> Row:
    """What the others knew when. `replicas`: the survivors."""

    def of(event: str, who: list[int]) -> list[Row]:
        return [e for e in events if e["event"] == event and e["mono"] > at and e.get("replica") in who]

    without = [
        e["mono"]
        for e in of("decision", replicas)
        if len(e["members"]) < REPLICAS and e["members"] and e["kind"] == "train"
    ]
    signs = [(e["mono"], e["event"]) for e in (*of("exit", [VICTIM]), *of("retry", replicas), *of("slow", [VICTIM]))]
    signs += [(t, "decision") for t in without[:1]]
    if not signs or not without:
        raise RuntimeError("nobody noticed")
    stall = 0.0
    for replica in replicas:
        commits = [e for e in events if e["event"] == "commit" and e["replica"] == replica and e["role"] == "worker"]
        steps = gaps(commits)
        usual = statistics.median(gap for _, gap in steps)
        after = [gap for c, gap in steps if at < c["mono"] < without[0] + TAKES_S / 2]
        stall = max([stall, *(gap - usual for gap in after)])
    return {
        "found_s": min(signs)[0] - at, "signal": SIGNS[min(signs)[1]], "without_s": without[0] - at, "stall_s": stall,
        "step_s": usual,
    }  # fmt: skip


def on_one_machine(fault: str, rounds: int, folder: Path) -> list[Row]:
    """Faults of a rank, one after the other in one job."""
    where = {"no progress, loader": "loader", "lock held": "gil"}.get(fault, "forward")
    flag = folder / "hang"
    rows: list[Row] = []
    args = ["--hang", str(flag), "--where", where]
    with Job(folder / "job", ["--replicas", str(REPLICAS)], HERE / "spares_train.py", args) as job:
        for _ in range(rounds):
            job.together(REPLICAS, STEADY, after=time.monotonic() if rows else 0.0)
            rank, at = job.rank(VICTIM), time.monotonic()
            if fault == "exit":
                rank.kill()
            elif fault == "frozen":
                rank.suspend()
            else:
                flag.with_suffix(".at").unlink(missing_ok=True)
                flag.write_text(str(VICTIM))
                job.wait(lambda: flag.with_suffix(".at").exists() and flag.with_suffix(".at").read_text())
                at = float(flag.with_suffix(".at").read_text())
            job.stays(at + TAKES_S - time.monotonic())
            job.of("decision")
            rows.append({"fault": fault, **found(job.events, at, [r for r in range(REPLICAS) if r != VICTIM])})
            flag.unlink(missing_ok=True)
            if fault == "frozen":
                rank.resume()
    return rows


def between_hosts(fault: str, rounds: int, folder: Path) -> list[Row]:
    """Each in a job of its own."""
    import test_matrix_network as network
    from jobs import read_events

    rows = []
    for number in range(rounds):
        path = folder / str(number)
        path.mkdir()
        with network.hosts(path, "--steps", "1000", "--step-seconds", "0.3") as job:
            job.until(VICTIM, 20)
            at = time.monotonic()
            if fault == "host lost":
                job.network.black_hole(VICTIM)
            else:
                for one, other in ((0, VICTIM), (VICTIM, 0)):
                    job.network.lose_way(one, other)
            job.stays(TAKES_S + (8.0 if fault == "link lost" else 0.0))
            survivors = [2] if fault == "link lost" else [0, 2]
            rows.append({"fault": fault, **found(read_events(job.run_dir), at, survivors)})
    return rows


FAULTS: dict[str, Callable[[str, int, Path], list[Row]]] = {
    **dict.fromkeys(("exit", "frozen", "lock held", "no progress, forward", "no progress, loader"), on_one_machine),
    **dict.fromkeys(("host lost", "link lost"), between_hosts),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    print(f"{'fault':22} {'first signal':24} {'found':>7} {'worst':>7} {'without':>8} {'stall':>7}  (s)")
    for fault in args.only:
        with tempfile.TemporaryDirectory(prefix="keepstep-detection-") as folder:
            mine: list[dict[str, Any]] = FAULTS[fault](fault, args.rounds, Path(folder))
        rows += mine
        middle = {k: statistics.median(r[k] for r in mine) for k in ("found_s", "without_s", "stall_s")}
        worst = max(r["found_s"] for r in mine)
        print(
            f"{fault:22} {mine[0]['signal']:24} {middle['found_s']:7.2f} {worst:7.2f} {middle['without_s']:8.2f} "
            f"{middle['stall_s']:7.2f}",
            flush=True,
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
