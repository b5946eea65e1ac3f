"""Who takes part in the next step, and from which state: one pure function (FT-HSDP section 5.1; docs/protocol.md).

Every leader writes its report to the store; any leader may call `decide` and publish the answer by one compare-and-swap on the
last decision L. The first wins and all read it, so deciders need not agree on clocks, or even on what they see.

    chain of L, newest first:   outcome of L     (step+1, L.seq)    whoever completed L holds it
                                start of L       (step, L.base)     whoever took part and did not
                                ancestry of L    older bases, some tens of them

`decide` takes the newest state of the chain that a living replica reports to hold. Its holders are the WORKERs, everybody else
catches up. A report whose state is not on the chain (a fresh process, or a *revoked* state) never counts as a holder.

Invariants:
  * only reports that answer L count. Whoever has answered L can no longer complete it, so choosing L's start revokes L's
    outcome for good: a replica that completed L but did not say so comes back off the chain. No split brain;
  * a decision's base is on the chain of the one before it, or begins a chain of its own, named by the decision itself: an initial
    state of step 0, or a checkpoint, and this only while nobody who answers L holds a state of the chain;
  * waiting is never needed for safety, only to spare a replica a needless catch-up.

What fails here: nothing living holds a state, and there is no checkpoint (`Halt`); replicas that do not fit together (`Halt`,
naming them). Departs from the paper: it takes the highest step, which splits the job when a member commits and is then cut off.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from keepstep.protocol import apart, checkpoints
from keepstep.protocol.ids import NO_DECISION, Incarnation, QuorumId, ReplicaId, Seq, Step, UnitId
from keepstep.protocol.ledger import assign, commit, complete
from keepstep.protocol.messages import (
    Apart,
    Checkpoint,
    Decision,
    Kind,
    LedgerState,
    Member,
    Policy,
    Report,
    Role,
    StateName,
)  # fmt: skip
from keepstep.protocol.reasons import left_out, names, notes, why
from keepstep.protocol.topology import ring_order


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReport:
    """A report, and when this decider first saw this version of it (ns, its own monotonic clock)."""

    report: Report
    seen_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one decider sees of the store. A report that is present has a living lease."""

    last: Decision | None
    last_seen_at: int  # ns, when this decider first saw `last`
    reports: Mapping[ReplicaId, SeenReport]
    dead: frozenset[Incarnation] = frozenset()  # the launcher saw them exit; their lease may still run
    announced: frozenset[ReplicaId] = frozenset()  # the launcher has (re)started them; no report yet
    lost_at: int = 0  # ns, when this decider last saw a report go, or its life end
    stopping: bool = False  # somebody has asked the job to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """No decision yet. `until`: when the answer may change by itself (ns); None: only when the view changes."""

    reason: str
    until: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The job cannot go on. `misfits`: these replicas must leave, since they do not fit together or not to the job; the
    others, if any, go on without them. Empty: there is no state to go on from, everybody must leave."""

    reason: str
    misfits: frozenset[ReplicaId] = frozenset()


def chain(last: Decision) -> list[StateName]:
    """The states that a next decision may start from, newest first."""
    outcome = [last.outcome] if last.kind is Kind.TRAIN else []
    return [*outcome, last.start, *last.ancestry]


def speculate(decision: Decision, replica_id: ReplicaId) -> tuple[UnitId, ...]:
    """The units this replica gets in the next decision if this one commits everywhere and membership is unchanged.

    So the forward pass starts at once, while report and decision travel. A report that holds them keeps them.
    """
    if decision.kind is not Kind.TRAIN or decision.ledger is None:
        return ()
    workers = decision.workers
    most = max((len(m.units) for m in workers), default=0)  # fewer than units_per_worker only when the data has run out
    if most == 0:
        return ()
    ledger = commit(decision.ledger, [unit for m in workers for unit in m.units])
    return assign(ledger, [(m.replica_id, ()) for m in workers], most).get(replica_id, ())


def decide(view: View, policy: Policy, *, now: int) -> Decision | Wait | Halt:
    """The next decision, or why there is none yet. Any thread; the same arguments give the same answer."""
    live = {i: s for i, s in view.reports.items() if s.report.incarnation not in view.dead}
    last_seq = view.last.seq if view.last else NO_DECISION
    case = _Case(
        last=view.last,
        policy=policy,
        now=now,
        live=live,
        answers=(answers := {i: s for i, s in live.items() if _answers(s.report, last_seq)}),
        reports=[answers[i].report for i in sorted(answers)],
        expected=(view.announced | live.keys()) - {i for i, s in live.items() if s.report.leaving},
        dead=view.dead,
        lost_at=view.lost_at,
        stopping=view.stopping,
    )
    if case.last is None:
        return _first(case)
    if case.last.kind is Kind.END:
        return Wait(reason="the job has ended")
    return _next(case, case.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A view, sorted for deciding."""

    last: Decision | None
    policy: Policy
    now: int
    live: Mapping[ReplicaId, SeenReport]
    answers: Mapping[ReplicaId, SeenReport]  # those of the living that answer `last`
    reports: Sequence[Report]  # the same, by replica
    expected: frozenset[ReplicaId]  # announced or living, and not about to leave
    dead: frozenset[Incarnation]
    lost_at: int
    stopping: bool

    @property
    def seq(self) -> Seq:
        return Seq((self.last.seq if self.last else NO_DECISION) + 1)

    def apart(self, start: StateName) -> tuple[Apart, ...]:
        """Who cannot exchange with whom, if the next decision begins at `start`."""
        if self.last is None:
            return ()
        lives = {s.report.incarnation for s in self.live.values()}
        return apart.learn(self.last, self.reports, lives, completed=start == self.last.outcome)


