"""Members that leave, die and freeze: the parts `reconfigure`, `kill` and `freeze` of `allreduce.py`.

Four ranks on one machine. Every implementation lives in the same processes, and they take turns.
"""

import random
import signal
import statistics
import time
from collections.abc import Sequence
from typing import Any

from allreduce_net import Namespace
from allreduce_table import join_all
from allreduce_world import World, soon

N = 4
Json = dict[str, Any]


def median_and_worst(values: Sequence[float], name: str) -> Json:
    return {f"{name}median_s": statistics.median(values), f"{name}worst_s": max(values)}


# --- a member leaves --------------------------------------------------------------------------------------------


def reconfigure(namespace: Namespace | None, impls: Sequence[str], repetitions: int) -> Json:
    """From the call of `configure` to a connected ring on the slowest of the three that stay; and of the four when it returns."""
    leave: dict[str, list[float]] = {impl: [] for impl in impls}
    come: dict[str, list[float]] = {impl: [] for impl in impls}
    with World(N, [namespace]) as world:
        join_all(world, impls)
        everybody = {impl: world.members(impl, range(N)) for impl in impls}
        for turn in range(repetitions):
            for place in range(len(impls)):
                impl = impls[(turn + place) % len(impls)]
                staying = [m for m in everybody[impl] if m["rank"] != turn % N]
                leave[impl].append(slowest(world, impl, staying, 2 * turn + 2))
                come[impl].append(slowest(world, impl, everybody[impl], 2 * turn + 3))
    by_impl = {
        impl.partition("@")[0]: {**median_and_worst(leave[impl], ""), **median_and_worst(come[impl], "return_")}
        for impl in impls
    }
    report: Json = {"n": N, "repetitions": repetitions, "by_impl": by_impl}
    for name, prefix in (("keepstep-tcp", ""), ("torchft", "torchft_")):
        if name in by_impl:
            report |= {f"{prefix}{key}": by_impl[name][key] for key in ("median_s", "worst_s")}
    return report


def slowest(world: World, impl: str, members: list[Json], generation: int) -> float:
    return max(r["seconds"] for r in world.configure(impl, members, generation, at=soon()))


def print_reconfigure(report: Json) -> None:
    print(f"A new ring of 3 of 4 members, and back to 4; {report['repetitions']} repetitions, slowest member, ms")
    print(f"{'':14} {'leave: median':>14} {'worst':>8} {'return: median':>15} {'worst':>8}")
    for name, r in report["by_impl"].items():
        print(
            f"{name:14} {r['median_s'] * 1e3:14.2f} {r['worst_s'] * 1e3:8.2f} {r['return_median_s'] * 1e3:15.2f} "
            f"{r['return_worst_s'] * 1e3:8.2f}"
        )


# --- kill -9 in the middle of a sum -------------------------------------------------------------------------------


def kill(namespace: Namespace | None, impls: Sequence[str], repetitions: int, nbytes: int, seed: int = 1) -> Json:
    """From the kill to the sum of the survivors, beside a sum of three members that nothing disturbs."""
    rng, found = random.Random(seed), {impl: [] for impl in impls}
    with World(N, [namespace]) as world:
        join_all(world, impls)
        world.call("buffers", nbytes_max=nbytes)
        world.call("resize", nbytes=nbytes, timeout_s=120)
        generation = 2
        for turn in range(repetitions):
            for place in range(len(impls)):
                impl = impls[(turn + place) % len(impls)]
                found[impl].append(one_kill(world, impl, generation, rng))
                generation += 2
                victim = found[impl][-1]["victim"]
                world.restart(victim)
                for name in impls:
                    world.call("open", [victim], impl=name)
                world.call("buffers", [victim], nbytes_max=nbytes)
                world.call("resize", [victim], nbytes=nbytes, timeout_s=120)
    return {
        "n": N,
        "bytes": nbytes,
        "repetitions": repetitions,
        "by_impl": {impl.partition("@")[0]: summary_of_kills(found[impl]) for impl in impls},
    }


def one_kill(world: World, impl: str, generation: int, rng: random.Random) -> Json:
    everybody = world.members(impl, range(N))
    world.configure(impl, everybody, generation)
    world.call("warm_up", impl=impl, check=list(range(N)))
    whole_s = timed(world, impl, range(N))
    victim = rng.randrange(N)
    survivors = [r for r in range(N) if r != victim]
    members = [everybody[r] for r in survivors]
    each: dict[int, Json] = {
        r: {"retry": {"members": members, "position": i, "generation": generation + 1}} for i, r in enumerate(survivors)
    }
    world.call("refill")
    at = soon()
    world.post("exchange_until_done", {**each, victim: {}}, impl=impl, at=at, check=survivors)
    fraction = rng.uniform(0.2, 0.8)
    time.sleep(max(0.0, at + fraction * whole_s - time.monotonic()))
    killed_at = world.signal(victim, signal.SIGKILL)
    replies = world.gather(survivors)
    undisturbed = statistics.median(timed(world, impl, survivors) for _ in range(3))
    if any(r["failed_at"] is None for r in replies):
        raise RuntimeError("the kill came after the exchange: it cannot be measured on a machine that varies so much")
    return {
        "victim": victim,
        "first_told_s": min(r["failed_at"] for r in replies) - killed_at,
        "all_told_s": max(r["failed_at"] for r in replies) - killed_at,
        "ring_s": max(r["ready_at"] for r in replies) - killed_at,
        "done_s": max(r["done_at"] for r in replies) - killed_at,
        "undisturbed_s": undisturbed,
        "right": all(r["right"] for r in replies),
    }


