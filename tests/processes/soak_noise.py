"""A healthy job on a noisy machine: `make soak-noise MINUTES=60`. Nobody may be taken for dead, or left out.

Three replicas train with steps of 0.3 s, half of them real computing, and write checkpoints. Meanwhile 0 to 4 processes
(`--others`) that do nothing but compute come and go, each for seconds. At the end: no rank has ended, and no decision was made
without a replica. How slow the steps got, and whether any was called slow or tried again, is printed; the last line tells the
result. Writes RUN_DIR/soak_noise.json.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs import Result, kill_all, processes_of
from matrix import Job

REPLICAS, STEP_S = 3, 0.3
BURN = "a = 1\nwhile True: a = a * 3 % 1000003"
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "spares_train.py"


def disturb(job: Job, seconds: float, most: int, rng: random.Random) -> int:
    """Starts and ends other work, at most so much at a time, until the time is over. Returns how much of it there was."""
    others: list[tuple[float, subprocess.Popen[bytes]]] = []
    started, end = 0, time.monotonic() + seconds
    try:
        while (now := time.monotonic()) < end:
            assert job.process.poll() is None, "the job has ended"
            for due, process in [o for o in others if o[0] < now]:
                process.kill()
                process.wait()
                others.remove((due, process))
            if len(others) < most and rng.random() < 0.3:
                others.append((now + rng.uniform(1, 20), subprocess.Popen([sys.executable, "-c", BURN])))
                started += 1
            time.sleep(0.5)
    finally:
        for _, process in others:
            process.kill()
            process.wait()
    return started


def judge(result: Result) -> dict[str, Any]:
    commits = result.of("commit")
    times = sorted(c["step_time_s"] for c in commits)
    left_out = [d["seq"] for d in result.decisions if d["kind"] == "train" and len(d["members"]) < REPLICAS]
    return {
        "steps": len({c["step"] for c in commits}),
        "step_median_s": times[len(times) // 2],
        "step_99_s": times[len(times) * 99 // 100],
        "step_worst_s": times[-1],
        "exits": len([e for e in result.of("exit") if not e["stopping"] and e["code"] != 0]),
        "stuck": len(result.of("stuck")),
        "slow": [{k: e[k] for k in ("replica", "took_s", "longest_s", "at")} for e in result.of("slow")],
        "retries": [e["reason"] for e in result.of("retry")],
        "left_out": left_out,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--others", type=int, default=4, help="less beside other load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=None)
    args = parser.parse_args()
    folder = args.run_dir or Path(tempfile.mkdtemp(prefix="keepstep-noise-"))
    run_dir = folder / "run"
    options = ("--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "50")
    script = ("--step-seconds", str(STEP_S), "--noise", str(STEP_S / 2))
    with Job(run_dir, *options, replicas=REPLICAS, script=SCRIPT, args=script) as job:
        job.until_step(5)
        others = disturb(job, args.minutes * 60, args.others, random.Random(args.seed))
        told = subprocess.run([sys.executable, "-m", "keepstep", "stop", str(run_dir)], check=False)
        result = job.finish(300)
    kill_all(run_dir)
    assert not list(processes_of(run_dir)), "processes were left behind"
    assert (told.returncode, result.code) == (0, 0), result.output[-3000:]
    report = {"minutes": args.minutes, "other_work": others, "seed": args.seed, **judge(result)}
    (folder / "soak_noise.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1), f"\nresults in {folder}")
    bad = {k: report[k] for k in ("exits", "stuck", "left_out") if report[k]}
    assert not bad, f"somebody healthy was taken for dead: {bad}"
    print(
        f"soak-noise: {args.minutes:g} minutes, {report['steps']} steps, worst {report['step_worst_s']:.2f} s, 0 left out"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
