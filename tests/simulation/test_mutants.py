"""The judge can fail: every mutant of the protocol is caught, and within how many seeds."""

import pytest
from mutants import MUTANTS, Mutant

from keepstep.simulation.judge import Violation
from keepstep.simulation.plan import plan_of
from keepstep.simulation.play import play


def test_the_catalogue_is_as_long_as_promised() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    for seed in range(mutant.within):
        try:
            play(plan_of(seed, mutant.kinds))
        except Violation:
            return
    pytest.fail(f"{mutant.name} survived {mutant.within} seeds: the judge or the world does not test that rule")
