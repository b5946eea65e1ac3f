"""Replicas that do not reach each other: each rule of `protocol.apart`, alone and in decisions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quorum_views import POLICY, L, completed, decided, not_completed, report, roles, view

from keepstep.protocol.apart import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, aside, learn
from keepstep.protocol.ids import Incarnation, ReplicaId, Seq
from keepstep.protocol.messages import Apart, Decision, Kind, Report

LIVES = tuple(Incarnation(f"{i}a") for i in range(3))


def pair(one: int, other: int, failures: int = FAILURES, until: int = 100) -> Apart:
    return Apart(lives=(LIVES[one], LIVES[other]), failures=failures, until=Seq(until))


def complains(replica: int, *of: int) -> Report:
    return replace(not_completed(replica, broken=True), cut_off=tuple(ReplicaId(i) for i in of))


def learned(last: Decision, *answers: Report, done: bool = False) -> tuple[Apart, ...]:
    return learn(last, answers, LIVES, completed=done)


# --- what is learned ---


def test_one_complaint_makes_a_pair_whoever_complains() -> None:
    expected = (pair(1, 2, failures=1, until=L.seq + 1),)
    assert learned(L, not_completed(0), complains(1, 2), not_completed(2)) == expected
    assert learned(L, not_completed(0), not_completed(1), complains(2, 1)) == expected
    assert learned(L, not_completed(0), complains(1, 2), complains(2, 1)) == expected


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([not_completed(0), complains(1, 2)], id="the other has not answered"),
        pytest.param([not_completed(0), complains(1, 2), report(2, 7, life="b")], id="the other has died since"),
        pytest.param([not_completed(0), complains(1, 1), not_completed(2)], id="of itself"),
        pytest.param([not_completed(0), complains(1, 9), not_completed(2)], id="of nobody"),
        pytest.param(
            [not_completed(0), complains(1, 2), not_completed(2, slow=True)], id="the other has stopped it, being slow"
        ),
        pytest.param(
            [not_completed(0), replace(complains(1, 2), slow=True), not_completed(2)], id="it has stopped it itself"
        ),
    ],
)
def test_complaints_that_do_not_count(answers: list[Report]) -> None:
    assert learned(L, *answers) == ()


def test_what_an_older_life_complained_of_is_forgotten_with_it() -> None:
    last = replace(L, apart=(pair(0, 1), pair(1, 2)))
    assert learn(last, [not_completed(0)], LIVES[:2], completed=False) == (pair(0, 1),)


def test_the_pause_doubles_with_each_failure_up_to_a_longest() -> None:
    last, pauses = L, list[int]()
    for _ in range(FAILURES + 12):
        (found,) = learned(last, not_completed(0), complains(1, 2), complains(2, 1))
        pauses.append(found.until - (last.seq + 1))
        last = replace(last, apart=(found,))
    assert pauses[: FAILURES - 1] == [0] * (FAILURES - 1)
    assert pauses[FAILURES - 1 : FAILURES + 2] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE


def test_a_step_that_both_complete_together_makes_it_good() -> None:
    last = replace(L, apart=(pair(0, 1), pair(1, 2)))
    assert learned(last, completed(0), completed(1), completed(2), done=True) == ()
    without_2 = replace(last, members=last.members[:2])
    assert learned(without_2, completed(0), completed(1), done=True) == (pair(1, 2),)


def test_a_decision_without_an_exchange_teaches_nothing() -> None:
    last = replace(L, kind=Kind.GATHER, apart=(pair(1, 2),))
    assert learned(last, complains(0, 1), complains(1, 0), not_completed(2)) == (pair(1, 2),)


# --- who stands aside ---

HOLDERS = [not_completed(i) for i in range(3)]


def test_of_two_that_hold_the_state_the_higher_id_stands_aside_unless_the_other_has_nothing_to_train() -> None:
    assert aside([pair(0, 1)], Seq(8), HOLDERS, [], 1) == {1: 0}
    assert aside([pair(0, 1)], Seq(8), HOLDERS, [], 1, {ReplicaId(0)}) == {0: 1}


def test_who_catches_up_stands_aside_before_who_holds_the_state() -> None:
    assert aside([pair(0, 1)], Seq(8), HOLDERS[1:], HOLDERS[:1], 1) == {0: 1}


def test_one_that_reaches_nobody_stands_aside_alone_unless_nobody_else_has_anything_to_train() -> None:
    assert aside([pair(0, 1), pair(0, 2)], Seq(8), HOLDERS, [], 1) == {0: 1}
    assert aside([pair(0, 1), pair(0, 2)], Seq(8), HOLDERS, [], 1, {ReplicaId(1), ReplicaId(2)}) == {2: 0, 1: 0}


def test_their_time_is_over_at_until() -> None:
    assert aside([pair(0, 1, until=9)], Seq(8), HOLDERS, [], 1) == {1: 0}
    assert aside([pair(0, 1, until=8)], Seq(8), HOLDERS, [], 1) == {}


def test_as_many_are_tried_again_as_must_be_left() -> None:
    assert aside([pair(0, 1), pair(0, 2)], Seq(8), HOLDERS, [], 2, {ReplicaId(1), ReplicaId(2)}) == {2: 0}
    assert aside([pair(0, 1)], Seq(8), HOLDERS, [], 3) == {}
    assert aside([pair(0, 1)], Seq(8), HOLDERS[:1], HOLDERS[1:], 1) == {1: 0}  # never the last that holds the state


@given(
    pairs=st.lists(st.sampled_from([(0, 1), (0, 2), (1, 2)]), unique=True),
    held=st.sets(st.integers(0, 2), min_size=1),
    fewest=st.integers(1, 3),
)
def test_enough_hold_the_state_and_no_pair_is_left_without_need(
    pairs: list[tuple[int, int]], held: set[int], fewest: int
) -> None:
    fewest = min(fewest, len(held))  # fewer do not train at all
    holders, others = [HOLDERS[i] for i in sorted(held)], [HOLDERS[i] for i in range(3) if i not in held]
    out = aside([pair(*p) for p in pairs], Seq(8), holders, others, fewest)
    stay = held - out.keys()
    assert len(stay) >= fewest
    if any(set(p).isdisjoint(out) for p in pairs):
        assert len(stay) == max(1, fewest), "one more could have stood aside"


# --- in decisions ---


def test_after_two_failures_a_ring_is_made_without_one_of_them() -> None:
    answers = [not_completed(0), complains(1, 2), complains(2, 1)]
    again = decided(view(*answers, last=L))
    assert roles(again) == {0: "W", 1: "W", 2: "W"}
    assert again.apart == (pair(1, 2, failures=1, until=8),)
    once_more = [replace(r, answers=again.seq) for r in answers]
    without = decided(view(*once_more, last=again))
    assert roles(without) == {0: "W", 1: "W"}
    assert without.quorum_id == without.seq
    assert "replica 2 stands aside for now: it and replica 1 do not reach each other" in without.reason


def test_the_end_is_for_everybody() -> None:
    last = replace(L, apart=(pair(1, 2),))
    finished = replace(completed(0, finished=True), answers=L.seq)
    others = [replace(completed(i, finished=True), answers=L.seq) for i in (1, 2)]
    assert decided(view(finished, *others, last=last)).kind is Kind.END


def test_fewer_than_min_replicas_are_never_left() -> None:
    last = replace(L, apart=(pair(1, 2),))
    answers = [not_completed(0), complains(1, 2), complains(2, 1)]
    assert roles(decided(view(*answers, last=last), replace(POLICY, min_replicas=3))) == {0: "W", 1: "W", 2: "W"}
