"""`python -m keepstep.simulation`: one seed in words, or many and what they came to. Exit code 1 if a promise was broken."""

import argparse
import sys

from keepstep.simulation.plan import Plan, plan_of
from keepstep.simulation.play import Tally, play_many, shrink, transcript


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m keepstep.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one, and print what happens")
    parser.add_argument("--faults", help='only these of its faults, by number: "0,3"')
    parser.add_argument("--shrink", action="store_true", help="make it smaller first, if it fails")
    parser.add_argument("--seeds", type=int, default=2000, help="play so many [default: %(default)s]")
    parser.add_argument("--first", type=int, default=0, help="beginning with this one")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    if options.seed is not None:
        plan = plan_of(options.seed)
        if options.faults is not None:
            plan = plan.only(tuple(int(i) for i in options.faults.split(",") if i))
        return show(plan, smaller=options.shrink)
    return many(options.first, options.seeds, options.processes)


def show(plan: Plan, *, smaller: bool) -> int:
    """Prints one world."""
    lines, error = transcript(plan)
    if error is not None and smaller:
        plan = shrink(plan)
        lines, error = transcript(plan)
    print(f"{plan.replicas} replicas of {plan.ranks} ranks, {plan.policy}, {plan.ledger}")
    for number, fault in enumerate(plan.faults):
        print(f"fault {number}: {fault}")
    print("\n".join(lines))
    if error is not None:
        print(f"VIOLATION {error}")
    return 0 if error is None else 1


def many(first: int, count: int, processes: int) -> int:
    """Prints every violation with the command that replays it, and the tally as the last line."""
    total = Tally()
    for tally in play_many(first, count, processes):
        total.add(tally)
        for seed, what in tally.violations.items():
            print(f"seed {seed}: {what}\n    python -m keepstep.simulation --seed {seed} --shrink", flush=True)
    endings = ", ".join(f"{ending}: {n}" for ending, n in sorted(total.endings.items()))
    print(f"endings: {endings}; {total.events} events")
    print(total)
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
