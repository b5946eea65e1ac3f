"""Every order of events in small worlds; `make exhaustive` visits larger ones. And that the search would find what is wrong."""

from collections.abc import Callable

import mutants
import pytest

from keepstep.simulation.exhaustive import Search
from keepstep.simulation.judge import Violation


@pytest.mark.parametrize(
    ("replicas", "steps", "faults", "fine", "states"),
    [(3, 2, 0, True, 1_421), (2, 2, 1, True, 10_614), (3, 1, 1, False, 7_479)],
)
def test_nothing_goes_wrong_in_any_order(replicas: int, steps: int, faults: int, fine: bool, states: int) -> None:
    counts = Search(replicas=replicas, steps=steps, faults=faults, fine=fine).run()
    assert counts.complete
    assert counts.states == states, f"the model has changed: {counts}"
    assert counts.endings["ended"] > 0


@pytest.mark.parametrize(
    "mutant",
    [
        mutants.an_incomplete_state_is_trusted,
        mutants.the_outcome_of_the_last_decision_is_ignored,
        mutants.a_fetch_is_never_started_again,
        mutants.replicas_that_catch_up_get_units,
        mutants.the_job_starts_again_when_nobody_holds_a_state,
        mutants.units_are_committed_when_they_are_assigned,
        mutants.units_given_back_are_forgotten,
        mutants.a_no_counts_as_a_yes,
        mutants.a_superseded_step_may_still_be_completed,
        mutants.a_retry_is_applied,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_mutant_is_found(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Violation, match="after "):
        Search(replicas=2, steps=2, faults=1, states_max=10_000).run()
