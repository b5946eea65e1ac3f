"""The control tree on real sockets: order, shape, lost ranks, wrong tokens."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from keepstep.protocol.errors import ConfigError
from keepstep.runtime import tree as trees
from keepstep.runtime.tree import ControlTree, children_of, parent_of, subtree_of


class Node:
    """A rank and what it heard."""

    def __init__(self, rank: int, size: int, port: int, *, fan_out: int = 2, **changes: Any) -> None:
        self.down: list[tuple[bytes, bytes | None]] = []
        self.up: list[tuple[int, bytes]] = []
        self.lost: list[tuple[int, str]] = []
        self.changed = asyncio.Event()
        settings: dict[str, Any] = {
            "rank": rank, "size": size, "fan_out": fan_out, "token": b"t", "job": "j", "incarnation": "i", "host": "127.0.0.1",
            "leader_address": ("127.0.0.1", port), "listen_fd": None, "welcome": b"hi" if rank == 0 else b"",
            "on_down": lambda common, own: self.note(self.down, (common, own)),
            "on_up": lambda rank, payload: self.note(self.up, (rank, payload)),
            "on_lost": lambda rank, reason: self.note(self.lost, (rank, reason)),
        }  # fmt: skip
        self.tree = ControlTree(**{**settings, **changes})

    def note(self, where: list[Any], what: Any) -> None:
        where.append(what)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


async def grow(size: int, fan_out: int = 2) -> list[Node]:
    port = free_port()
    nodes = [Node(rank, size, port, fan_out=fan_out) for rank in range(size)]
    welcomes = await asyncio.gather(*(node.tree.start(20) for node in nodes))
    assert set(welcomes) == {b"hi"}
    return nodes


def with_tree(size: int, body: Callable[[list[Node]], Awaitable[None]], fan_out: int = 2) -> None:
    async def run() -> None:
        nodes = await grow(size, fan_out)
        try:
            await body(nodes)
        finally:
            await asyncio.gather(*(node.tree.close() for node in nodes))

    asyncio.run(run())


def test_the_shape_is_a_tree() -> None:
    for size, fan_out in ((1, 2), (2, 32), (7, 2), (50, 3)):
        assert subtree_of(0, size, fan_out) == set(range(size))
        for rank in range(1, size):
            assert rank in children_of(parent_of(rank, fan_out), size, fan_out)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_everybody_hears_everything_in_order(size: int) -> None:
    async def body(nodes: list[Node]) -> None:
        await nodes[0].tree.broadcast(b"first")
        await nodes[0].tree.scatter(b"", {rank: b"for %d" % rank for rank in range(size)})
        await nodes[0].tree.broadcast(b"last")
        for rank, node in enumerate(nodes):
            await node.until(lambda node=node: len(node.down) == 3)
            assert node.down == [(b"first", None), (b"", b"for %d" % rank), (b"last", None)]
        await asyncio.gather(*(node.tree.send_up(b"up") for node in nodes))
        await nodes[0].until(lambda: len(nodes[0].up) == size)
        assert sorted(nodes[0].up) == [(rank, b"up") for rank in range(size)]

    with_tree(size, body)


def test_a_lost_rank_is_noticed_on_both_sides() -> None:
    async def body(nodes: list[Node]) -> None:
        await nodes[1].tree.close()
        await nodes[0].until(lambda: bool(nodes[0].lost))
        assert nodes[0].lost[0][0] == 1
        for child in (3, 4):
            await nodes[child].until(lambda child=child: bool(nodes[child].lost))
            assert nodes[child].lost[0][0] == 1

    with_tree(5, body)


def test_a_frozen_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "TICK_S", 0.02)

    async def body(nodes: list[Node]) -> None:
        for task in list(nodes[1].tree._tasks):
            task.cancel()  # it neither reads nor ticks any more, but its connection stays open
        await nodes[0].until(lambda: bool(nodes[0].lost))
        assert "silent" in nodes[0].lost[0][1]

    with_tree(2, body)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"token": b"other"}, "token"), ({"incarnation": "old"}, "does not belong"), ({"rank": 1}, "already")],
)
def test_whoever_does_not_belong_is_refused(changes: dict[str, Any], sentence: str) -> None:
    async def run() -> None:
        port = free_port()
        nodes = [Node(0, 3, port), Node(1, 3, port)]
        odd = Node(changes.pop("rank", 2), 3, port, **changes)
        try:
            await asyncio.gather(*(node.tree.start(20) for node in nodes))
            with pytest.raises(ConfigError, match=sentence):
                await odd.tree.start(5)
        finally:
            await asyncio.gather(*(node.tree.close() for node in [*nodes, odd]))

    asyncio.run(run())


def test_no_leader_is_a_sentence() -> None:
    async def run() -> None:
        node = Node(1, 2, free_port())
        try:
            with pytest.raises(ConfigError, match="could not join"):
                await node.tree.start(0.2)
        finally:
            await node.tree.close()

    asyncio.run(run())


def test_messages_wait_for_ranks_that_come_late() -> None:
    async def run() -> None:
        port = free_port()
        root, late = Node(0, 2, port), Node(1, 2, port)
        try:
            await root.tree.start(5)
            await root.tree.broadcast(b"the job is over")
            await late.tree.start(5)
            await late.until(lambda: bool(late.down))
            assert late.down == [(b"the job is over", None)]
        finally:
            await asyncio.gather(root.tree.close(), late.tree.close())

    asyncio.run(run())


def test_garbage_hurts_nobody() -> None:
    async def body(nodes: list[Node]) -> None:
        assert nodes[0].tree._server is not None
        port = nodes[0].tree._server.sockets[0].getsockname()[1]
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff" + b"x" * 100, b"\x02\x00\x00\x00{}"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(garbage)
            writer.close()
        await nodes[0].tree.broadcast(b"still here")
        await nodes[1].until(lambda: bool(nodes[1].down))

    with_tree(2, body)
