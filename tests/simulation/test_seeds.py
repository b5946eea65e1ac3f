"""Worlds from many seeds keep every promise; a run is a function of its seed; a failure can be replayed and made smaller."""

import pytest
from mutants import one_vote_is_enough, sums_are_not_kept_while_fetching

from keepstep.simulation.judge import Violation
from keepstep.simulation.plan import Fault, plan_of
from keepstep.simulation.play import play, play_many, play_seeds, shrink, transcript

SEEDS = 2000


def test_every_seed_keeps_its_promises_and_makes_progress() -> None:
    tally = play_seeds(range(SEEDS))
    replay = [
        f"{what}\n  python -m keepstep.simulation --seed {seed} --shrink" for seed, what in tally.violations.items()
    ]
    assert not replay, "\n".join(replay)
    assert tally.seeds == SEEDS
    assert tally.steps > 10 * SEEDS, "the worlds are too hostile to get anywhere"
    assert set(tally.endings) == {"end", "steps", "no state"}
    assert tally.endings["no state"] < SEEDS // 10, "the worlds are too hostile to show anything"


@pytest.mark.parametrize("seed", [122314, 158945, 171917, 602517])
def test_a_seed_that_failed_once_stays_well(seed: int) -> None:
    play(plan_of(seed))


def test_a_run_is_a_function_of_its_seed() -> None:
    for seed in range(20):
        assert transcript(plan_of(seed)) == transcript(plan_of(seed))
        assert play(plan_of(seed)) == play(plan_of(seed))


def test_bunches_on_two_processes_play_the_same_worlds() -> None:
    (one,) = play_many(7, 40, 1)
    (two,) = play_many(7, 40, 2)
    assert (one, str(two)) == (two, f"simulation: 40 seeds, 0 violations, {one.steps} steps")


def test_a_violation_is_replayed_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    sums_are_not_kept_while_fetching(monkeypatch)
    found = play_seeds(range(100)).violations
    plan = next(plan_of(seed) for seed in found if len(plan_of(seed).faults) > 1)
    what = found[plan.seed]
    _, error = transcript(plan)
    assert str(error) == what
    smaller = shrink(plan)
    _, again = transcript(smaller)
    assert isinstance(again, Violation)
    assert len(smaller.faults) < len(plan.faults)
    assert all(
        transcript(smaller.only(tuple(i for i in range(len(smaller.faults)) if i != n)))[1] is None
        for n in range(len(smaller.faults))
    ), "no fault of it is superfluous"


def test_a_plan_without_faults_can_fail_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one_vote_is_enough(monkeypatch)
    plan = next(p for p in map(plan_of, range(100)) if p.ranks > 1)
    assert shrink(plan).faults == ()


def test_faults_speak_for_themselves() -> None:
    fault = Fault(kind="cut tree", replica=1, point="vote", nth=3, rank=2, seen=False, duration=1_500_000_000)
    assert str(fault) == "replica 1: cut tree up from rank 2, at its 3rd vote, for 1.500 s"