def _answers(report: Report, last: Seq) -> bool:
    """A report answers one decision. Older ones are stale: their replica may still complete what came after."""
    return report.answers == last


# --- the first decision ----------------------------------------------------------------------------------------


def _first(case: _Case) -> Decision | Wait | Halt:
    policy, reports = case.policy, case.reports
    if case.stopping:
        return Halt(reason="the job was asked to stop before it began")
    if not reports:
        return Wait(reason=f"no replica has reported yet, {policy.num_replicas} are expected")
    misfit = _misfit(reports[:1], reports[1:])
    if misfit is not None:  # nobody can say who is right
        return replace(misfit, misfits=frozenset(case.answers))
    if len(reports) < policy.num_replicas:
        until = min(s.seen_at for s in case.answers.values()) + policy.start_wait_ns
        missing = [ReplicaId(i) for i in range(policy.num_replicas) if i not in case.answers]
        if case.now < until:
            return Wait(reason=f"the job starts when all have reported: waiting for {names(missing)}", until=until)
        if len(reports) < policy.min_replicas:
            return Wait(
                reason=f"{len(reports)} of at least {policy.min_replicas} replicas have reported: waiting for {names(missing)}"
            )
    return _restore(case, "the job starts") or _from_initial_state(case, "the job starts")


def _from_initial_state(case: _Case, cause: str) -> Decision | Wait | Halt:
    """The lowest fresh replica's initial state is state 0 of the job; the others fetch it."""
    fresh = [r for r in case.reports if r.state is None and r.ledger is not None]
    fresh = [r for r in fresh if not r.leaving] or fresh
    if not fresh:
        return Wait(reason=f"{cause}, but no living replica has an initial state: waiting for one to be restarted")
    misfit = _misfit(fresh[:1], case.reports)
    if misfit is not None:
        return replace(misfit, misfits=frozenset(case.answers))
    base, others = fresh[0], [r for r in case.reports if r is not fresh[0] and not r.leaving]
    reason = f"{cause} from the initial state of replica {base.replica_id}"
    start = StateName(step=Step(0), lineage=case.seq)
    plan = _Plan(start=start, ancestry=(), holders=[base], others=others, ledger=base.ledger)
    return _train_or_gather(case, plan, reason)


# --- every other decision --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Where the next decision starts, who holds that state, and who is to get it."""

    start: StateName
    ancestry: tuple[StateName, ...]
    holders: list[Report]
    others: list[Report]
    ledger: LedgerState | None
    restore: Checkpoint | None = None

    def without(self, aside: Collection[ReplicaId]) -> "_Plan":
        return replace(
            self,
            holders=[r for r in self.holders if r.replica_id not in aside],
            others=[r for r in self.others if r.replica_id not in aside],
        )


