"""When a replica gets another life."""

import pytest

from keepstep.launch.restarts import FRUITLESS_MAX, PAUSES_S, GiveUp, History, Restart


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
