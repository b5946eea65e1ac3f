"""The stories of docs/protocol.md, played by the real machines in a world where everything takes its usual time.

`python tests/scenarios/stories.py` writes the transcripts beside this file again. They are reviewed like code: what changes in
them is what the protocol does differently.

In a decision, "b1 4" is the second life of replica 1, WORKER of unit 4; states are named STEP/LINEAGE.
"""

from dataclasses import dataclass
from pathlib import Path

from keepstep.protocol.messages import LedgerState, Policy
from keepstep.simulation.clock import SECOND
from keepstep.simulation.plan import Fault, Plan
from keepstep.simulation.play import transcript

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Story:
    """One transcript."""

    name: str
    about: str
    plan: Plan

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.txt"

    def text(self) -> str:
        """What happens, in words. Raises Violation."""
        lines, error = transcript(self.plan)
        if error is not None:
            raise error
        return "\n".join([f"# {self.about}", *lines]) + "\n"


def story(
    name: str, about: str, *faults: Fault, replicas: int = 3, ranks: int = 1, units: int = 9, min_replicas: int = 1,
    max_pending: int = 16, stream: bool = False, heal_s: float = 60, checkpoint_every: int = 0,
) -> Story:  # fmt: skip
    policy = Policy(num_replicas=replicas, min_replicas=min_replicas, checkpoint_every=checkpoint_every)
    cursors = (0,) * replicas if stream else ()
    ledger = LedgerState(policy="stream" if stream else "pool", cursors=cursors, total=units)
    return Story(
        name=name,
        about=about,
        plan=Plan(
            seed=1, replicas=replicas, ranks=ranks, policy=policy, ledger=ledger, max_pending=max_pending,
            faults=faults, heal_at=int(heal_s * SECOND), jitter=0.0,
        ),
    )  # fmt: skip


def fault(kind: str, replica: int, point: str, nth: int, seconds: float = 1.0, *, rank: int = 0) -> Fault:
    return Fault(kind=kind, replica=replica, point=point, nth=nth, duration=int(seconds * SECOND), rank=rank)


STORIES = [
    story("steady", "Replica 0's initial state is the job's; the others fetch it while the first step goes on."),
    story(
        "dies_in_an_exchange",
        "Replica 1 dies in an exchange: the step is retried without it, on a new ring, and it comes back and catches up.",
        fault("crash", 1, "begin", 3),
    ),
    story(
        "a_rank_dies",
        "One of a replica's two ranks dies: the launcher ends the other one too, and starts the replica again.",
        fault("crash rank", 1, "begin", 5, rank=1),
        ranks=2,
        units=12,
    ),
    story(
        "completed_by_some",
        "A link breaks when only replica 0 has the sum: what it committed stands, and the others catch up with it.",
        fault("break ring", 0, "sum", 2),
    ),
    story(
        "revoked",
        "Replica 0 alone completes decision 2 and is cut off before it can say so: the step is trained again without it.",
        fault("cut off", 0, "sum", 2, 4.0),
        fault("break ring", 0, "sum", 2),
        units=12,
    ),
    story(
        "back_along_the_chain",
        "The only replica that completed the newest step dies before anybody has fetched it: the job goes back a step.",
        fault("break ring", 0, "sum", 2),
        fault("crash", 0, "begin", 3, 1.0),
    ),
    story(
        "slow_fetch",
        "A fetch outlasts steps: their sums are kept and replayed; nobody waits for it.",
        fault("crash", 1, "begin", 2, 0.5),
        fault("slow fetch", 1, "fetch", 2, 5.0),
        replicas=2,
        units=15,
    ),
    story(
        "too_slow_fetch",
        "The same with room for one sum only: the fetch is given up and a newer state is fetched.",
        fault("crash", 1, "begin", 2, 0.5),
        fault("slow fetch", 1, "fetch", 2, 2.0),
        replicas=2,
        units=18,
        max_pending=1,
    ),
    story(
        "sources_die",
        "All sources of a fetch die: the replica offers the state that it held before, and the job goes on from that.",
        fault("cut off", 1, "sum", 2, 4.0),
        fault("crash", 0, "serve", 5, 2.0),
        fault("crash", 2, "serve", 1, 2.0),
        units=16,
    ),
    story(
        "min_replicas",
        "Two of three must train: the job starts with a GATHER, and waits in one while two are away.",
        fault("crash", 1, "begin", 3, 2.0),
        fault("crash", 2, "begin", 3, 3.0),
        min_replicas=2,
    ),
    story(
        "frozen",
        "A leader is frozen for longer than its lease: the others go on, and it catches up.",
        fault("freeze", 1, "begin", 3, 5.0),
        units=15,
    ),
    story(
        "stands_aside",
        "Replicas 1 and 2 lose each other and both reach the store: after two failures one stands aside, and comes back.",
        Fault(kind="cut link", replica=1, other=2, point="begin", nth=3, duration=9 * SECOND),
        units=48,
    ),
    story(
        "store_away",
        "The store is away for 4 s in the middle of a step: the step is completed, the next one waits.",
        fault("store away", 0, "begin", 3, 4.0),
    ),
    story(
        "late_for_the_end",
        "A replica is restarted when the others have trained the last unit: they wait for it, so that all end with equal bits.",
        fault("crash", 1, "begin", 3, 3.0),
    ),
    story(
        "streams",
        "Each replica has its own stream of units; that of a dead one stands still until it is back.",
        fault("crash", 1, "begin", 3, 2.0),
        stream=True,
        units=15,
    ),
    story(
        "restored",
        "Every replica dies at once: all of them load the newest checkpoint, two steps old, and the job goes on from it.",
        fault("crash", 0, "begin", 5),
        fault("crash", 1, "begin", 5),
        fault("crash", 2, "begin", 5),
        units=18,
        checkpoint_every=2,
    ),
    story(
        "no_state_left",
        "Every replica dies at once: no state of the job is left, and the job ends and says so.",
        fault("crash", 0, "begin", 3),
        fault("crash", 1, "begin", 3),
        fault("crash", 2, "begin", 3),
    ),
]


if __name__ == "__main__":
    for each in STORIES:
        each.path.write_text(each.text())
