"""What a checkpoint costs training: the same job with and without, one after the other, several times.

    python benchmarks/checkpoint.py [--json FILE] [--rounds 3]

2 replicas of 1 rank each, AdamW. Blocked is what the main thread of the saving replica waits for (`copy_s` of its commit: what it
has to copy of the state before the optimizer overwrites it); the rest of a checkpoint runs beside training, and takes processor
time from it where cores are few: that shows in the steps during which one is written.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from keepstep.observe.records import Run, read_run

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "processes" / "scripts" / "train_tiny.py"
WARM = 10  # steps that are left out


def job(folder: Path, *, every: int, steps: int, width: int, step_s: float) -> Run:
    """Runs one job; `every` 0: without checkpoints."""
    options = ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", str(every)] if every else []
    command = [
        sys.executable, "-m", "keepstep", "run", "--replicas", "2", "--run-dir", str(folder / "run"), *options, str(TINY), "--",
        "--plain", "--steps", str(steps), "--width", str(width), "--step-seconds", str(step_s), "--bucket-bytes", str(25 << 20),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return read_run(folder / "run")


def measure(folder: Path, *, every: int, steps: int, width: int, step_s: float) -> dict[str, Any]:
    run = job(folder, every=every, steps=steps, width=width, step_s=step_s)
    commits = [c for c in run.of("commit") if c["step"] >= WARM]
    saves = run.of("checkpoint")
    writing = [
        c["step_time_s"]
        for c in commits
        if any(s["mono"] - s["seconds"] < c["mono"] < s["mono"] + c["step_time_s"] for s in saves)
    ]
    blocked = [max(c["copy_s"] for c in commits if c["step"] == s["step"]) for s in saves if s["step"] >= WARM]
    return {
        "every": every,
        "step_s": statistics.median(c["step_time_s"] for c in commits),
        "mean_step_s": statistics.fmean(c["step_time_s"] for c in commits),
        "writing_step_s": statistics.median(writing) if writing else None,
        "blocked_s": statistics.median(blocked) if blocked else 0.0,
        "blocked_max_s": max(blocked, default=0.0),
        "save_s": statistics.median(s["seconds"] for s in saves) if saves else None,
        "bytes": saves[-1]["bytes"] if saves else None,
        "failed": len(run.of("checkpoint_failed")),
        "saved": len(saves),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--width", type=int, default=200_000, help="of the model: 300 bytes of state for each")
    parser.add_argument("--step-seconds", type=float, default=0.2)
    args = parser.parse_args()
    rows = []
    for number in range(args.rounds):
        for every in (0, args.every):
            folder = Path(tempfile.mkdtemp(prefix="keepstep-checkpoint-"))
            try:
                row = measure(folder, every=every, steps=args.steps, width=args.width, step_s=args.step_seconds)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            rows.append({"round": number, **row})
            print(json.dumps(rows[-1]), flush=True)
    without, having = ([r for r in rows if bool(r["every"]) is wanted] for wanted in (False, True))
    plain = statistics.median(r["step_s"] for r in without)
    blocked = statistics.median(r["blocked_s"] for r in having)
    print(f"step without checkpoints        {plain * 1e3:8.1f} ms")
    print(f"step with one every {args.every:<3}         {statistics.median(r['step_s'] for r in having) * 1e3:8.1f} ms")
    print(f"step while one is written       {statistics.median(r['writing_step_s'] for r in having) * 1e3:8.1f} ms")
    print(f"blocked by a checkpoint         {blocked * 1e3:8.1f} ms, {100 * blocked / plain:.1f}% of a step")
    save = statistics.median(r["save_s"] for r in having)
    print(f"a checkpoint takes              {save * 1e3:8.1f} ms, {having[-1]['bytes']} bytes")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"rows": rows, "blocked_share": blocked / plain}, indent=1) + "\n")


if __name__ == "__main__":
    main()
