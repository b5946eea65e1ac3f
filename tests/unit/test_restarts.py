"""When a replica gets another life."""

import pytest

from keepstep.launch.restarts import FRUITLESS_MAX, PAUSES_S, TOLD_MAX, GiveUp, History, Restart
from keepstep.protocol.roster import Failure


def failed(
    history: History,
    cause: str = "boom",
    *,
    killed: bool = False,
    trained: bool = True,
    job_has_trained: bool = True,
    now: float = 0.0,
) -> Restart | GiveUp:
    return history.after(cause, killed=killed, trained=trained, job_has_trained=job_has_trained, now=now)


def test_a_life_that_trained_is_followed_at_once() -> None:
    history = History(max_restarts=100, window_s=3600)
    for number in range(50):
        assert failed(history, f"boom {number}") == Restart(0.0)
        assert failed(history, "killed", killed=True) == Restart(0.0)


def test_the_same_failure_again_before_anything_was_trained_ends_it() -> None:
    history = History(max_restarts=100, window_s=3600)
    assert isinstance(failed(history, trained=False, job_has_trained=False), Restart)
    answer = failed(history, trained=False, job_has_trained=False)
    assert answer == GiveUp("2 lives in a row ended before they had trained a step: boom")


def test_kills_are_no_reason_but_too_many_are() -> None:
    history = History(max_restarts=100, window_s=3600)
    answers = [failed(history, "killed", killed=True, trained=False) for _ in range(FRUITLESS_MAX)]
    pauses = [answer.pause_s for answer in answers[:-1] if isinstance(answer, Restart)]
    assert pauses == sorted(pauses)
    assert len(pauses) == FRUITLESS_MAX - 1
    assert isinstance(answers[-1], GiveUp)


def test_failures_alike_are_repeated_more_and_more_slowly_even_if_each_trains_a_little() -> None:
    history = History(max_restarts=100, window_s=3600)
    answers = [failed(history, "out of memory") for _ in range(10)]
    pauses = [answer.pause_s for answer in answers if isinstance(answer, Restart)]
    assert len(pauses) == 10
    assert pauses == sorted(pauses)
    assert (pauses[1], pauses[-1]) == (0.0, PAUSES_S[-1])
    assert failed(history, "something else") == Restart(0.0), "not a loop any more"


def test_the_budget_refills_and_a_loop_that_uses_it_up_is_named() -> None:
    history = History(max_restarts=3, window_s=100)
    for month in range(40):
        assert isinstance(failed(history, killed=True, now=50.0 * month), Restart), "each of them was long enough ago"
    history = History(max_restarts=3, window_s=100)
    for now, cause in enumerate(("out of memory", "disk full", "out of memory")):
        assert isinstance(failed(history, cause, now=now), Restart)
    assert failed(history, "out of memory", now=99.0) == GiveUp(
        "it has been restarted 3 times in 100 s (--max-restarts, --restart-window); 3 of 4 failures said: out of memory"
    )


def test_no_restarts_at_all() -> None:
    answer = failed(History(max_restarts=0, window_s=3600))
    assert isinstance(answer, GiveUp)
    assert answer.reason.endswith("its last failure said: boom")


def test_the_first_failure_is_named() -> None:
    history = History(max_restarts=2, window_s=3600)
    failed(history, "killed", killed=True)
    failed(history, "ValueError")
    answer = failed(history, "no state is left")
    assert isinstance(answer, GiveUp)
    assert answer.reason.endswith("its last failure said: no state is left (its first failure said: ValueError)")


@pytest.mark.parametrize("trained", [True, False])
def test_who_is_asked_back_begins_anew(trained: bool) -> None:
    history = History(max_restarts=1, window_s=3600)
    while isinstance(failed(history, trained=trained), Restart):
        pass
    history.forgive()
    assert isinstance(failed(history, trained=trained), Restart)


def moved(history: History, *, now: float, clock: float = 0.0) -> History:
    """On another host, whose monotonic clock is another one, at once; `clock`: how far its wall clock is ahead."""
    other = History(history.max_restarts, history.window_s, lives=history.lives)
    other.recall(history.told(now=now, wall_s=1e9), now=7.0, wall_s=1e9 + clock)
    return other


def test_the_budget_goes_with_a_replica_to_another_host() -> None:
    history = History(max_restarts=3, window_s=100)
    for now in (0.0, 60.0, 61.0):
        assert isinstance(failed(history, "out of memory", now=now), Restart)
    there = moved(history, now=62.0)
    answer = failed(there, "out of memory", now=8.0)
    assert isinstance(answer, GiveUp)
    assert "restarted 3 times in 100 s" in answer.reason
    assert answer.reason.endswith("4 of 4 failures said: out of memory")
    there = moved(history, now=110.0)
    assert isinstance(failed(there, "out of memory", now=8.0), Restart), "the first one is too long ago by now"
    assert isinstance(failed(there, "out of memory", now=9.0), GiveUp)


def test_what_looks_like_a_loop_goes_too() -> None:
    history = History(max_restarts=100, window_s=3600)
    assert isinstance(failed(history, "ValueError", trained=False), Restart)
    assert isinstance(failed(moved(history, now=0.0), "ValueError", trained=False, job_has_trained=False), GiveUp)
    history = History(max_restarts=100, window_s=3600)
    answers = [failed(history, "out of memory") for _ in range(5)]
    before, after = answers[-1], failed(moved(history, now=0.0), "out of memory")
    assert isinstance(before, Restart)
    assert isinstance(after, Restart)
    assert after.pause_s > before.pause_s


@pytest.mark.parametrize("clock", [-7200.0, 7200.0])
def test_wrong_clocks_make_the_budget_larger_or_smaller_and_no_more(clock: float) -> None:
    history = History(max_restarts=3, window_s=100)
    for now in (0.0, 1.0, 2.0):
        failed(history, "out of memory", now=now)
    there = moved(history, now=2.0, clock=clock)
    assert len(there.recent) == (3 if clock < 0 else 0)
    assert {f.at_s for f in there.recent} <= {7.0}, "nothing lies in the future"


def test_what_is_told_is_bounded() -> None:
    history = History(max_restarts=10_000, window_s=1e9)
    for now in range(1000):
        failed(history, "x" * 10_000, now=now)
    told = history.told(now=1000.0, wall_s=0.0)
    assert len(told) == TOLD_MAX
    assert told[-1].at_s == -1.0
    assert sum(len(failure.cause) for failure in told) < 50_000


def test_a_host_that_dies_with_every_life_ends_it_too() -> None:
    history = History(max_restarts=3, window_s=100)
    lost = [Failure(cause=f"host h{n} was lost, or its agent", killed=True, trained=True, at_s=n) for n in range(4)]
    history.recall(lost[:3], now=3.0, wall_s=3.0)
    assert history.judge(job_has_trained=True) == Restart(0.0)
    history.recall(lost[3:], now=3.0, wall_s=3.0)
    answer = history.judge(job_has_trained=True)
    assert isinstance(answer, GiveUp)
    assert answer.reason.endswith("its last failure said: host h3 was lost, or its agent")