def _next(case: _Case, last: Decision) -> Decision | Wait | Halt:
    wait = _await_members(case, last)
    if wait is not None:
        return wait
    on_chain = chain(last)
    place = next((i for i, state in enumerate(on_chain) if any(_holds(r, state) for r in case.reports)), None)
    if place is None:
        return _nobody_holds_a_state(case, last, on_chain)
    state = on_chain[place]
    holders = [r for r in case.reports if _holds(r, state)]
    others = [r for r in case.reports if not _holds(r, state)]
    misfit = _misfit(holders, others)
    if misfit is not None:
        return misfit
    staying = _staying(holders, case.policy.min_replicas)
    plan = _Plan(
        start=state,
        ancestry=tuple(on_chain[place + 1 :][: case.policy.ancestry_max]),
        holders=staying,
        others=_staying(others, case.policy.min_replicas - len(staying)),
        ledger=holders[0].ledger,
    )
    reason = why(last, state, (r.replica_id for r in staying))
    if any(r.finished for r in staying) or (plan.ledger is not None and complete(plan.ledger)):
        return _finish(case, last, plan)
    if case.stopping:  # at this boundary, with those who hold the state
        return _stop(case, last, replace(plan, others=[]), f"{reason}; the job was asked to stop")
    return _train_or_gather(case, plan, reason)


def _staying(reports: Sequence[Report], least: int) -> list[Report]:
    """Who does not leave now, of those who hold the state, or of those who are behind. So many are needed that the state is not
    lost and training does not wait: they leave once others hold it."""
    wanted = sum(not r.leaving for r in reports)
    needed = [r for r in reports if r.leaving][: max(0, least - wanted)]
    return [r for r in reports if not r.leaving or r in needed]


def _holds(report: Report, state: StateName) -> bool:
    return report.materialized and report.state == state


def _await_members(case: _Case, last: Decision) -> Wait | None:
    """Whom to wait for, and how long: the waiting rules. The clock starts at the first answer by a member, since an answer
    takes as long as the step takes; once one has answered, the others follow."""
    policy, now = case.policy, case.now
    members = [m for m in last.members if m.replica_id in case.live and _same_life(case.live[m.replica_id], m)]
    late = [m for m in members if m.replica_id not in case.answers]
    answered = [m for m in members if m.replica_id in case.answers]
    if not case.answers or (late and not answered):
        awaited = names(m.replica_id for m in late) if late else "a replica"
        return Wait(reason=f"waiting for {awaited} to answer decision {last.seq}")
    first = _first_answer(case, last)
    slow = [m.replica_id for m in late if m.role is Role.WORKER]
    if slow and now < first + policy.straggler_ns:
        reason = f"waiting for {names(slow)}, alive, to answer decision {last.seq}"
        return Wait(reason=reason, until=first + policy.straggler_ns)
    joining = [m.replica_id for m in late if m.role is Role.CATCHING_UP]
    if joining and last.kind is Kind.GATHER:
        return Wait(reason=f"waiting for {names(joining)} to fetch state {last.step}")
    if joining:
        worker_answers = [case.answers[m.replica_id].seen_at for m in answered if m.role is Role.WORKER]
        until = min(worker_answers) + policy.member_grace_ns if worker_answers else first + policy.straggler_ns
        if now < until:
            return Wait(reason=f"waiting for {names(joining)}, catching up, to answer decision {last.seq}", until=until)
    newcomers = sorted(case.expected - case.answers.keys() - {m.replica_id for m in late})
    if newcomers and now < first + policy.join_wait_ns:
        return Wait(reason=f"waiting for {names(newcomers)} to join", until=first + policy.join_wait_ns)
    return None


def _first_answer(case: _Case, last: Decision) -> int:
    """When the first answer to `last` was seen: by one of its members, or by anyone if they are all gone."""
    by_members = [s.seen_at for m in last.members if (s := case.answers.get(m.replica_id)) and _same_life(s, m)]
    return min(by_members or [s.seen_at for s in case.answers.values()])


def _same_life(seen: SeenReport, member: Member) -> bool:
    return seen.report.incarnation == member.incarnation


