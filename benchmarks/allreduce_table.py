"""The main table of `allreduce.py`: time, bandwidth, CPU and memory of one sum, for sizes and numbers of ranks.

All implementations live in the same rank processes, one active at a time, and take turns: each once a round, in rotating order.
Each congestion control is a set of connections of its own beside the others, so those take turns too. A round is a few sums of a
small buffer, or one of a large one; its time is that of its slowest rank.

`bound` is no sum: each rank sends its buffer to the next one through a plain socket; time and CPU are multiplied by 2(N-1)/N, the
bytes that a sum must move. It is what an addition for free would leave.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allreduce_impls import IMPLS, why_not
from allreduce_net import Namespace, available_congestion, default_congestion
from allreduce_world import World, soon

Row = dict[str, Any]
PEERS = ("bound", "gloo", "torchft", "keepstep-tcp", "keepstep-shm", "pypccl")
REPEATS = {256 << 10: 16, 4 << 20: 4}  # sums in one round of small buffers
SPARE_BYTES = 400 << 20  # of each rank, beside its buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One number of ranks, and what is measured with it."""

    n: int
    sizes: Sequence[int]
    impls: Sequence[str]  # NAME@CONGESTION
    rounds: int
    budget_s: float  # for the rounds of one size


def loading(names: Sequence[str]) -> tuple[list[str], list[Row]]:
    """Those that run here, and a row for each that does not."""
    reasons = {name: why_not(name) for name in names}
    rows = [{"impl": name, "skipped": why} for name, why in reasons.items() if why]
    return [name for name in names if not reasons[name]], rows


def join_all(world: World, impls: Sequence[str], **settings: Any) -> None:
    """Each with its congestion control: set for the whole namespace, since not everybody chooses it for a socket."""
    for impl in impls:
        for namespace in set(world.namespaces) - {None}:
            namespace.set_congestion(impl.partition("@")[2])
        world.join(impl, **settings)


def available_bytes() -> int:
    return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10


def measure(case: Case, namespace: Namespace | None, tell: Callable[[Row], None]) -> list[Row]:
    """The rows of one number of ranks."""
    rows: list[Row] = []
    room = available_bytes() // case.n - SPARE_BYTES
    sizes = [size for size in sorted(case.sizes) if 2 * size <= room]
    for size in set(case.sizes) - set(sizes):
        rows.append({"impl": "all", "n": case.n, "bytes": size, "skipped": "not enough free memory"})
    if not sizes:
        return rows
    with World(case.n, [namespace]) as world:
        join_all(world, case.impls)
        world.call("buffers", nbytes_max=sizes[-1])
        for size in sizes:
            for row in measure_size(case, world, size):
                rows.append(row)
                tell(row)
    return rows


def measure_size(case: Case, world: World, size: int) -> list[Row]:
    ranks, repeats = list(range(case.n)), REPEATS.get(size, 1)
    world.call("resize", nbytes=size, timeout_s=300)
    warm = {impl: world.call("warm_up", impl=impl, check=ranks, timeout_s=120) for impl in case.impls}
    start, one_round = time.monotonic(), 0.0
    seconds: dict[str, list[float]] = {impl: [] for impl in case.impls}
    cpu: dict[str, list[float]] = {impl: [] for impl in case.impls}
    for turn in range(case.rounds):
        if turn >= 3 and time.monotonic() - start + one_round > case.budget_s:
            break
        for place in range(len(case.impls)):
            impl = case.impls[(turn + place) % len(case.impls)]
            world.call("refill")
            replies = world.call("round", impl=impl, repeats=repeats, at=soon(), timeout_s=120)
            seconds[impl].append(max(r["seconds"] for r in replies) / repeats)
            cpu[impl].append(sum(r["cpu_s"] for r in replies) / repeats)
        one_round = (time.monotonic() - start) / (turn + 1)
    rows = []
    for impl in case.impls:
        name, _, congestion = impl.partition("@")
        factor = 2 * (case.n - 1) / case.n if IMPLS[name].moves_whole_buffers else 1.0
        median = statistics.median(seconds[impl]) * factor
        rows.append(
            {
                "impl": name,
                "congestion_control": congestion,
                "n": case.n,
                "bytes": size,
                "median_s": median,
                "best_s": min(seconds[impl]) * factor,
                "worst_s": max(seconds[impl]) * factor,
                "algbw_gb_s": size / median / 1e9,
                "cpu_s_per_gb": statistics.median(cpu[impl]) * factor / size * 1e9,
                "peak_extra_mb": max(r["extra_mb"] for r in warm[impl]),
                "rounds": len(seconds[impl]),
                "sums_per_round": repeats,
                "right": all(r["right"] for r in warm[impl]),
            }
        )
    return rows


def best_congestion(namespace: Namespace, rounds: int = 7, size: int = 64 << 20) -> tuple[str, list[Row]]:
    """The algorithm with which gloo and we together are fastest: the highest product of speeds (2 ranks, 64 MB)."""
    algorithms = available_congestion()
    impls = [f"{name}@{algorithm}" for algorithm in algorithms for name in ("gloo", "keepstep-tcp")]
    case = Case(n=2, sizes=[size], impls=impls, rounds=rounds, budget_s=20.0)
    rows = measure(case, namespace, lambda row: None)

    def product(algorithm: str) -> float:
        times = [r["median_s"] for r in rows if r["congestion_control"] == algorithm]
        return -times[0] * times[1]

    return max(algorithms, key=product), rows


def choose_congestion(
    wanted: Sequence[str], namespace: Namespace | None, say: Callable[[str], None]
) -> tuple[list[str], list[Row]]:
    """Names for "default" and "best"; and the rows of the trial behind "best"."""
    if namespace is None:
        say("Only the kernel's default congestion control is measured: setting another one for gloo needs root.")
        return [default_congestion()], []
    names, trial = [], []
    for name in wanted:
        if name == "best":
            name, trial = best_congestion(namespace)
            speeds = ", ".join(f"{r['impl']} {r['congestion_control']} {r['algbw_gb_s']:.2f}" for r in trial)
            say(f"Best congestion control for gloo and keepstep together: {name} (GB/s at N=2, 64 MB: {speeds}).")
        name = default_congestion() if name == "default" else name
        names += [] if name in names else [name]
    return names, trial


# --- on the terminal -----------------------------------------------------------------------------------------------


def header() -> str:
    return (
        f"{'N':>2} {'MB':>7}  {'':14}{'congestion':>10} {'median ms':>10} {'GB/s':>6} {'/gloo':>6} {'CPU s/GB':>9} "
        f"{'extra MB':>9} {'rounds':>7}"
    )


class Printer:
    """A line for each row as it comes, with its speed relative to gloo under the same congestion control."""

    def __init__(self) -> None:
        self._gloo: dict[tuple[int, int, str], float] = {}

    def __call__(self, row: Row) -> None:
        key = (row["n"], row["bytes"], row["congestion_control"])
        if row["impl"] == "gloo":
            self._gloo[key] = row["median_s"]
        ratio = f"{self._gloo[key] / row['median_s']:.2f}" if key in self._gloo else "-"
        print(
            f"{row['n']:2} {row['bytes'] / (1 << 20):7g}  {row['impl']:14}{row['congestion_control']:>10} "
            f"{row['median_s'] * 1e3:10.2f} {row['algbw_gb_s']:6.2f} {ratio:>6} {row['cpu_s_per_gb']:9.2f} "
            f"{row['peak_extra_mb']:9.1f} {row['rounds']:7}" + ("" if row["right"] else "  WRONG RESULT"),
            flush=True,
        )
