"""What many say alike is said once, after the last of them; what differs is never merged."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import C, W, decision, hello, me, member, state

from keepstep.protocol.ids import QuorumId, Rank, ReplicaId, Seq
from keepstep.protocol.messages import AllFetched, AllVoted, Fetched, RingBroken, Said, Upward, Vote
from keepstep.protocol.step import LeaderMachine
from keepstep.protocol.together import (
    FETCHED,
    SEEN_MAX,
    VOTED,
    Once,
    Together,
    enough_once,
    merged,
    said_by_all,
)


@given(st.permutations(range(5)), st.lists(st.booleans(), min_size=5, max_size=5))
def test_it_is_said_after_the_last_and_agreed_if_all_agreed(order: list[int], agreed: list[bool]) -> None:
    together = Together(5)
    heard = [together.say(slot, VOTED, 3, agreed[slot]) for slot in order]
    assert heard == [None] * 4 + [all(agreed)]


def test_nobody_counts_twice_and_nothing_is_said_twice() -> None:
    """A host whose merged vote arrives twice, before and after the count is whole."""
    together = Together(2)
    assert together.say(0, VOTED, 1, True) is None
    assert together.say(0, VOTED, 1, True) is None
    assert together.say(1, VOTED, 1, True) is True
    assert together.say(0, VOTED, 1, True) is None
    assert together.say(1, VOTED, 1, True) is None


def test_decisions_and_topics_do_not_mix() -> None:
    together = Together(2)
    assert together.say(0, VOTED, 1, True) is None
    assert together.say(1, FETCHED, 1, True) is None
    assert together.say(1, VOTED, 2, True) is None, "a yes to 1 is none to 2"
    assert together.say(1, VOTED, 1, True) is None, "1 is over: somebody has heard of 2"
    assert together.say(0, VOTED, 2, False) is False
    assert together.say(0, FETCHED, 1, True) is True, "however many votes there were meanwhile"


def vote(rank: int, yes: bool, seq: int = 1, caught_up: bool = True) -> Vote:
    return Vote(rank=Rank(rank), seq=Seq(seq), yes=yes, caught_up=caught_up, ring_broken=not yes)


def test_only_a_yes_is_merged() -> None:
    fetched = Fetched(rank=Rank(0), state=state(5, 6), since=Seq(4), ok=True)
    assert merged(vote(0, True, 7, caught_up=False)) == (VOTED, 7, False)
    assert merged(fetched) == (FETCHED, 4, True)
    assert said_by_all(VOTED, 7, False) == AllVoted(seq=Seq(7), caught_up=False)
    assert said_by_all(FETCHED, 4, True) == AllFetched(since=Seq(4))
    assert said_by_all(3, 4, True) is None
    broken = RingBroken(rank=Rank(0), quorum_id=QuorumId(1), suspect=ReplicaId(1), reason="")
    alone: list[Said] = [vote(0, False), Fetched(rank=Rank(0), state=state(5, 6), since=Seq(4), ok=False), broken]
    for message in alone:
        assert merged(message) is None
        assert enough_once(message) is not None
    assert merged(hello(0)) is None
    assert enough_once(hello(0)) is None
    with pytest.raises(ValueError, match="the ring has held"):
        Vote(rank=Rank(0), seq=Seq(1), yes=True, ring_broken=True)


class Node:
    """A process of a tree: what it hears goes up as the real one passes it on."""

    def __init__(self, up: "Node | LeaderMachine", place: int, slots: int) -> None:
        self._up, self._place = up, place
        self._together, self._once = Together(slots), Once()

    def say(self, slot: int, message: Upward) -> None:
        alike = merged(message) if isinstance(message, Vote) else None
        if isinstance(message, AllVoted):
            alike = VOTED, message.seq, message.caught_up
        if alike is not None:
            result = self._together.say(slot, *alike)
            if result is not None:
                self._pass_on(AllVoted(seq=Seq(alike[1]), caught_up=result))
        elif isinstance(message, Vote) and self._once.is_first(enough_once(message) or b""):
            self._pass_on(message)

    def _pass_on(self, message: Upward) -> None:
        if isinstance(self._up, Node):
            self._up.say(self._place, message)
        else:
            self._up.on_message(message)


def tree_of_six(leader: LeaderMachine) -> list[tuple[Node, int]]:
    """Ranks 1 and 2 below 0; 4 and 5 below 3, which is below 0. Where each rank speaks."""
    root = Node(leader, 0, 4)
    inner = Node(root, 3, 3)
    return [(root, 0), (root, 1), (root, 2), (inner, 0), (inner, 1), (inner, 2)]


def running(role: object) -> LeaderMachine:
    leader = LeaderMachine(me(6))
    for rank in range(6):
        leader.on_message(hello(rank))
    leader.on_decision(decision(1, 5, 1, member(0, W), member(1, W)))
    if role is C:
        leader.on_message(vote(0, False))
        leader.on_decision(decision(2, 6, 7, member(0, C, fetch=True), member(1, W)))
        leader.on_message(AllFetched(since=Seq(2)))
    assert leader.running is not None
    return leader


@given(
    st.lists(st.sampled_from(["yes", "behind", "no", "dead"]), min_size=6, max_size=6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_tree_and_a_leader_that_hears_everybody_come_to_the_same(
    outcomes: list[str], catches_up: bool, order: random.Random
) -> None:
    """Any mix of votes, in any order, from ranks some of which die before they vote; each may arrive twice."""
    role = C if catches_up else W
    direct, through = running(role), running(role)
    assert direct.running is not None
    seq = direct.running.seq
    places = tree_of_six(through)
    voters = [rank for rank in range(6) if outcomes[rank] != "dead"] * 2
    order.shuffle(voters)
    for rank in voters:
        message = vote(rank, outcomes[rank] != "no", seq, caught_up=outcomes[rank] != "behind")
        direct.on_message(message)
        node, slot = places[rank]
        node.say(slot, message)
    for leader in (direct, through):
        if "no" in outcomes:
            assert leader.running is None, "one no ends the step"
        elif "dead" in outcomes:
            assert leader.running is not None, "nobody speaks for the dead"
        else:
            assert leader.state == decision(seq, 6 if catches_up else 5, 7).outcome
            assert leader.materialized is not (catches_up and "behind" in outcomes)
    assert (direct.state, direct.materialized) == (through.state, through.materialized)


def test_one_that_comes_late_is_waited_for() -> None:
    leader = running(W)
    assert leader.running is not None
    places = tree_of_six(leader)
    for rank in (0, 1, 2, 3, 5):
        places[rank][0].say(places[rank][1], vote(rank, True))
    assert leader.running is not None
    places[4][0].say(places[4][1], vote(4, True))
    assert leader.running is None
    assert leader.state == decision(1, 5, 1).outcome


def test_the_first_of_the_same_is_remembered_for_a_while() -> None:
    once = Once()
    assert once.is_first(b"x")
    assert not once.is_first(b"x")
    for n in range(SEEN_MAX):
        once.is_first(b"%d" % n)
    assert once.is_first(b"x")