def timed(world: World, impl: str, ranks: Sequence[int]) -> float:
    """One sum, of its slowest rank."""
    world.call("refill", ranks)
    at = soon()
    return float(max(r["done_at"] for r in world.call("exchange_until_done", ranks, impl=impl, at=at)) - at)


def summary_of_kills(kills: list[Json]) -> Json:
    report: Json = {"right": all(k["right"] for k in kills), "kills": kills}
    for key in ("first_told", "all_told", "ring", "done", "undisturbed"):
        report |= median_and_worst([k[f"{key}_s"] for k in kills], f"{key}_")
    extra = [k["done_s"] - k["undisturbed_s"] for k in kills]
    return report | median_and_worst(extra, "beyond_an_exchange_")


def print_kill(report: Json) -> None:
    print(
        f"kill -9 of one of 4 in a sum of {report['bytes'] >> 20} MB; {report['repetitions']} kills; ms after it, median / worst"
    )
    print(
        f"{'':14} {'all told':>15} {'new ring':>15} {'sum repeated':>15} {'undisturbed':>12} {'exchange + X: X':>17} {'right':>6}"
    )
    for name, r in report["by_impl"].items():
        cells = [
            f"{r[f'{k}_median_s'] * 1e3:.0f} / {r[f'{k}_worst_s'] * 1e3:.0f}" for k in ("all_told", "ring", "done")
        ]
        extra = f"{r['beyond_an_exchange_median_s'] * 1e3:.0f} / {r['beyond_an_exchange_worst_s'] * 1e3:.0f}"
        print(
            f"{name:14} {cells[0]:>15} {cells[1]:>15} {cells[2]:>15} {r['undisturbed_median_s'] * 1e3:12.0f} {extra:>17} "
            f"{'yes' if r['right'] else 'NO':>6}"
        )


# --- a member freezes -----------------------------------------------------------------------------------------------


def freeze(
    namespace: Namespace | None, impls: Sequence[str], repetitions: int, exchange_s: float = 0.3, seed: int = 1
) -> Json:
    """SIGSTOP while sums that take `exchange_s` follow one another: until the survivors are told, and whom they suspect."""
    rng, found = random.Random(seed), {impl: [] for impl in impls}
    start_bytes = 64 << 20
    with World(N, [namespace]) as world:
        join_all(world, impls)
        world.call("buffers", nbytes_max=512 << 20)
        world.call("resize", nbytes=start_bytes, timeout_s=120)
        world.call("warm_up", impl=impls[0], check=list(range(N)))
        took = statistics.median(timed(world, impls[0], range(N)) for _ in range(3))
        nbytes = min(512 << 20, int(start_bytes * exchange_s / took) >> 20 << 20)
        world.call("resize", nbytes=nbytes, timeout_s=120)
        generation = 2
        for turn in range(repetitions):
            for place in range(len(impls)):
                impl = impls[(turn + place) % len(impls)]
                found[impl].append(one_freeze(world, impl, generation, rng))
                generation += 1
    return {
        "n": N,
        "bytes": nbytes,
        "repetitions": repetitions,
        "by_impl": {impl.partition("@")[0]: summary_of_freezes(found[impl]) for impl in impls},
    }


def one_freeze(world: World, impl: str, generation: int, rng: random.Random) -> Json:
    everybody, victim = world.members(impl, range(N)), rng.randrange(N)
    world.configure(impl, everybody, generation)
    exchange = statistics.median(timed(world, impl, range(N)) for _ in range(4))
    survivors = [r for r in range(N) if r != victim]
    at = soon()
    world.post("exchange_until_done", {r: {} for r in range(N)}, impl=impl, at=at, repeats=1000)
    time.sleep(rng.uniform(1.0, 2.0) * exchange)
    stopped_at = world.signal(victim, signal.SIGSTOP)
    try:
        replies = world.gather(survivors, timeout_s=90)
    finally:
        world.signal(victim, signal.SIGCONT)
    world.gather([victim], timeout_s=90)
    naming = [r["failed_at"] - stopped_at for r in replies if r["suspect"] == victim]
    return {
        "victim": victim,
        "exchange_s": exchange,
        "all_told_s": max(r["failed_at"] for r in replies) - stopped_at,
        "named_s": min(naming, default=None),
        "suspects": {str(r): reply["suspect"] for r, reply in zip(survivors, replies, strict=True)},
        "reasons": {str(r): reply["reason"] for r, reply in zip(survivors, replies, strict=True)},
    }


def summary_of_freezes(freezes: list[Json]) -> Json:
    named = [f["named_s"] for f in freezes if f["named_s"] is not None]
    return {
        "exchange_s": statistics.median(f["exchange_s"] for f in freezes),
        **median_and_worst([f["all_told_s"] for f in freezes], "all_told_"),
        **(median_and_worst(named, "named_") if named else {}),
        "times_named": len(named),  # some survivor suspected the frozen one, not a neighbour that passed the error on
        "freezes": freezes,
    }


def print_freeze(report: Json) -> None:
    print(
        f"SIGSTOP of one of 4 in sums of {report['bytes'] >> 20} MB; {report['repetitions']} times; s after it, median / worst"
    )
    print(f"{'':14} {'a sum takes':>12} {'all are told':>14} {'the frozen one is named':>24} {'by somebody':>12}")
    for name, r in report["by_impl"].items():
        told = f"{r['all_told_median_s']:.2f} / {r['all_told_worst_s']:.2f}"
        named = f"{r['named_median_s']:.2f} / {r['named_worst_s']:.2f}" if r["times_named"] else "-"
        times = f"{r['times_named']} of {report['repetitions']}"
        print(f"{name:14} {r['exchange_s']:12.2f} {told:>14} {named:>24} {times:>12}")