def _nobody_holds_a_state(case: _Case, last: Decision, on_chain: Sequence[StateName]) -> Decision | Wait | Halt:
    """No living answer holds a state of the chain. A partition must not roll the job back, so wait first."""
    silent = sorted(
        case.live.keys() - case.answers.keys()
    )  # alive, and may hold one: ending the job cannot be taken back
    patience = max(case.policy.restore_wait_ns, case.policy.straggler_ns) if silent else case.policy.restore_wait_ns
    since = max(_first_answer(case, last), case.lost_at)  # the last holder may have been cut off just now
    until = since + patience
    over = case.now >= until
    for place, state in enumerate(on_chain):
        fetching = [r for r in case.reports if r.state == state]
        if fetching and (over or _all_accounted_for(case, last)):
            ancestry = tuple(on_chain[place + 1 :][: case.policy.ancestry_max])
            plan = _Plan(start=state, ancestry=ancestry, holders=[], others=fetching, ledger=fetching[0].ledger)
            return _gather(
                case, plan, f"no living replica holds state {state.step} yet; its last fetch may still end well"
            )
    if not over:
        awaited = f"{names(silent)} to say what is held there" if silent else "one to come back"
        return Wait(reason=f"no living replica holds a state of the job: waiting for {awaited}", until=until)
    if case.stopping:
        return Halt(reason="the job was asked to stop, and no living replica holds a state of it")
    missing = sorted(case.expected - case.answers.keys())
    until = max(until, since + case.policy.start_wait_ns)
    restored = _restore(case, "no living replica holds a state of the job")
    if isinstance(restored, Decision) and missing and case.now < until:  # they could train from the first step on
        return Wait(reason=f"the job is to be restored from a checkpoint: waiting for {names(missing)}", until=until)
    if restored is not None:
        return restored
    if last.step == 0:
        return _from_initial_state(
            case, "no step had been completed for good and nobody holds state 0: the job starts again"
        )
    nothing = (
        f"no living replica holds a state of the job (decision {last.seq} was for step {last.step}) and there is no "
    )
    nothing += "checkpoint that could be restored"
    lost = [i for i, _ in _away(case, case.answers.keys())]
    until = since + case.policy.lost_wait_ns
    if lost and case.now < until:
        return Wait(reason=f"{nothing}: waiting for {names(lost)}, which nobody has seen end", until=until)
    return Halt(reason=nothing)


def _away(case: _Case, present: Collection[ReplicaId]) -> tuple[tuple[ReplicaId, Incarnation], ...]:
    """Lives that were members and are not `present`, if nobody has seen them end: with the last of them a state may come back."""
    if case.last is None:
        return ()
    lives = {**dict(case.last.away), **{m.replica_id: m.incarnation for m in case.last.members}}
    replaced = {i for i, life in lives.items() if i in case.live and case.live[i].report.incarnation != life}
    gone = lives.keys() - present - replaced
    return tuple((i, lives[i]) for i in sorted(gone) if lives[i] not in case.dead)


def _restore(case: _Case, cause: str) -> Decision | Halt | None:
    """Everybody who can reach the newest checkpoint loads it, so that all of them train the first step; whoever else is there
    fetches it from them afterwards. None: there is no checkpoint."""
    fits = [r for r in case.reports if r.checkpoint is not None and _is_of(r.checkpoint, r)]
    found = checkpoints.newest(r.checkpoint for r in fits if r.checkpoint is not None)
    if found is None:
        return None
    loaders = [r for r in fits if r.checkpoint == found]
    misfit = _misfit(loaders[:1], [r for r in case.reports if r is not loaders[0]])
    if misfit is not None:
        return replace(misfit, misfits=frozenset(case.answers)) if case.last is None else misfit
    # Above every lineage in it, so that no name of its history is given again, even if the store's data has been lost.
    seq = max(case.seq, Seq(found.state.lineage + 1))
    plan = _Plan(
        start=StateName(step=found.state.step, lineage=seq),
        ancestry=(),
        holders=[],
        others=[r for r in loaders if not r.leaving] or loaders,
        ledger=found.ledger,
        restore=found,
    )
    return _decision(case, plan, Kind.GATHER, f"{cause}: restored from checkpoint {found.name}", {})


def _all_accounted_for(case: _Case, last: Decision) -> bool:
    """Every member of `last` has answered or is known to be dead: waiting brings nobody back."""
    return all(
        m.incarnation in case.dead or (m.replica_id in case.answers and _same_life(case.answers[m.replica_id], m))
        for m in last.members
    )


def _finish(case: _Case, last: Decision, plan: _Plan) -> Decision | Wait:
    """Training is over. The job ends when every living replica holds the final state."""
    if plan.others:
        return _gather(case, plan, f"training is over at state {plan.start.step}")
    until = _first_answer(case, last) + case.policy.finish_wait_ns
    absent = sorted(case.expected - case.answers.keys())
    if absent and case.now < until:
        return Wait(reason=f"training is over: waiting for {names(absent)} to come for the final state", until=until)
    return _decision(case, plan, Kind.END, f"every living replica holds the final state {plan.start.step}", {})


