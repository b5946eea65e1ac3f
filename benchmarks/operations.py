"""The same failures, done to a job on keepstep and to one on torchelastic: ETTR, wall time, stalls, and what became of the data.

    make bench-operations     or   .venv/bin/python benchmarks/operations.py [--quick] [--json FILE] [--out FOLDER]

Three replicas of one process train M x 3 units (operations_model.py, 5M parameters, a step is mostly a sleep as beside an
accelerator), until every unit is in the weights. `failure_rate` is in failures a minute: kill -9 at random times (Poisson, from a
seed) of a random replica, the same times and victims for every system, counted from its first step. A replica that does not train
just then is left alone, the last one that trains is not. `--quick` takes 5 minutes, and leaves out what torchrun alone does.

    keepstep              keepstep run with a checkpoint every 20 steps, for when nobody is left
    torchelastic          torchrun --standalone --max-restarts: any death ends all workers, and they start again from the newest
                          checkpoint
    torchelastic, forked  the same agent by torch's API, with start_method="forkserver": new workers are forks of a process that
                          has imported torch, as keepstep's are. The best that torchelastic can do here
    no fault tolerance    the same script and DDP, undisturbed, without checkpoints

torchelastic's agent looks every 50 ms. Its checkpoints cost training a copy in memory; the interval is Young's, sqrt(2 C MTBF),
where C is what one costs a step, measured first.

    ettr             useful time / wall time. Useful are (units in the weights / 3) steps, each as long as the median of the same
                     system undisturbed. So a step of two replicas counts two thirds, and what is thrown away counts nothing. Wall
                     time is from the first commit to the last. A job that does not end has 0
    stall            the longest gap between two steps that are further than the job ever was, of the two that end after the kill,
                     minus a steady step. Kills in one gap count as one
    rejoin           keepstep only: the longest gap of a survivor in the 6 steps around the victim's return, minus a steady step
                     (kill.py); `calm` is the same figure of 6 steps in a row with no kill near them
    units_lost       units that are not in the final weights
    units_duplicated how often units are in them beyond the first time
    units_again      units computed again because what came of them was lost with a process. They cost time only

Expected, before the first whole run (2 cores):

    a kill costs         keepstep 0.05 s of stall and 2 s of one replica; torchelastic 5 s and half an interval, forked 1.5 s
    ETTR, 3 / 8 / 20     keepstep 0.97 / 0.92 / 0.83; torchelastic 0.78 / 0.58 / 0.35; forked 0.91 / 0.79 / 0.60
    steady step          keepstep 0.98 of plain DDP
    rejoin               10% of a step, where 2% is the goal: the returning process computes on the cores of the others
"""

import argparse
import json
import math
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from kill import HERE, REPLICAS, Keepstep, Launched, Row, steady_times
from operations_figure import draw
from operations_results import calm_gaps, goals, print_table, result

START_S = 120.0  # until the first step
RATES, QUICK_RATES = (3.0, 8.0, 20.0), (6.0, 12.0, 24.0)  # failures a minute
CHECKPOINT_S_MIN = 0.005  # what one costs at least, for Young's interval


class Ours(Keepstep):
    script = "operations_keepstep.py"
    every = 20

    def start(self) -> None:
        self.options = ("--checkpoint-dir", str(self.folder / "checkpoints"), "--checkpoint-every", str(self.every))
        super().start()


class Forked(Launched):
    """torchelastic at its best."""

    name, every, monitor_s = "torchelastic, forked", 0, 0.05
    run: tuple[str, ...] = ()

    def start(self) -> None:
        self.env |= {"KILL_EVERY": str(self.every), "KILL_CHECKPOINT": str(self.folder / "checkpoint")}
        self.env |= {"KILL_MONITOR_S": str(self.monitor_s), "PYTHONPATH": str(HERE)}  # else forkserver preloads nothing
        self.process = self.spawn([*self.run, str(HERE / "operations_ddp.py")])


class Torchrun(Forked):
    name = "torchelastic"
    run = (
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(REPLICAS), "--max-restarts", "1000000",
        "--monitor-interval", str(Forked.monitor_s),
    )  # fmt: skip


class Plain(Forked):
    name = "no fault tolerance"


class Saving(Forked):
    name, every = "a checkpoint every step", 1


# --- failures --------------------------------------------------------------------------------------------------


def strikes(rate: float, seed: int) -> Iterator[tuple[float, int]]:
    """Without end: seconds from the first step, and which replica. Another rate is the same at another speed."""
    rng, at = random.Random(f"{seed}/strikes"), 0.0
    while True:
        at += rng.expovariate(rate / 60)
        yield at, rng.randrange(REPLICAS)


def trains(rows: list[Row], replica: int) -> int | None:
    """The process that has trained as this replica most recently, if it lives."""
    pid = next((r["pid"] for r in reversed(rows) if r["replica"] == replica), None)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return pid if stat.rpartition(")")[2].split()[0] not in "ZX" else None


