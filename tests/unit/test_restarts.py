"""When a replica gets another life."""

from keepstep.launch.restarts import FRUITLESS_MAX, GiveUp, History, Restart


def test_a_life_that_trained_is_followed_at_once() -> None:
    history = History(max_restarts=100)
    for _ in range(50):
        assert history.after("boom", killed=False, trained=True, job_has_trained=True) == Restart(0.0)


def test_the_same_failure_again_before_anything_was_trained_ends_it() -> None:
    history = History(max_restarts=100)
    assert isinstance(history.after("boom", killed=False, trained=False, job_has_trained=False), Restart)
    answer = history.after("boom", killed=False, trained=False, job_has_trained=False)
    assert answer == GiveUp("2 lives in a row ended before they had trained a step: boom")


def test_kills_are_no_reason_but_too_many_are() -> None:
    history = History(max_restarts=100)
    answers = [history.after("killed", killed=True, trained=False, job_has_trained=True) for _ in range(FRUITLESS_MAX)]
    pauses = [answer.pause_s for answer in answers[:-1] if isinstance(answer, Restart)]
    assert pauses == sorted(pauses)
    assert len(pauses) == FRUITLESS_MAX - 1
    assert isinstance(answers[-1], GiveUp)


def test_the_first_failure_is_named() -> None:
    history = History(max_restarts=1, lives=1)
    history.after("killed", killed=True, trained=True, job_has_trained=True)
    history.after("ValueError", killed=False, trained=True, job_has_trained=True)
    history.lives = 2
    answer = history.after("no state is left", killed=False, trained=True, job_has_trained=True)
    assert answer == GiveUp("it has been restarted 1 times (--max-restarts) (its first failure said: ValueError)")
