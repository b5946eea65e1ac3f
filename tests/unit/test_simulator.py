"""The recovery-time simulator against formulas, against the paper, and against bookkeeping."""

import importlib
import sys
from dataclasses import replace
from math import inf
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.protocol.errors import ConfigError
from keepstep.scale import closed_form
from keepstep.scale.figures import KINDS, Shows
from keepstep.scale.recovery import Phase, flat
from keepstep.scale.scenario import Notice, Scenario, Slow
from keepstep.scale.simulator import Spent, simulate

DAY = 86_400.0
HOUR = 3600.0
NEVER = 1e12
BARE = Scenario(name="bare", replicas=1, ranks=8, step_s=20, mtbf_s=1080, recovery=flat(600))


def mean(scenario: Scenario, days: float = 30) -> float:
    return fmean(simulate(scenario, seed=seed, seconds=days * DAY).ettr for seed in range(5))


# --- against formulas ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mtbf_s", "recovery_s"), [(1080, 600), (10_000, 600)])
def test_a_sync_job_with_random_failures(mtbf_s: float, recovery_s: float) -> None:
    random = replace(BARE, mtbf_s=mtbf_s, recovery=flat(recovery_s))
    assert mean(replace(random, count_lost=False)) == pytest.approx(
        closed_form.sync_random(mtbf_s, recovery_s), abs=0.01
    )
    ignored = replace(random, count_lost=False, while_down="ignored")
    assert mean(ignored) == pytest.approx(closed_form.sync_random_ignored(mtbf_s, recovery_s), abs=0.01)


@pytest.mark.parametrize("every_s", [200, 1000, 2000])
def test_what_a_checkpoint_saves(every_s: float) -> None:
    """Daly's formula. Steps do not matter to it: a checkpoint is due after so many seconds of training."""
    found = mean(replace(BARE, checkpoint_every_s=every_s))
    assert found == pytest.approx(closed_form.sync_checkpoints(1080, 600, every_s), abs=0.01)


def test_without_a_checkpoint_everything_since_the_start_is_lost() -> None:
    found = simulate(replace(BARE, arrivals="even", mtbf_s=10 * HOUR), seed=0, seconds=25 * HOUR)
    assert found.seconds[Spent.PRODUCTIVE] == pytest.approx(5 * HOUR - 600)
    assert found.seconds[Spent.LOST] == pytest.approx(20 * HOUR - 600)
    assert found.restores == 2


@pytest.mark.parametrize(("replicas", "stall_s", "rejoin_s"), [(12, 180, 0), (12, 90, 100), (4, 5, 5), (32, 0, 0)])
def test_replicas_with_random_failures(replicas: int, stall_s: float, rejoin_s: float) -> None:
    job = replace(
        BARE, replicas=replicas, pause_s=stall_s, rejoin_s=rejoin_s, count_lost=False, checkpoint_every_s=1000
    )
    expected = closed_form.replicas_random(1080, 600, stall_s, rejoin_s, replicas, 20)
    assert mean(job, days=20) == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize("stall_s", [180.0, 90.0])
def test_the_papers_arithmetic(stall_s: float) -> None:
    even = replace(BARE, arrivals="even", count_lost=False, step_s=0.01)
    assert mean(even, days=10) == pytest.approx(closed_form.sync_even(1080, 600), abs=0.001)
    assert closed_form.sync_even(1080, 600) == pytest.approx(0.444, abs=0.001)
    replicas = replace(even, replicas=12, pause_s=stall_s)
    expected = closed_form.replicas_even(1080, 600, stall_s, 12)
    assert mean(replicas, days=10) == pytest.approx(expected, abs=0.001)
    assert expected == pytest.approx({180.0: 0.801, 90.0: 0.878}[stall_s], abs=0.001)


# --- what happens when -------------------------------------------------------------------------------------------

ONE = replace(BARE, replicas=4, arrivals="even", mtbf_s=1005, recovery=flat(100), kinds=KINDS[:1])


def one_failure(scenario: Scenario) -> dict[object, float]:
    """Replica-seconds by what they were spent on, of 2000 s with one failure, 5 s into a step of 20 s."""
    return dict(simulate(scenario, seed=0, seconds=2000).seconds)


def test_one_failure_in_seconds() -> None:
    """Lost at 1005 s, 5 s into step 50. Survivors stand still for 10 s. Back 100 s after, and waits for the step's end."""
    spent = one_failure(replace(ONE, pause_s=10, rejoin_s=7))
    assert spent[Phase.ALLOCATION] == pytest.approx(100)
    assert spent[Spent.PAUSE] == pytest.approx(3 * 10)
    assert spent[Spent.LOST] == pytest.approx(5)  # the dead replica's part of its step
    assert spent[Spent.WAIT] == pytest.approx(5)  # steps end at 1030, 1050 ... 1110; it is ready at 1105
    assert spent[Spent.REJOIN] == pytest.approx(4 * 7)
    assert spent[Spent.PRODUCTIVE] == pytest.approx(4 * 2000 - 100 - 30 - 5 - 5 - 28)


@pytest.mark.parametrize(
    ("after_s", "ring_s", "noticed", "ring"), [(1, 2, 0, 0), (10, 10, 0, 5), (30, 2, 15, 2), (0, 40, 0, 25)]
)
def test_what_is_noticed_while_the_others_compute_costs_nothing(
    after_s: float, ring_s: float, noticed: float, ring: float
) -> None:
    """15 s of the step are left when the replica is lost."""
    notice = dict.fromkeys(Shows, Notice(after_s=after_s, beside=True))
    spent = one_failure(replace(ONE, notice=notice, ring_s=ring_s))
    assert spent.get(Spent.NOTICE, 0) == pytest.approx(3 * noticed)
    assert spent.get(Spent.RING, 0) == pytest.approx(3 * ring)