def run(system: Launched, due: Iterator[tuple[float, int]], limit_s: float) -> tuple[list[Row], list[Row]]:
    """A job to its end, or for so long, with kills. Returns its rows and the kills; without `pid` if the victim did not train."""
    kills: list[Row] = []
    system.start()
    try:
        deadline = time.monotonic() + START_S
        while not (rows := system.rows()):
            assert system.running(), f"it has ended before its first step, see {system.folder}"
            assert time.monotonic() < deadline, f"no step was made, see {system.folder}"
            time.sleep(0.1)
        began = rows[0]["mono"]
        for at, replica in due:
            until = began + min(at, limit_s)
            while system.running() and time.monotonic() < until:
                time.sleep(max(0.0, min(0.1, until - time.monotonic())))
            if not system.running() or at > limit_s:
                break
            pid = trains(system.rows(), replica)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            kills.append({"replica": replica, "pid": pid, "mono": time.monotonic()})
    finally:
        system.stop()
    return system.rows(), kills


def young(checkpoint_s: float, rate: float, step_s: float) -> int:
    """Steps between checkpoints that lose the least, if one costs so long: Young, 1974."""
    return max(1, round(math.sqrt(2 * max(checkpoint_s, CHECKPOINT_S_MIN) * 60 / rate) / step_s))


def undisturbed(out: Path, rounds: int, steps: int) -> tuple[dict[str, float], list[float], list[Row]]:
    """In turns. Returns each system's steady step, keepstep's `calm` gaps, and a row of results for each."""
    times: dict[str, list[float]] = {}
    calm: list[float] = []
    last: dict[str, tuple[Launched, list[Row]]] = {}
    for turn in range(rounds):
        for kind in (Ours, Plain, Saving):
            system = kind(out / f"{kind.name}-undisturbed-{turn}".replace(" ", "-"), steps)
            rows, _ = run(system, iter([(math.inf, 0)]), START_S)
            times.setdefault(kind.name, []).append(statistics.median(steady_times(rows)))
            print(f"undisturbed: {kind.name:24} {times[kind.name][-1] * 1e3:7.1f} ms a step", flush=True)
            last[kind.name] = system, rows
            if kind is Ours:
                calm += calm_gaps(rows, times[kind.name][-1])
    step_s = {name: statistics.median(found) for name, found in times.items()}
    results = [
        {"system": kind.name, "failure_rate": 0.0, "every": kind.every}
        | result(
            last[kind.name][1], [], units=steps * REPLICAS, step_s=step_s[kind.name], folder=last[kind.name][0].folder
        )
        for kind in (Ours, Plain)
    ]
    return step_s, calm, results


# --- the run ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 minutes: short runs, high rates, not torchrun")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-operations"), help="logs, and the picture")
    parser.add_argument("--steps", type=int, help="M: the job has 3 M units (150, quick 45)")
    parser.add_argument("--rates", type=float, nargs="+", help=f"failures a minute {RATES}, quick {QUICK_RATES}")
    parser.add_argument("--rounds", type=int, help="undisturbed runs of each system (2, quick 1)")
    parser.add_argument("--device-s", type=float, default=0.25, help="what an accelerator would take for a unit")
    parser.add_argument("--width", type=int, default=512, help="of the model: 512 has 5M parameters")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ |= {"KILL_DEVICE_S": str(args.device_s), "KILL_WIDTH": str(args.width)}
    steps = args.steps or (45 if args.quick else 150)
    rounds, short = args.rounds or (1 if args.quick else 2), 30 if args.quick else 60
    step_s, calm, rows = undisturbed(args.out, rounds, short)
    plain = step_s[Plain.name]
    checkpoint_s = step_s.pop(Saving.name) - plain
    for rate in args.rates or (QUICK_RATES if args.quick else RATES):
        for kind in (Ours, Forked) if args.quick else (Ours, Forked, Torchrun):
            own = step_s.get(kind.name, plain)
            system = kind(args.out / f"{kind.name}-{rate:g}".replace(", ", "-"), steps)
            if not isinstance(system, Ours):
                system.every = young(checkpoint_s, rate, plain)
            found, kills = run(system, strikes(rate, args.seed), 6 * steps * plain + 60)
            row = {"system": kind.name, "failure_rate": rate, "every": system.every}
            rows.append(row | result(found, kills, units=steps * REPLICAS, step_s=own, folder=system.folder))
            print_table(rows[-1:])
    report = {
        "command": " ".join(["benchmarks/operations.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "device_s": args.device_s, "width": args.width, "seed": args.seed, "replicas": REPLICAS, "step_s": step_s, "calm_s": calm,
        "rows": rows, "goals": goals(rows, step_s, calm, Ours.name, Plain.name),
    }  # fmt: skip
    print_table(rows)
    for goal in report["goals"]:
        print(f"{'reached' if goal['reached'] else 'MISSED':8} {goal['goal']}: {goal['measured']}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    args.out.mkdir(parents=True, exist_ok=True)
    draw(report, args.out / "operations.png")


if __name__ == "__main__":
    main()
