"""Plays the toy world from many seeds, and shows that each rule of the quorum is needed: its mutants are caught."""

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from quorum_world import SEEDS, Violation, play

from keepstep.protocol import ledger, quorum
from keepstep.protocol.ids import UnitId
from keepstep.protocol.messages import Decision, Member, Report, Role, StateName


def test_every_seed_keeps_the_invariants_and_heals() -> None:
    ends = [play(seed) for seed in range(SEEDS)]
    assert ends.count("end") > SEEDS // 3, f"the world is too hostile to show anything: {ends}"
    assert ends.count("no state") < SEEDS // 3


# --- mutants: what the rules are for ---


def stale_reports_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quorum, "_answers", lambda report, last: True)


def lineage_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """The naive rule: the highest step wins, whoever committed it under whatever decision."""
    patch.setattr(quorum, "_holds", lambda r, s: r.materialized and r.state is not None and r.state.step == s.step)


def pending_fetch_is_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quorum, "_holds", lambda r, s: r.state == s)


def nothing_is_revoked(patch: pytest.MonkeyPatch) -> None:
    """Everything that was ever decided stays on the chain."""
    genuine = quorum.chain
    seen: set[StateName] = set()

    def chain(last: Decision) -> list[StateName]:
        if last.seq == 1:
            seen.clear()
        seen.update(genuine(last))
        return sorted(seen, key=lambda s: (s.step, s.lineage), reverse=True)

    patch.setattr(quorum, "chain", chain)


def fetch_is_never_started_again(patch: pytest.MonkeyPatch) -> None:
    genuine = quorum._member

    def member(report: Report, role: Role, start: StateName, units: tuple[UnitId, ...]) -> Member:
        built = genuine(report, role, start, units)
        return replace(built, fetch=built.fetch and report.state is None)

    patch.setattr(quorum, "_member", member)


def ring_is_always_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quorum, "_ring_is_whole", lambda last, members, reports, start: True)


def broken_step_keeps_its_ring(patch: pytest.MonkeyPatch) -> None:
    def same_members(last: Decision, members: list[Member], reports: list[Report], start: StateName) -> bool:
        return [m.incarnation for m in members] == [m.incarnation for m in last.members]

    patch.setattr(quorum, "_ring_is_whole", same_members)


def oldest_state_wins(patch: pytest.MonkeyPatch) -> None:
    genuine = quorum.chain
    patch.setattr(quorum, "chain", lambda last: list(reversed(genuine(last))))


def requeued_units_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    genuine = ledger.assign
    patch.setattr(quorum, "assign", lambda was, workers, most: genuine(replace(was, requeued=()), workers, most))


def catching_up_replicas_train(patch: pytest.MonkeyPatch) -> None:
    genuine = quorum._member
    patch.setattr(quorum, "_member", lambda report, role, start, units: genuine(report, Role.WORKER, start, units))


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    stale_reports_count,
    lineage_is_ignored,
    pending_fetch_is_trusted,
    nothing_is_revoked,
    fetch_is_never_started_again,
    ring_is_always_kept,
    broken_step_keeps_its_ring,
    oldest_state_wins,
    requeued_units_are_forgotten,
    catching_up_replicas_train,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_mutant_is_caught(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    for seed in range(SEEDS):
        try:
            play(seed)
        except Violation:
            return
    pytest.fail(f"{mutate.__name__} survived {SEEDS} seeds: the world does not test that rule")


if __name__ == "__main__":
    print(play(int(sys.argv[1])))
