"""Which host keeps which replica, while hosts come and go."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.messages import Request
from keepstep.protocol.roster import (
    SPREAD_NS,
    Became,
    Claim,
    Failure,
    Outcome,
    Place,
    Plan,
    PoolHost,
    Roster,
    Seating,
    TrySeats,
    Unseated,
    code_of_end,
    differences,
    failures_before,
    moves,
    new_seats,
    runs,
)

S = 1_000_000_000
PLAN = Plan(
    script="train.py", args=(), replicas=2, ranks=2, min_replicas=1, checkpoint_dir=None, checkpoint_every=100,
    keep_checkpoints=3, replace_after_s=10.0,
)  # fmt: skip


def host(name: str, *, slots: int = 2, label: str = "", agent: str = "") -> PoolHost:
    return PoolHost(name=name, agent=agent or f"agent-of-{name}", slots=slots, label=label, about="")


def pool(*hosts: PoolHost) -> dict[str, PoolHost]:
    return {h.name: h for h in hosts}


def seated(roster: Roster, gone: frozenset[str] = frozenset(), **asked: Request) -> Roster:
    """With the seats that any agent would publish."""
    answer = new_seats(roster, requests(**asked), gone)
    assert isinstance(answer, TrySeats), answer
    assert answer.revision == roster.revision
    return replace(roster, seats=answer.seats, revision=roster.revision + 1)


def requests(**asked: Request) -> dict[ReplicaId | None, Request]:
    return {None if name == "job" else ReplicaId(int(name[1:])): request for name, request in asked.items()}


def where(roster: Roster) -> dict[int, str]:
    return {r: at.host for r, at in roster.places.items()}


def request(*, leave: bool, request_id: str = "1") -> Request:
    return Request(request_id=request_id, leave=leave, by="somebody")


def outcome(became: Became, at: Place, request_id: str = "") -> Outcome:
    return Outcome(became=became, host=at.host, number=at.number, request_id=request_id)


THREE = Roster(plan=PLAN, hosts=pool(host("a"), host("b"), host("c")))


def test_nobody_is_seated_before_there_is_room_for_all() -> None:
    answer = new_seats(Roster(plan=PLAN, hosts=pool(host("a", slots=3))), {}, frozenset())
    assert isinstance(answer, Unseated)
    assert answer.reason == (
        "replicas 0 and 1 of 2 ranks, each within one host, and the 1 host in the pool has room for 1 more: start "
        "`keepstep agent` on more hosts"
    )


def test_replicas_stand_far_apart() -> None:
    """No host, building, zone or rack twice while there is another."""
    near = pool(host("a", label="b1/z1/r1", slots=8), host("b", label="b1/z1/r2"), host("c", label="b1/z2/r3"))
    assert where(seated(Roster(plan=PLAN, hosts=near))) == {0: "b", 1: "c"}
    far = near | pool(host("d", label="b2/z1/r1"))
    assert where(seated(Roster(plan=PLAN, hosts=far))) == {0: "b", 1: "d"}
    four = replace(PLAN, replicas=4)
    assert sorted(where(seated(Roster(plan=four, hosts=far))).values()) == ["a", "b", "c", "d"]
    six = replace(PLAN, replicas=6)
    assert sorted(where(seated(Roster(plan=six, hosts=far))).values()) == ["a", "a", "a", "b", "c", "d"]


def test_before_replicas_share_a_host_more_are_waited_for() -> None:
    seating, one = Seating(), Roster(plan=PLAN, hosts=pool(host("a", slots=4)))
    assert seating.on_view(one, {}, now=5) is None
    assert seating.waiting.startswith("there is room for every replica")
    assert seating.next_deadline(now=5) == 5 + SPREAD_NS
    found = seating.on_time(now=5 + SPREAD_NS)
    assert found is not None
    assert {at.host for at in found.seats.places.values()} == {"a"}
    two = replace(one, hosts=one.hosts | pool(host("b")))
    again = Seating()
    again.on_view(one, {}, now=5)
    assert again.on_view(two, {}, now=6) is not None, "nobody shares now"


def test_a_host_that_is_gone_is_waited_for_then_its_replicas_go_elsewhere() -> None:
    roster, seating = seated(THREE), Seating()
    assert where(roster) == {0: "a", 1: "b"}
    assert seating.on_view(roster, {}, now=0) is None
    without = replace(roster, hosts=pool(host("b"), host("c")))
    assert seating.on_view(without, {}, now=3 * S) is None
    assert seating.next_deadline(now=3 * S) == 13 * S
    assert seating.on_time(now=13 * S - 1) is None
    answer = seating.on_time(now=13 * S)
    assert answer is not None
    assert answer.seats.places[ReplicaId(0)] == Place(host="c", agent="agent-of-c", number=2)
    assert answer.seats.places[ReplicaId(1)] == roster.places[ReplicaId(1)]
    assert answer.seats.reason == "replica 0 on c"


def test_a_host_that_comes_back_in_time_keeps_its_replicas() -> None:
    roster, seating = seated(THREE), Seating()
    seating.on_view(replace(roster, hosts=pool(host("b"), host("c"))), {}, now=0)
    assert seating.on_view(roster, {}, now=9 * S) is None
    assert seating.on_time(now=20 * S) is None
    assert seating.next_deadline(now=20 * S) is None


def test_what_is_missing_after_the_store_was_away_counts_anew() -> None:
    """All leases end with the store."""
    roster, seating = seated(THREE), Seating()
    empty = replace(roster, hosts={})
    seating.on_view(empty, {}, now=0)
    seating.lost_sight()
    assert seating.on_time(now=60 * S) is None
    assert seating.on_view(empty, {}, now=61 * S) is None
    assert seating.gone(now=62 * S) == frozenset()


def test_an_agent_that_was_started_again_keeps_its_replicas_in_new_lives() -> None:
    roster = seated(THREE)
    again = seated(replace(roster, hosts=roster.hosts | pool(host("a", agent="another"))))
    assert again.places[ReplicaId(0)] == Place(host="a", agent="another", number=2)
    assert again.places[ReplicaId(1)] == roster.places[ReplicaId(1)]


def test_no_room_left_is_said_and_the_place_stays() -> None:
    roster = seated(replace(THREE, hosts=pool(host("a"), host("b"))))
    answer = new_seats(replace(roster, hosts=pool(host("b"))), {}, frozenset({"a"}))
    assert isinstance(answer, Unseated)
    back = replace(roster, hosts=pool(host("b"), host("a", agent="another")))
    assert seated(back, frozenset()).places[ReplicaId(0)].number == 2


def test_replicas_of_a_drained_host_stay_until_they_have_left() -> None:
    roster = replace(seated(THREE), drained={"a": request(leave=True)})
    assert new_seats(roster, {}, frozenset()) is None
    at = roster.places[ReplicaId(0)]
    left = replace(roster, outcomes={ReplicaId(0): outcome(Became.MOVES, at)})
    assert moves(ReplicaId(0), left, {})
    assert not runs(ReplicaId(0), left, {})
    after = seated(left)
    assert where(after) == {0: "c", 1: "b"}
    assert runs(ReplicaId(0), after, {}), "what it had left was the place before"
    assert new_seats(after, {}, frozenset()) is None


def test_a_drained_host_that_may_keep_replicas_again_takes_back_who_found_no_other() -> None:
    roster = seated(replace(THREE, hosts=pool(host("a"), host("b"))))
    left = replace(
        roster,
        drained={"a": request(leave=True)},
        outcomes={ReplicaId(0): outcome(Became.MOVES, roster.places[ReplicaId(0)])},
    )
    answer = new_seats(left, {}, frozenset())
    assert isinstance(answer, Unseated)
    assert "a is drained" in answer.reason
    assert seated(replace(left, drained={})).places[ReplicaId(0)] == Place(host="a", agent="agent-of-a", number=2)


@pytest.mark.parametrize("became", [Became.LEFT, Became.GIVEN_UP, Became.MISTAKE])
def test_who_has_an_outcome_is_not_seated_until_it_is_asked_back(became: Became) -> None:
    roster = seated(THREE)
    at = roster.places[ReplicaId(0)]
    over = replace(
        roster,
        hosts=pool(host("b"), host("c")),
        outcomes={ReplicaId(0): outcome(became, at, request_id="1")},
    )
    assert new_seats(over, requests(r0=request(leave=True)), frozenset({"a"})) is None
    back = request(leave=False, request_id="2")
    assert where(seated(over, frozenset({"a"}), r0=back)) == {0: "c", 1: "b"}


def test_the_job_is_over_when_no_replica_goes_on() -> None:
    roster = seated(THREE)
    places = roster.places
    zero, one = ReplicaId(0), ReplicaId(1)

    def code(gone: frozenset[str] = frozenset(), stop: bool = False, **became: Became) -> int | None:
        outcomes = {ReplicaId(int(n[1:])): outcome(b, places[ReplicaId(int(n[1:]))]) for n, b in became.items()}
        asked = requests(job=request(leave=True)) if stop else {}
        return code_of_end(replace(roster, outcomes=outcomes), asked, gone)

    assert zero in places
    assert one in places
    assert code() is None
    assert code(r0=Became.DONE) is None, "the other one may be busy yet"
    assert code(r0=Became.DONE, r1=Became.DONE) == 0
    assert code(frozenset({"b"}), r0=Became.DONE) == 0, "who is cut off is not waited for"
    assert code(frozenset({"b"}), r0=Became.GIVEN_UP) is None, "it comes up elsewhere"
    assert code(r0=Became.GIVEN_UP, r1=Became.GIVEN_UP) == 1
    assert code(r0=Became.GIVEN_UP, r1=Became.MISTAKE) == 78
    assert code(r0=Became.LEFT, r1=Became.LEFT) == 1
    assert code(r0=Became.LEFT, r1=Became.LEFT, stop=True) == 0
    assert code(r0=Became.LEFT, r1=Became.MOVES) is None, "it goes on elsewhere"
    assert code(r0=Became.DONE, r1=Became.MOVES) == 0
    assert code(stop=True, r0=Became.LEFT) is None


def test_nobody_waits_at_the_end_for_what_died_with_an_agent_that_began_again() -> None:
    roster = seated(THREE)
    zero = roster.places[ReplicaId(0)]
    again = replace(roster, hosts=roster.hosts | pool(host("b", agent="another")))
    assert code_of_end(replace(again, outcomes={ReplicaId(0): outcome(Became.DONE, zero)}), {}, frozenset()) == 0
    stopped = replace(again, outcomes={ReplicaId(0): outcome(Became.LEFT, zero)})
    assert code_of_end(stopped, requests(job=request(leave=True)), frozenset()) == 0
    assert code_of_end(replace(again, outcomes={ReplicaId(0): outcome(Became.GIVEN_UP, zero)}), {}, frozenset()) is None


def test_the_number_of_a_place_never_falls() -> None:
    """Or the store, where a life was claimed for a higher one, would take it for an old place."""
    roster = replace(seated(THREE), claims={ReplicaId(0): Claim(incarnation=Incarnation("a"), number=4, life=4)})
    over = replace(
        roster, outcomes={ReplicaId(0): outcome(Became.GIVEN_UP, replace(roster.places[ReplicaId(0)], number=4))}
    )
    moved = seated(replace(over, hosts=pool(host("a"), host("b", agent="another"))))
    assert ReplicaId(0) not in moved.places
    assert seated(moved, r0=request(leave=False, request_id="2")).places[ReplicaId(0)].number == 5


def test_what_became_of_it_at_an_earlier_place_does_not_count() -> None:
    """An agent that was cut off says it when it is back, and the replica trains elsewhere by then."""
    zero = ReplicaId(0)
    roster = seated(replace(seated(THREE), hosts=pool(host("b"), host("c"))), frozenset({"a"}))
    assert roster.places[zero].number == 2
    late = replace(roster, outcomes={zero: Outcome(became=Became.GIVEN_UP, host="a", number=1, reason="it failed")})
    assert runs(zero, late, {})
    assert new_seats(late, {}, frozenset()) is None
    ends = {**late.outcomes, ReplicaId(1): outcome(Became.GIVEN_UP, roster.places[ReplicaId(1)])}
    assert code_of_end(replace(late, outcomes=ends), {}, frozenset()) is None


@pytest.mark.parametrize("shape", [{"ranks": 0}, {"replicas": 0}])
def test_a_plan_of_nothing_is_none(shape: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        replace(PLAN, **shape)  # type: ignore[arg-type]  # numbers only


def test_two_agents_that_do_not_agree_are_told_about_what() -> None:
    assert differences(PLAN, PLAN) == ""
    other = replace(PLAN, replicas=3, args=("--x",))
    assert differences(PLAN, other) == "args is () there, ('--x',) here; replicas is 2 there, 3 here"


LABELS = st.sampled_from(["", "b1/z1/r1", "b1/z1/r2", "b1/z2/r1", "b2/z1/r1"])
HOSTS = st.lists(st.tuples(st.integers(1, 7), LABELS, st.booleans()), max_size=6)


@given(st.integers(1, 5), st.integers(1, 3), st.lists(HOSTS, min_size=1, max_size=6))
def test_whatever_comes_and_goes_everybody_who_fits_has_one_place(
    replicas: int, ranks: int, changes: list[list[tuple[int, str, bool]]]
) -> None:
    """Hosts come back with other agents, and gone ones are gone for good. Nobody moves without need, and it comes to rest."""
    plan = replace(PLAN, replicas=replicas, ranks=ranks)
    roster = Roster(plan=plan)
    for hosts in changes:
        now = pool(
            *(
                host(f"h{i}", slots=slots, label=label, agent=f"{i}-{slots}-{new}")
                for i, (slots, label, new) in enumerate(hosts)
            )
        )
        before, roster = roster, replace(roster, hosts=now)
        gone = frozenset(at.host for at in roster.places.values()) - now.keys()
        answer = new_seats(roster, {}, gone)
        if isinstance(answer, TrySeats):
            roster = replace(roster, seats=answer.seats, revision=roster.revision + 1)
            again = new_seats(roster, {}, gone)
            assert again is None or isinstance(again, Unseated), "it must come to rest"
        good = {r: at for r, at in roster.places.items() if at.host in now and now[at.host].agent == at.agent}
        for name, h in now.items():
            assert sum(at.host == name for at in good.values()) * ranks <= h.slots
        room = sum(h.slots // ranks for h in now.values())
        if before.seats is not None or room >= replicas:
            assert len(good) == min(replicas, room)
        for r, at in good.items():
            earlier = before.places.get(r)
            assert earlier is None or earlier == at or at.number == earlier.number + 1
        for r, at in before.places.items():
            if at.host in now and now[at.host].agent == at.agent:
                assert roster.places[r] == at


@pytest.mark.parametrize(
    ("became", "causes"),
    [
        (None, ["boom", "host a was lost, or its agent"]),
        (Became.MOVES, ["boom"]),  # its host was drained
        (Became.GIVEN_UP, []),  # and was asked back since, or it would not be taken
        (Became.LEFT, []),
    ],
)
def test_what_the_next_host_knows_of_the_lives_before(became: Became | None, causes: list[str]) -> None:
    boom = Failure(cause="boom", killed=False, trained=True, at_s=1000.0)
    claim = Claim(incarnation=Incarnation("x"), number=1, life=2, host="a", failures=(boom,))
    at = Place(host="a", agent="agent-of-a", number=1)
    outcomes = {} if became is None else {ReplicaId(0): outcome(became, at)}
    roster = Roster(plan=PLAN, claims={ReplicaId(0): claim}, outcomes=outcomes)
    found = failures_before(ReplicaId(0), roster, wall_s=1010.0)
    assert [failure.cause for failure in found] == causes
    assert found == () or found[-1].at_s == (1010.0 if became is None else 1000.0)
    assert failures_before(ReplicaId(1), roster, wall_s=1010.0) == (), "it has had no life yet"
