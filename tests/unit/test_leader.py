"""The leader's shell around its machine: what ends the rank, and whom it takes for lost. A store and a tree that do nothing."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from machines import W, decision, hello, me, member

from keepstep.protocol import quorum
from keepstep.protocol.errors import NoStateLeft
from keepstep.protocol.ids import ReplicaId, Seq
from keepstep.protocol.messages import Abort, Decision, Policy, Report
from keepstep.protocol.step import Tell
from keepstep.runtime import leader as leaders
from keepstep.runtime.etcd_view import StoreView
from keepstep.runtime.leader import LeaderShell


class Store:
    """Tells only what the test says."""

    def __init__(self) -> None:
        self.tell: Callable[[StoreView], None] = lambda view: None

    async def watch(self, on_change: Callable[[StoreView], None]) -> None:
        self.tell = on_change

    async def put_report(self, report: Report) -> None: ...

    async def close(self) -> None: ...


class World:
    """A leader of one rank, and what became of it."""

    def __init__(self) -> None:
        self.store, self.fatal = Store(), asyncio.get_running_loop().create_future()
        self.leader = LeaderShell(
            me(size=1), Policy(num_replicas=2), self.store, None, record=lambda _: None,  # type: ignore[arg-type]
            again=False, find=None, host="", emit=lambda *_, **__: None, fault=lambda *_: None, on_fatal=self.fatal.set_result,
        )  # fmt: skip

    async def end(self) -> BaseException:
        return await asyncio.wait_for(self.fatal, 10)


def with_world(body: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        world = World()
        await world.leader.start()
        try:
            await body(world)
        finally:
            await world.leader.close()

    asyncio.run(main())


def view(last: Decision | None = None, *reports: int) -> StoreView:
    return StoreView(
        last=last, revision=1, last_seen_at=0, reports=dict.fromkeys(reports),  # type: ignore[misc]
        dead=frozenset(), announced=frozenset(), connected=True,
    )  # fmt: skip


def test_an_error_in_a_timer_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum, "decide", lambda *_, now: quorum.Wait(reason="a moment", until=now))

    async def body(world: World) -> None:
        world.store.tell(view())
        monkeypatch.setattr(quorum, "decide", lambda *_, now: 1 // 0)
        assert not world.fatal.done(), "the first answer is to wait"
        assert isinstance(await world.end(), ZeroDivisionError)

    with_world(body)


def test_an_error_of_the_machine_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        monkeypatch.setattr(world.leader.machine, "on_message", lambda message: {}[message])
        world.leader.on_message(None)  # type: ignore[arg-type]
        assert isinstance(await world.end(), KeyError)

    with_world(body)


@pytest.mark.parametrize(("reports", "lost"), [((0, 1), set()), ((0,), {1}), ((1,), set()), ((), {1})])
def test_a_leader_never_takes_itself_for_lost(
    monkeypatch: pytest.MonkeyPatch, reports: tuple[int, ...], lost: set[int]
) -> None:
    """Its own lease runs out too, if it was stopped for a while."""
    monkeypatch.setattr(leaders, "LINK_GRACE_S", 0.0)
    monkeypatch.setattr(LeaderShell, "_decide", lambda self: None)

    async def body(world: World) -> None:
        told: list[Any] = []
        monkeypatch.setattr(world.leader._tell, "put_nowait", told.append)
        world.leader._carry_out(world.leader.machine.on_message(hello(0)))
        world.store.tell(view(decision(1, 0, 1, member(0, W, 0), member(1, W, 1)), *reports))
        checked = asyncio.Event()
        asyncio.get_running_loop().call_later(0.0, checked.set)  # after the leader's own timer
        await checked.wait()
        assert not world.fatal.done()
        suspects = {e.message.suspect for e in told if isinstance(e, Tell) and isinstance(e.message, Abort)}
        assert suspects == lost

    with_world(body)


@pytest.mark.parametrize("left", [None, decision(1, 0, 1, member(0, W))], ids=["nothing", "an older one"])
def test_a_store_that_has_forgotten_a_decision_ends_the_rank(
    monkeypatch: pytest.MonkeyPatch, left: Decision | None
) -> None:
    monkeypatch.setattr(quorum, "decide", lambda *_, now: quorum.Wait(reason="a moment"))

    async def body(world: World) -> None:
        world.store.tell(view(decision(2, 1, 1, member(0, W))))
        world.store.tell(replace(view(left), connected=False))  # only the last thing that was read
        assert not world.fatal.done()
        world.store.tell(view(left))
        assert isinstance(await world.end(), NoStateLeft)

    with_world(body)


@pytest.mark.parametrize("gone", [False, True])
def test_a_report_that_was_overwritten_is_written_again(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """A write that had been given up is carried out late: what the store shows then is not our newest report."""
    monkeypatch.setattr(leaders, "OVERWRITTEN_S", 0.0)
    monkeypatch.setattr(LeaderShell, "_decide", lambda self: None)

    async def body(world: World) -> None:
        written: asyncio.Queue[Report] = asyncio.Queue()
        monkeypatch.setattr(world.store, "put_report", written.put, raising=False)
        world.leader._carry_out(world.leader.machine.on_message(hello(0)))
        newest = await asyncio.wait_for(written.get(), 10)
        await asyncio.sleep(0)  # the call ends
        old = replace(newest, answers=Seq(newest.answers + 1))
        world.store.tell(replace(view(), reports={ReplicaId(0): (newest, 0)}))
        assert written.empty()
        world.store.tell(replace(view(), reports={} if gone else {ReplicaId(0): (old, 0)}))
        assert await asyncio.wait_for(written.get(), 10) == newest

    with_world(body)