def _stop(case: _Case, last: Decision, plan: _Plan, reason: str) -> Decision | Wait:
    """The job ends here, and is not complete: once this state is saved, if states are."""
    known, step = last.start == plan.start, plan.start.step
    if case.policy.checkpoint_every and step and not (known and last.restore is not None):
        told = [
            r for r in plan.holders if known and r.replica_id == last.saver and last.member(last.saver, r.incarnation)
        ]
        busy = all(r.saving for r in told or plan.holders)  # who was told with it; or everybody with older states
        until = _first_answer(case, last) + case.policy.save_wait_ns
        if busy and case.now < until:
            savers = names(r.replica_id for r in told or plan.holders)
            return Wait(
                reason=f"{reason}; waiting for {savers} to save {'it' if told else 'older states'}", until=until
            )
        if not told and not busy:
            return _decision(case, plan, Kind.GATHER, f"{reason}; state {step} is saved first", {}, save_every=1)
    return replace(_decision(case, plan, Kind.END, reason, {}), stopped=True)


def _train_or_gather(case: _Case, plan: _Plan, reason: str) -> Decision | Wait:
    policy = case.policy
    if len(plan.holders) < policy.min_replicas:
        short = f"{len(plan.holders)} of at least {policy.min_replicas} replicas could train step {plan.start.step}"
        return _gather(case, plan, f"{reason}; {short}")
    slow = _slow(plan, policy.min_replicas)
    if slow:
        plan, reason = plan.without(slow), f"{reason}; without {names(slow)} for now: alive, and no progress"
    assert plan.ledger is not None, "a report of a state carries its ledger"
    held = {r.replica_id: r.held_units for r in plan.holders}
    order = ring_order(held.keys(), _labels(policy, plan.holders))
    units = assign(plan.ledger, [(i, held[i]) for i in order], policy.units_per_worker)
    known, idle = case.apart(plan.start), frozenset(i for i in order if not units[i])
    aside = apart.aside(known, case.seq, plan.holders, plan.others, policy.min_replicas, idle)
    ring = plan.without(aside.keys())
    if aside:
        reason = "; ".join([reason, *left_out(aside)])
        order = tuple(i for i in order if i not in aside)
        units = assign(plan.ledger, [(i, held[i]) for i in order], policy.units_per_worker)
    if not any(units.values()):
        return _gather(case, plan, f"{reason}; no unit is left for {names(order)} to train")
    return _decision(case, ring, Kind.TRAIN, reason, units, save_every=policy.checkpoint_every)


def _slow(plan: _Plan, least: int) -> frozenset[ReplicaId]:
    """Who lives, but makes no progress, and is done without: if others hold the state and are enough. A holder only if one of
    them waits: when all are slow, nobody is late."""
    quick = [r for r in plan.holders if not r.slow]
    if len(quick) < least:
        return frozenset()
    late = [*plan.others, *(plan.holders if any(r.waits for r in quick) else ())]
    return frozenset(r.replica_id for r in late if r.slow)


def _labels(policy: Policy, reports: Iterable[Report]) -> Mapping[ReplicaId, str]:
    """Where replicas stand, by what they say."""
    return {**policy.zones, **{r.replica_id: r.label for r in reports if r.label}}


def _gather(case: _Case, plan: _Plan, reason: str) -> Decision | Wait:
    """Let others fetch the state without training. Only if that makes a difference: WORKERs answer it at once."""
    decision = _decision(case, plan, Kind.GATHER, reason, {})
    last = case.last
    if not plan.others:
        return Wait(reason=reason)
    if last is None or last.kind is not Kind.GATHER or last.start != plan.start:
        return decision
    same = [(m.replica_id, m.incarnation, m.role) for m in last.members] == [
        (m.replica_id, m.incarnation, m.role) for m in decision.members
    ]
    if same and not any(m.fetch for m in decision.members):
        return Wait(reason=f"{reason}; waiting for {names(r.replica_id for r in plan.others)} to fetch it")
    return decision


# --- writing it down -------------------------------------------------------------------------------------------


