"""What one world is like and what goes wrong in it, all made from one seed.

A fault happens at a time, or at the n-th time that a replica passes a *point* (see `POINTS`), so that short moments are hit as
often as long ones. A plan is a value: leaving faults out of it gives a smaller plan, which is how the shrinker works.
"""

import random
from dataclasses import dataclass, field, replace

from keepstep.protocol.ids import ReplicaId, UnitId
from keepstep.protocol.messages import LedgerState, Policy
from keepstep.protocol.pace import PaceSettings
from keepstep.simulation.clock import MS, SECOND

POINTS = (
    "report",  # its leader is about to write a report
    "reported",  # the store has the report
    "publish",  # its leader has decided and not said so yet
    "adopt",  # its leader has read a decision that names it
    "told",  # one of its ranks has been told the decision
    "begin",  # one of its ranks has begun to exchange
    "sum",  # one of its ranks has a complete sum
    "vote",  # one of its ranks is about to vote
    "commit",  # its leader has told its ranks to commit
    "apply",  # the main thread of one of its ranks begins to overwrite a state
    "fetch",  # one of its ranks starts to fetch
    "range",  # one of its ranks has got a piece of a state
    "serve",  # one of its ranks is asked for a piece of its state
    "load",  # the main thread of one of its ranks begins to load a fetched state
    "save",  # all its ranks have written a checkpoint, which is not published yet
)

KINDS = {  # and how often
    "crash": 30,  # all ranks at once; `seen`: the launcher notices and says so
    "crash rank": 12,  # one rank; the others follow when somebody notices
    "freeze": 12,  # nothing runs for `duration`, then everything is late
    "freeze rank": 8,
    "mute": 8,  # nothing from its leader reaches the store
    "blind": 8,  # nothing from the store reaches its leader
    "cut off": 8,  # both
    "store away": 4,  # for everybody
    "store error": 8,  # its next calls fail at once, though the watch goes on
    "late write": 5,  # its next write reaches the store after `duration`, when it has given it up long since
    "slow watch": 5,  # news reach its leader a hundred times more slowly
    "break ring": 14,  # a link of its ring is lost
    "cut link": 6,  # no bytes from `replica` to `other`, one way
    "cut tree": 5,  # no bytes between its leader and rank `rank`, one way (`seen`: down) or the other
    "slow tree": 6,  # messages from rank `rank` to its leader take a hundred times as long
    "slow main": 8,  # its main threads take ten times as long
    "slow fetch": 8,  # its transfers take twenty times as long
    "damage": 4,  # the next piece of state that it serves is damaged
}

DISK_KINDS = {  # the same, in worlds with checkpoints
    "crash all": 10,  # every replica at once
    "disk full": 3,  # nothing can be saved
    "rot": 3,  # the newest checkpoint cannot be read any more
}
REQUESTS = {  # not faults: what operators want
    "leave": 4,  # the replica is to leave; not `seen`: and is asked back after `duration`
    "stop": 1,  # the whole job is to stop
}
HANGS = {"hang main": 1}  # its main thread makes no progress, or those of all its ranks (`seen`), and all else lives
LASTING = 7_919  # makes a generator of its own for what came later, so that a seed's other faults stay what they were


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    replica: int
    at: int = 0  # ns; counts if there is no point
    point: str = ""
    nth: int = 1
    rank: int = 0
    other: int = 0
    duration: int = SECOND
    seen: bool = True

    def __str__(self) -> str:
        when = f"at its {ordinal(self.nth)} {self.point}" if self.point else f"at {self.at / SECOND:.3f} s"
        what = self.kind
        if self.kind in DISK_KINDS:
            return f"{what}, {when if not self.point else f'when replica {self.replica} is {when}'}"
        if self.kind in ("crash rank", "freeze rank", "slow tree") or (self.kind in HANGS and not self.seen):
            what = f"{self.kind}{' of rank' if self.kind == 'slow tree' else ''} {self.rank}"
        if self.kind == "cut link":
            what = f"cut link to replica {self.other}"
        if self.kind == "cut tree":
            what = f"cut tree {'down to' if self.seen else 'up from'} rank {self.rank}"
        seen = "" if self.seen or self.kind not in ("crash", "crash rank") else ", and no launcher sees it"
        return f"replica {self.replica}: {what}, {when}, for {self.duration / SECOND:.3f} s{seen}"