def test_what_is_waited_for_costs_all_of_it() -> None:
    spent = one_failure(replace(ONE, notice=dict.fromkeys(Shows, Notice(after_s=30)), ring_s=2, retry_s=20))
    assert [spent[s] for s in (Spent.NOTICE, Spent.RING, Spent.RETRY)] == pytest.approx([90, 6, 60])
    assert spent[Phase.NOTICE] == pytest.approx(30)


def test_an_empty_reserve_costs_a_cold_allocation() -> None:
    """Two hosts in reserve, none repaired, four failures."""
    job = replace(ONE, recovery=replace(flat(100), cold=300.0), spares=2, repair_s=DAY, mtbf_s=1000)
    found = simulate(job, seed=0, seconds=4900)
    assert (found.failures, found.cold) == (4, 2)
    assert found.seconds[Phase.ALLOCATION] == pytest.approx(2 * 100 + 2 * 300)
    assert simulate(replace(job, repair_s=500), seed=0, seconds=4900).cold == 0


def test_a_slow_rank_slows_everybody_until_it_is_replaced() -> None:
    job = replace(ONE, mtbf_s=NEVER, slow=Slow(mtbf_s=5 * HOUR, factor=2.0, found_after_s=600))
    found = simulate(job, seed=1, seconds=20 * HOUR)
    assert found.seconds[Spent.SLOW] > 0
    assert found.seconds[Spent.SLOW] % (4 * 300) == pytest.approx(0, abs=1e-6)  # 600 s at half speed, each time
    assert found.seconds[Phase.ALLOCATION] == pytest.approx(found.seconds[Spent.SLOW] / 12)


def test_a_stop_of_the_whole_job_goes_back_to_the_checkpoint() -> None:
    job = replace(ONE, mtbf_s=NEVER, job_mtbf_s=5 * HOUR, checkpoint_every_s=1000, restore_s=50)
    found = simulate(job, seed=1, seconds=50 * HOUR)
    assert found.restores > 3
    assert found.seconds[Spent.RESTORE] == pytest.approx(4 * 50 * found.restores)
    assert 0 < found.seconds[Spent.LOST] < 4 * 1000 * found.restores
    assert found.seconds[Phase.ALLOCATION] == pytest.approx(4 * 100 * found.restores)


def test_the_last_one_can_be_spared() -> None:
    job = replace(BARE, replicas=3, mtbf_s=60, while_down="ignored")
    assert simulate(job, seed=0, seconds=DAY).restores > 0
    assert simulate(replace(job, spare_the_last=True), seed=0, seconds=DAY).restores == 0


# --- bookkeeping -----------------------------------------------------------------------------------------------

times = st.floats(0, 500)
scenarios = st.builds(
    Scenario,
    name=st.just("any"),
    replicas=st.integers(1, 5),
    ranks=st.just(8),
    step_s=st.floats(0.1, 100),
    mtbf_s=st.floats(10, 5000),
    arrivals=st.sampled_from(["even", "random"]),
    notice=st.builds(Notice, after_s=times, beside=st.booleans()).map(lambda n: dict.fromkeys(Shows, n)),
    ring_s=times,
    pause_s=times,
    retry_s=times,
    rejoin_s=times,
    recovery=times.map(flat),
    while_down=st.sampled_from(["again", "ignored"]),
    spare_the_last=st.booleans(),
    restore_s=times,
    spares=st.none() | st.integers(0, 3),
    repair_s=st.floats(1, 5000),
    checkpoint_every_s=st.just(inf) | st.floats(10, 5000),
    checkpoint_write_s=times,
    checkpoint_block_s=st.floats(0, 10),
    count_lost=st.booleans(),
    job_mtbf_s=st.just(inf) | st.floats(500, 50_000),
    slow=st.none() | st.builds(Slow, mtbf_s=st.floats(100, 5000), factor=st.floats(1, 4), found_after_s=times),
)


@given(scenarios, st.integers(0, 1000))
@settings(deadline=None)
def test_every_second_is_spent_on_one_thing(scenario: Scenario, seed: int) -> None:
    found = simulate(scenario, seed=seed, seconds=10_000)
    assert sum(found.seconds.values()) == pytest.approx(scenario.replicas * 10_000, rel=1e-6)
    assert min(found.seconds.values(), default=0) >= -1e-6
    assert simulate(scenario, seed=seed, seconds=10_000) == found


def test_seeds_differ_and_nothing_else_is_random() -> None:
    random = replace(BARE, replicas=3)
    found = [simulate(random, seed=seed, seconds=DAY).seconds for seed in (0, 1, 0)]
    assert found[0] == found[2] != found[1]


def test_impossible_scenarios_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one replica"):
        replace(BARE, replicas=0)
    with pytest.raises(ConfigError, match="must be positive"):
        replace(BARE, mtbf_s=0)


def test_without_simpy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    monkeypatch.delitem(sys.modules, "keepstep.scale.simulator")
    with pytest.raises(ConfigError, match=r"pip install 'keepstep\[scale\]'"):
        importlib.import_module("keepstep.scale.simulator")