def _decision(
    case: _Case,
    plan: _Plan,
    kind: Kind,
    reason: str,
    units: Mapping[ReplicaId, tuple[UnitId, ...]],
    *,
    save_every: int = 0,
) -> Decision:
    roles = {r.replica_id: (r, Role.WORKER) for r in plan.holders}
    roles |= {r.replica_id: (r, Role.CATCHING_UP) for r in plan.others}
    order = ring_order(roles.keys(), _labels(case.policy, [*plan.holders, *plan.others]))
    reports = [roles[i][0] for i in order]
    members = tuple(_member(r, roles[r.replica_id][1], plan.start, units.get(r.replica_id, ())) for r in reports)
    last = case.last
    on_chain = chain(last) if last else []
    kept = last is not None and _ring_is_whole(last, members, reports, plan.start)
    seq = case.seq if plan.restore is None else plan.start.lineage
    return Decision(
        seq=seq,
        quorum_id=last.quorum_id if last is not None and kept else QuorumId(seq),
        kind=kind,
        step=plan.start.step,
        base=plan.start.lineage,
        ancestry=plan.ancestry,
        members=members,
        ledger=plan.ledger,
        num_replicas=case.policy.num_replicas,
        reason="; ".join([reason, *notes(last, on_chain, members, reports)]),
        apart=case.apart(plan.start),
        away=_away(case, roles.keys()),
        saver=_saver(case, plan, save_every) if kind is not Kind.END else None,
        restore=plan.restore,
    )


def _saver(case: _Case, plan: _Plan, every: int) -> ReplicaId | None:
    """Who writes the base to persistent storage: whoever has been told to, or, if it is due, somebody else."""
    last, holders = case.last, {r.replica_id for r in plan.holders}
    if last is not None and last.start == plan.start:
        if last.saver in holders:
            return last.saver  # it does not begin again
        if last.restore is not None:
            return None
    if not every or not holders:
        return None
    *_, before, latest = sorted([(0, ReplicaId(-1)), *((case.answers[i].seen_at, i) for i in holders)])
    slowest = latest[1] if latest[0] - before[0] > checkpoints.SLOWER_NS else None
    idle = [r.replica_id for r in plan.holders if not r.saving]
    return checkpoints.saver(plan.start.step, every, idle, slowest)


def _member(report: Report, role: Role, start: StateName, units: tuple[UnitId, ...]) -> Member:
    fetching_it = not report.materialized and report.state == start
    return Member(
        replica_id=report.replica_id,
        incarnation=report.incarnation,
        role=role,
        units=units,
        fetch=role is Role.CATCHING_UP and not fetching_it,
    )


def _ring_is_whole(last: Decision, members: Sequence[Member], reports: Sequence[Report], start: StateName) -> bool:
    """Same members in the same order, who all completed L on unbroken links: the ring is kept."""
    return (
        last.kind is Kind.TRAIN
        and start == last.outcome
        and [(m.replica_id, m.incarnation) for m in members] == [(m.replica_id, m.incarnation) for m in last.members]
        and all(r.state == last.outcome and not r.broken for r in reports)
    )


def _misfit(reference: Sequence[Report], others: Sequence[Report]) -> Halt | None:
    """Whether somebody's model or data is not that of the replicas that hold the state."""
    first = reference[0]
    for report in [*reference[1:], *others]:
        both = f"replicas {first.replica_id} and {report.replica_id}"
        odd = frozenset({report.replica_id} if report in others else {r.replica_id for r in reference})
        if report.layout_digest != first.layout_digest:
            digests = f"bucket layouts {first.layout_digest or '-'} and {report.layout_digest or '-'}"
            return Halt(reason=f"{both} have different models ({digests}): {_REMEDY}", misfits=odd)
        if report.ledger is None or first.ledger is None:
            continue
        if _data(report.ledger) != _data(first.ledger):
            prints = f"fingerprints {first.ledger.fingerprint or '-'} and {report.ledger.fingerprint or '-'}"
            return Halt(reason=f"{both} have different data sets or data settings ({prints}): {_REMEDY}", misfits=odd)
        if report in reference and report.state is not None and report.ledger != first.ledger:
            return Halt(reason=f"{both} hold state {report.state} with different ledgers: this is a bug of keepstep")
    return None


def _is_of(checkpoint: Checkpoint, report: Report) -> bool:
    """Whether it is of the data that the replica trains."""
    return report.ledger is not None and _data(checkpoint.ledger) == _data(report.ledger)


_REMEDY = "start every replica with the same script, arguments and installation"


def _data(ledger: LedgerState) -> tuple[object, ...]:
    return ledger.policy, ledger.fingerprint, ledger.total, len(ledger.cursors)
