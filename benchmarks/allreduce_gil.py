"""Sums beside a busy training thread: the part `gil` of `allreduce.py`.

Two ranks. The main thread of each runs a loop, another thread one sum after the other; then each alone. Two loops and the sums
share the machine's cores, so some slowing down is the cores' and not the interpreter's: compare with gloo, whose threads never
need the interpreter.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from allreduce_net import Namespace
from allreduce_table import join_all
from allreduce_world import World, soon

N = 2
LOOPS = ("matmul", "python")
Json = dict[str, Any]


def beside(
    namespace: Namespace | None, impls: Sequence[str], repetitions: int, nbytes: int, seconds: float
) -> list[Json]:
    """A row for each implementation and loop. The medians of a few turns."""
    turns_alone: dict[str, list[float]] = {loop: [] for loop in LOOPS}
    alone: dict[str, list[float]] = {impl: [] for impl in impls}
    together: dict[tuple[str, str], list[Json]] = {(impl, loop): [] for impl in impls for loop in LOOPS}
    with World(N, [namespace]) as world:
        join_all(world, impls)
        world.call("buffers", nbytes_max=nbytes)
        world.call("resize", nbytes=nbytes)

        def run(impl: str, loop: str) -> Json:
            replies = world.call("beside", impl=impl, loop=loop, seconds=seconds, at=soon())
            return {
                "turns": statistics.mean(r["turns_per_s"] for r in replies),
                "sum_s": max(r["sum_s"] or seconds for r in replies),  # none was ready: at least so long
            }

        for impl in impls:
            world.call("warm_up", impl=impl, check=list(range(N)))
        for turn in range(repetitions):
            for loop in LOOPS:
                turns_alone[loop].append(run("", loop)["turns"])
            for place in range(len(impls)):
                impl = impls[(turn + place) % len(impls)]
                alone[impl].append(run(impl, "")["sum_s"])
                for loop in LOOPS:
                    together[impl, loop].append(run(impl, loop))
    return [
        {
            "impl": impl.partition("@")[0],
            "congestion_control": impl.partition("@")[2],
            "n": N,
            "bytes": nbytes,
            "loop": loop,
            "loop_speed": statistics.median(r["turns"] for r in both) / statistics.median(turns_alone[loop]),
            "sum_alone_s": statistics.median(alone[impl]),
            "sum_beside_s": statistics.median(r["sum_s"] for r in both),
            "repetitions": repetitions,
        }
        for (impl, loop), both in together.items()
    ]


def print_beside(rows: list[Json]) -> None:
    print(f"Sums of {rows[0]['bytes'] >> 20} MB beside a loop in the main thread, N={N}")
    print(f"{'':14} {'loop':8} {'its speed':>10} {'sum alone, ms':>14} {'beside it, ms':>14} {'ratio':>6}")
    for r in rows:
        alone, beside_it = r["sum_alone_s"] * 1e3, r["sum_beside_s"] * 1e3
        print(
            f"{r['impl']:14} {r['loop']:8} {r['loop_speed']:10.2f} {alone:14.1f} {beside_it:14.1f} {beside_it / alone:6.2f}"
        )