def ordinal(n: int) -> str:
    """1st, 2nd, 3rd, 4th ... (up to 20)."""
    return f"{n}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(n, 'th') }"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One world. Its every random choice comes from `seed` and the plan's other fields."""

    seed: int
    replicas: int
    ranks: int
    policy: Policy
    ledger: LedgerState  # of the beginning
    pace: PaceSettings = field(default_factory=PaceSettings)
    max_steps: int | None = None
    exchanges: int = 1
    max_pending: int = 16
    copies: bool = True  # whether a source copies aside what a reader still needs
    drifts: tuple[float, ...] = ()  # of each replica's clock
    faults: tuple[Fault, ...] = ()
    heal_at: int = 0  # ns: from then on nothing goes wrong any more
    lasting: tuple[int, int] | None = None  # these two lose each other at half of `heal_at`, and that never heals
    more_steps: int = 1  # then this many steps with everybody are demanded, or the end of the job
    jitter: float = 1.0  # 0: everything takes its usual time
    begun: LedgerState | None = None  # of a checkpoint that is there from the beginning, though the store is empty
    begun_at: int = 0  # and its step

    @property
    def checkpoints(self) -> bool:
        """Whether there may be any."""
        return self.policy.checkpoint_every > 0 or self.begun is not None

    def only(self, faults: tuple[int, ...]) -> "Plan":
        """The same with just these faults, named by their place."""
        return replace(self, faults=tuple(self.faults[i] for i in faults))


def plan_of(seed: int, kinds: tuple[str, ...] = ()) -> Plan:
    """The world of a seed; in it, only faults of these kinds, if any are named."""
    rng = random.Random(seed)
    replicas = rng.choice([1, 2, 2, 3, 3, 3, 3, 4])
    ranks = rng.choice([1, 1, 1, 2, 2, 3])
    heal_at = rng.choice([2, 4, 6, 8]) * SECOND
    stream = rng.random() < 0.25
    ends = rng.random() < 0.5
    max_steps = rng.choice([3, 5, 7]) if rng.random() < 0.15 else None
    total = rng.choice([4, 6, 8]) * replicas - rng.choice([0, 0, 1]) if ends else None
    ledger = LedgerState(policy="stream" if stream else "pool", cursors=(0,) * replicas if stream else (), total=total)
    policy = _policy(rng, replicas)
    plan = Plan(
        seed=seed,
        replicas=replicas,
        ranks=ranks,
        policy=policy,
        pace=_pace(random.Random(seed * 41 + 3), policy),
        ledger=ledger,
        max_steps=max_steps,
        exchanges=rng.choice([1, 1, 2]),
        max_pending=rng.choice([0, 1, 2, 16, 16]),
        copies=rng.random() < 0.8,
        drifts=tuple(rng.choice([1.0, 1.0, 0.8, 1.25]) for _ in range(replicas)),
        faults=tuple(
            _fault(rng, replicas, ranks, heal_at, KINDS, kinds)
            for _ in range(rng.choice([0, 1, 2, 2, 3, 3, 4, 6, 8]))
            if not kinds or set(kinds) & KINDS.keys()
        ),
        heal_at=heal_at,
        lasting=_lasting(random.Random(seed + LASTING), replicas, policy),
        more_steps=1,
    )
    plan = _with_checkpoints(plan, random.Random(seed * 31 + 7), kinds)
    plan = _with_requests(plan, random.Random(seed * 37 + 5), kinds)
    plan = _with_hangs(plan, random.Random(seed * 43 + 11), kinds)
    patient = replace(plan.policy, lost_wait_ns=2 * plan.heal_at)  # longer than anything lasts, by any clock
    return replace(plan, policy=patient)


def _with_checkpoints(plan: Plan, rng: random.Random, kinds: tuple[str, ...]) -> Plan:
    """In some worlds states are saved, in some of these one has been saved before; then everybody may die."""
    if kinds and not set(kinds) & DISK_KINDS.keys():
        return plan
    if not kinds and rng.random() < 0.7:
        return plan
    faults = [
        _fault(rng, plan.replicas, plan.ranks, plan.heal_at, DISK_KINDS, kinds) for _ in range(rng.choice([0, 1, 1, 2]))
    ]
    begun_at, ledger = rng.choice([0, 0, 1, 2]), plan.ledger
    done = begun_at * plan.replicas
    ledger = replace(ledger, cursors=(begun_at,) * len(ledger.cursors)) if ledger.cursors else replace(
        ledger, next_unit=UnitId(done)
    )  # fmt: skip
    return replace(
        plan,
        policy=replace(plan.policy, checkpoint_every=rng.choice([1, 1, 2, 3])),
        faults=(*plan.faults, *faults),
        begun=ledger if begun_at else None,
        begun_at=begun_at,
    )


