"""Sums over 2 to 8 processes: keepstep over TCP and shared memory, gloo, torchft's gloo group and pypccl, in one run.

    make bench-allreduce        or   .venv/bin/python benchmarks/allreduce.py --quick --json runs/allreduce.json

Parts (--only): `table` (time, bandwidth, CPU and memory for sizes and numbers of ranks), `reconfigure` (a member leaves),
`kill` (kill -9 in the middle of a sum), `freeze` (SIGSTOP), `limited` (a 1 Gbit/s link, without and with delay), `gil` (beside a
busy training thread). MB are 2^20 bytes, GB 10^9; bandwidth is the size of the buffer divided by the time.

As root everything runs in network namespaces of its own, in which the congestion control is set: nothing outside changes. Without
root only the kernel's default is measured, and `limited` is left out.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import allreduce_faults as faults
import allreduce_figure as figure
import allreduce_gil as gil
import allreduce_limited as lines
import allreduce_table as table
from allreduce_impls import IMPLS
from allreduce_net import Namespace, default_congestion, why_not

from keepstep.runtime.links import LinkSettings

MB = 1 << 20
SIZES = (0.25, 4, 64, 256, 512)
Json = dict[str, Any]


def say(text: str) -> None:
    print(text, flush=True)


def machine() -> Json:
    import torch

    cpu = Path("/proc/cpuinfo").read_text()
    memory = Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]
    return {
        "cpu": cpu.split("model name\t: ")[1].split("\n")[0] if "model name\t: " in cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(int(memory) / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "default_congestion_control": default_congestion(),
        "load_at_start": os.getloadavg()[0],
    }


def run_table(args: argparse.Namespace, namespace: Namespace | None, report: Json) -> None:
    congestions, trial = table.choose_congestion(args.congestion, namespace, say)
    names, skipped = table.loading(args.impls or table.PEERS)
    for row in skipped:
        say(f"Not measured: {row['impl']}: {row['skipped']}.")
    report["congestion_trial"], report["rows"] = trial, skipped
    impls = [f"{name}@{congestion}" for congestion in congestions for name in names]
    say(table.header())
    printer = table.Printer()
    for n in args.n:
        case = table.Case(
            n=n, sizes=[int(size * MB) for size in args.mb], impls=impls, rounds=args.rounds, budget_s=args.budget_s
        )
        report["rows"] += table.measure(case, namespace, printer)


def ours(namespace: Namespace | None, names: Sequence[str]) -> list[str]:
    """Those of `names` that load, with the congestion control that keepstep chooses: it is what its users get."""
    congestion = LinkSettings().congestion if namespace else default_congestion()
    return [f"{name}@{congestion}" for name in table.loading(names)[0]]


def run_reconfigure(args: argparse.Namespace, namespace: Namespace | None, report: Json) -> None:
    impls = ours(namespace, ["keepstep-tcp", "keepstep-shm", "torchft"])
    report["reconfigure"] = faults.reconfigure(namespace, impls, args.repetitions or 100)
    faults.print_reconfigure(report["reconfigure"])


def run_kill(args: argparse.Namespace, namespace: Namespace | None, report: Json) -> None:
    impls = ours(
        namespace, ["keepstep-tcp", "keepstep-shm"]
    )  # kill.py has torchft: its group alone leaves survivors waiting
    report["kill"] = faults.kill(namespace, impls, args.repetitions or 7, 256 * MB)
    faults.print_kill(report["kill"])


def run_freeze(args: argparse.Namespace, namespace: Namespace | None, report: Json) -> None:
    impls = ours(namespace, ["keepstep-tcp", "keepstep-shm"])
    report["freeze"] = faults.freeze(namespace, impls, args.repetitions or 4)
    faults.print_freeze(report["freeze"])


def run_gil(args: argparse.Namespace, namespace: Namespace | None, report: Json) -> None:
    impls = ours(namespace, ["gloo", "keepstep-tcp", "keepstep-shm"])
    report["gil"] = gil.beside(namespace, impls, args.repetitions or 3, 64 * MB, seconds=3.0)
    gil.print_beside(report["gil"])


def run_limited(args: argparse.Namespace, namespace: Namespace | None, report: Json) -> None:
    congestions = list(dict.fromkeys([LinkSettings().congestion, default_congestion()]))
    impls = [f"{name}@{congestion}" for congestion in congestions for name in ("gloo", "keepstep-tcp")]
    report["limited"] = []
    for line, sums in ((lines.SHORT, 2), (lines.LONG, 4)):
        if line.name in args.lines:
            lines.print_line(line)
            rounds = args.repetitions or (7 if line is lines.SHORT else 3)
            report["limited"] += lines.limited(line, impls, rounds, 64 * MB, sums, lines.print_limited)


PARTS = {
    "table": run_table,
    "reconfigure": run_reconfigure,
    "kill": run_kill,
    "freeze": run_freeze,
    "gil": run_gil,
    "limited": run_limited,
}
NEEDS_ROOT = {"limited"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), help="these parts")
    parser.add_argument("--quick", action="store_true", help="the important parts, in 3 minutes")
    parser.add_argument("--n", nargs="*", type=int, default=None, help="numbers of ranks (2 4 8)")
    parser.add_argument("--mb", nargs="*", type=float, default=None, help="sizes in MB (0.25 4 64 256 512)")
    parser.add_argument("--impls", nargs="*", choices=list(IMPLS), help="these implementations")
    parser.add_argument("--congestion", nargs="*", default=None, help="algorithms; also `default` and `best`")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--budget-s", type=float, default=60.0, help="fewer rounds (not under 3) for sizes that take longer"
    )
    parser.add_argument("--lines", nargs="*", choices=["short", "long"], default=["short", "long"], help="of `limited`")
    parser.add_argument(
        "--repetitions",
        type=int,
        default=0,
        help="of `reconfigure` (100), `kill` (7), `freeze` (4), `gil` (3), `limited` (7 and 3)",
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--figure", type=Path, help="draw the table there")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw --figure, from earlier results")
    args = parser.parse_args()
    args.n = args.n or ([2, 4] if args.quick else [2, 4, 8])
    args.mb = args.mb or ([4, 64, 256] if args.quick else list(SIZES))
    args.congestion = args.congestion or (["best"] if args.quick else ["default", "best"])
    args.only = args.only or (["table", "reconfigure"] if args.quick else list(PARTS))
    return args


def stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    args = arguments()
    if args.draw:
        figure.draw(json.loads(args.draw.read_text()), args.figure)
        return
    signal.signal(signal.SIGTERM, stop)
    without = why_not()
    namespace = None if without else Namespace()
    report: Json = {"machine": machine()}
    try:
        for part in args.only:
            if without and part in NEEDS_ROOT:
                say(f"\nThe part `{part}` is left out: {without}.")
                continue
            say(f"\n--- {part}")
            PARTS[part](args, namespace, report)
    except KeyboardInterrupt:
        say("Interrupted.")
        raise SystemExit(130) from None
    finally:
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.figure and "rows" in report:
        figure.draw(report, args.figure)
    say("")


if __name__ == "__main__":
    main()
