"""What agents tell each other, on a real etcd: who wins, what a cut-off agent may not do, and values that make no sense."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from test_roster import PLAN, host

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.roster import Became, Claim, Outcome, Place, Seats
from keepstep.runtime.etcd_roster import RosterStore
from keepstep.runtime.etcd_server import EmbeddedEtcd

ZERO = ReplicaId(0)


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    return request.node.name


def with_stores(server: tuple[EmbeddedEtcd, str], job: str, body: Callable[..., Awaitable[None]]) -> None:
    async def run() -> None:
        a, b = [await RosterStore.open(server[1], job, lease_s=5.0) for _ in range(2)]
        try:
            await asyncio.wait_for(body(a, b), 60)
        finally:
            await a.close()
            await b.close()

    asyncio.run(run())


def claim(life: str, number: int) -> Claim:
    return Claim(incarnation=Incarnation(life), number=number, life=1)


def seats(name: str) -> Seats:
    return Seats(places={ZERO: Place(host=name, agent="x", number=1)}, reason="because")


def test_one_of_those_who_decide_wins(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: RosterStore, b: RosterStore) -> None:
        won = await asyncio.gather(a.publish_seats(seats("a"), 0), b.publish_seats(seats("b"), 0))
        assert sorted(won) == [False, True]
        roster = (await b.read()).roster
        assert roster.seats == seats("a" if won[0] else "b")
        assert await b.publish_seats(seats("c"), roster.revision)
        assert not await a.publish_seats(seats("d"), roster.revision)

    with_stores(server, job, body)


def test_a_life_is_claimed_and_the_one_before_is_dead(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    """An agent that was away finds that its place is not the newest, and starts nothing."""

    async def body(away: RosterStore, here: RosterStore) -> None:
        assert await away.claim(ZERO, claim("first", 1))
        assert await away.claim(ZERO, claim("first", 1)), "the answer of the first try may have been lost"
        await away.put_outcome(ZERO, Outcome(became=Became.MOVES, host="a", number=1))
        assert await here.claim(ZERO, claim("second", 2))
        view = await here.read()
        assert view.dead == {"first"}
        assert view.roster.claims == {ZERO: claim("second", 2)}
        assert not view.roster.outcomes, "that was about the life before"
        assert not await away.claim(ZERO, claim("third", 1))
        assert (await away.read()).roster.claims == {ZERO: claim("second", 2)}
        assert await here.claim(ZERO, claim("fourth", 2)), "another life at the same place"
        assert (await away.read()).dead == {"first", "second"}

    with_stores(server, job, body)


def test_what_became_of_it_at_an_old_place_is_not_written(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(away: RosterStore, here: RosterStore) -> None:
        assert await away.put_outcome(ZERO, Outcome(became=Became.LEFT, host="a", number=1)), "it never had a life"
        assert await away.claim(ZERO, claim("first", 1))
        assert await away.put_outcome(ZERO, Outcome(became=Became.GIVEN_UP, host="a", number=1))
        assert await here.claim(ZERO, claim("second", 2))
        assert not await away.put_outcome(ZERO, Outcome(became=Became.GIVEN_UP, host="a", number=1))
        assert not (await here.read()).roster.outcomes
        assert await here.put_outcome(ZERO, Outcome(became=Became.DONE, host="b", number=2))
        assert (await away.read()).roster.outcomes[ZERO].became is Became.DONE

    with_stores(server, job, body)


def test_of_two_claims_at_once_the_newer_place_stays(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: RosterStore, b: RosterStore) -> None:
        for number in range(1, 20, 2):
            await asyncio.gather(
                a.claim(ZERO, claim(f"a{number}", number)), b.claim(ZERO, claim(f"b{number}", number + 1))
            )
            view = await a.read()
            assert view.roster.claims[ZERO] == claim(f"b{number}", number + 1)
            assert f"b{number}" not in view.dead

    with_stores(server, job, body)


def test_a_name_in_the_pool_is_one_agents(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: RosterStore, b: RosterStore) -> None:
        assert await a.enter(host("h")) is None
        held = await b.enter(host("h", agent="another"))
        assert held is not None
        assert "agent-of-h" in held
        assert (await b.read()).roster.hosts == {"h": host("h")}
        await a.close()
        assert await b.enter(host("h", agent="another")) is None

    with_stores(server, job, body)


def test_hosts_announce_a_replica_without_taking_each_others_word_back(
    server: tuple[EmbeddedEtcd, str], job: str
) -> None:
    async def body(a: RosterStore, b: RosterStore) -> None:
        await a.enter(host("a"))
        await b.enter(host("b"))
        await a.announce(ZERO)
        await b.announce(ZERO)
        await a.unannounce(ZERO)
        assert (await a.read()).announced == {ZERO}
        await b.unannounce(ZERO)
        assert (await a.read()).announced == frozenset()

    with_stores(server, job, body)


def test_a_job_is_run_with_agents_or_without(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: RosterStore, b: RosterStore) -> None:
        assert await a.offer_plan(PLAN) == PLAN
        with pytest.raises(ConfigError, match="has run on this store before"):
            await b.claim_launcher("me")
        await b.close()
        c = await RosterStore.open(server[1], f"{job}-2", lease_s=5.0)
        try:
            await c.claim_launcher("me")
            with pytest.raises(ConfigError, match="is run, or was run, without agents"):
                await c.offer_plan(PLAN)
        finally:
            await c.close()

    with_stores(server, job, body)


def test_what_makes_no_sense_is_not_believed(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: RosterStore, _: RosterStore) -> None:
        root = f"keepstep/{job}/roster/"
        for name, value in (
            ("plan", b"{}"), ("seats", b"[]"), ("claims/0", b"x"), ("outcomes/0", b'{"became": "rich"}'), ("claims/x", b"{}"),
            ("hosts/h", b'{"name": "other", "agent": "x", "slots": 1, "label": "", "about": ""}'),
            ("hosts/g", b'{"name": "g", "agent": "x", "slots": 0, "label": "", "about": ""}'),
        ):  # fmt: skip
            await a.call(a.client.put(f"{root}{name}".encode(), value))
        roster = (await a.read()).roster
        assert (roster.plan, roster.seats) == (None, None)
        assert not roster.hosts
        assert not roster.claims
        assert not roster.outcomes

    with_stores(server, job, body)