def _with_requests(plan: Plan, rng: random.Random, kinds: tuple[str, ...]) -> Plan:
    """In some worlds somebody wants replicas to leave. Not where nobody else could train their data, or give it to others."""
    if kinds and not set(kinds) & REQUESTS.keys():
        return plan
    if (not kinds and rng.random() < 0.8) or plan.ledger.cursors or plan.lasting is not None:
        return plan
    asked = [
        _fault(rng, plan.replicas, plan.ranks, plan.heal_at, REQUESTS, kinds) for _ in range(rng.choice([1, 1, 2]))
    ]
    return replace(plan, faults=(*plan.faults, *asked))


def _with_hangs(plan: Plan, rng: random.Random, kinds: tuple[str, ...]) -> Plan:
    """In some worlds main threads hang, some of them longer than the straggler policy allows. They heal later."""
    if (kinds and not set(kinds) & HANGS.keys()) or (not kinds and rng.random() < 0.85):
        return plan
    heal_at = max(plan.heal_at, 30 * SECOND)
    faults = [
        replace(
            _fault(rng, plan.replicas, plan.ranks, 8 * SECOND, HANGS, kinds),
            duration=int(rng.choice([1, 3, 8, 15, 20]) * SECOND * (0.5 + rng.random())),
        )
        for _ in range(rng.choice([1, 1, 2]))
    ]
    return replace(plan, faults=(*plan.faults, *faults), heal_at=heal_at)


def _lasting(rng: random.Random, replicas: int, policy: Policy) -> tuple[int, int] | None:
    """Only where the others can go on, and where a third one can give a state to either."""
    if replicas < 3 or policy.min_replicas == replicas or rng.random() > 0.1:
        return None
    one, other = rng.sample(range(replicas), 2)
    return one, other


def _policy(rng: random.Random, replicas: int) -> Policy:
    zones = {ReplicaId(i): rng.choice("ab") for i in range(replicas)} if rng.random() < 0.2 else {}
    return Policy(
        num_replicas=replicas,
        min_replicas=min(replicas, rng.choice([1, 1, 1, 2])),
        start_wait_ns=rng.choice([1, 10, 60]) * SECOND,
        straggler_ns=rng.choice([1, 5, 60]) * SECOND,
        member_grace_ns=rng.choice([0, 200 * MS, 200 * MS]),
        join_wait_ns=rng.choice([0, 0, 0, SECOND]),
        restore_wait_ns=rng.choice([3, 10, 10]) * SECOND,
        finish_wait_ns=rng.choice([5, 30]) * SECOND,
        ancestry_max=rng.choice([2, 32, 32]),
        units_per_worker=rng.choice([1, 1, 1, 2]),
        zones=zones,
    )


def _pace(rng: random.Random, policy: Policy) -> PaceSettings:
    """A step takes 0.7 s. The worse the settings, the more is told of a main thread that is only a little late."""
    floor = rng.choice([100 * MS, SECOND, SECOND])
    return PaceSettings(
        floor_ns=floor, ceiling_ns=rng.choice([floor, 3 * SECOND, 300 * SECOND]), straggler_ns=policy.straggler_ns
    )


def _fault(
    rng: random.Random, replicas: int, ranks: int, heal_at: int, table: dict[str, int], kinds: tuple[str, ...]
) -> Fault:
    among = [kind for kind in kinds if kind in table] or list(table)
    (kind,) = rng.choices(among, [table[k] for k in among])
    by_point = rng.random() < 0.6
    points = ("publish", "report") if kind in ("store error", "late write") and rng.random() < 0.7 else POINTS
    return Fault(
        kind=kind,
        replica=rng.randrange(replicas),
        at=rng.randrange(heal_at),
        point=rng.choice(points) if by_point else "",
        nth=rng.choice([1, 1, 2, 2, 3, 4, 5, 7]),
        rank=rng.randrange(ranks) or (min(1, ranks - 1) if kind in ("cut tree", "slow tree") else 0),
        other=rng.randrange(replicas),
        duration=int(rng.choice([0.3, 1.0, 3.0, 6.0, 12.0]) * SECOND * (0.5 + rng.random())),
        seen=rng.random() < 0.7,
    )
