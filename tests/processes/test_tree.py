"""The control tree on real sockets: order, shape, lost ranks, wrong tokens."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.protocol.errors import ConfigError
from keepstep.runtime import tree as trees
from keepstep.runtime.tree import ControlTree
from keepstep.runtime.tree_shape import TreeShape


class Node:
    """A rank and what it heard."""

    def __init__(self, rank: int, size: int, port: int, *, fan_out: int = 2, group: int = 1, **changes: Any) -> None:
        self.down: list[tuple[bytes, bytes]] = []
        self.together: list[tuple[int, int, bool]] = []
        self.up: list[tuple[int, bytes]] = []
        self.lost: list[tuple[int, str]] = []
        self.changed = asyncio.Event()
        settings: dict[str, Any] = {
            "rank": rank, "shape": TreeShape(size=size, group=group, fan_out=fan_out),
            "token": b"t", "job": "j", "incarnation": "i", "host": "127.0.0.1",
            "leader_address": ("127.0.0.1", port), "listen_fd": None, "welcome": b"hi" if rank == 0 else b"",
            "on_down": lambda common, record: self.note(self.down, (common, record)),
            "on_together": lambda *what: self.note(self.together, what),
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


async def grow(size: int, fan_out: int = 2, group: int = 1) -> list[Node]:
    port = free_port()
    nodes = [Node(rank, size, port, fan_out=fan_out, group=group) for rank in range(size)]
    welcomes = await asyncio.gather(*(node.tree.start(20) for node in nodes))
    assert set(welcomes) == {b"hi"}
    return nodes


def with_tree(size: int, body: Callable[[list[Node]], Awaitable[None]], fan_out: int = 2, group: int = 1) -> None:
    async def run() -> None:
        nodes = await grow(size, fan_out, group)
        try:
            await body(nodes)
        finally:
            await asyncio.gather(*(node.tree.close() for node in nodes))

    asyncio.run(run())


@pytest.mark.parametrize(("size", "group"), [(1, 1), (2, 1), (7, 1), (13, 4)])
def test_everybody_hears_everything_in_order(size: int, group: int) -> None:
    async def body(nodes: list[Node]) -> None:
        nodes[0].tree.broadcast(b"first")
        nodes[0].tree.scatter(b"middle", b"".join(b"for %02d" % rank for rank in range(size)), 6)
        nodes[0].tree.broadcast(b"last")
        for rank, node in enumerate(nodes):
            await node.until(lambda node=node: len(node.down) == 3)
            assert node.down == [(b"first", b""), (b"middle", b"for %02d" % rank), (b"last", b"")]
        for node in nodes:
            node.tree.send_up(b"up")
        await nodes[0].until(lambda: len(nodes[0].up) == size)
        assert sorted(nodes[0].up) == [(rank, b"up") for rank in range(size)]

    with_tree(size, body, group=group)


@pytest.mark.parametrize("odd", [None, 0, 5, 12])
def test_what_all_say_arrives_once_and_after_the_last(odd: int | None) -> None:
    """Whoever does not agree is counted, wherever in the tree it is; what somebody has said already is not said again."""

    async def body(nodes: list[Node]) -> None:
        for node in nodes[1:]:
            node.tree.say_together(1, 7, node.tree.rank != odd)
            node.tree.send_once(b"once", b"a no")
            node.tree.send_up(b"passed")
        await nodes[0].until(lambda: [word for _, word in nodes[0].up].count(b"passed") == 12)
        assert not nodes[0].together, "one has not said it yet"
        nodes[0].tree.say_together(1, 7, odd != 0)
        await nodes[0].until(lambda: bool(nodes[0].together))
        assert nodes[0].together == [(1, 7, odd is None)]
        assert [word for _, word in nodes[0].up].count(b"a no") == 1

    with_tree(13, body, group=4)


def test_a_process_may_hold_all_ranks_of_its_host() -> None:
    async def run() -> None:
        port = free_port()
        shape = TreeShape(size=10, group=4, fan_out=2)
        nodes = [Node(first, 10, port, shape=shape, holds=min(4, 10 - first)) for first in (0, 4, 8)]
        try:
            await asyncio.gather(*(node.tree.start(20) for node in nodes))
            nodes[0].tree.scatter(b"all", bytes(range(10)), 1)
            for node in nodes:
                await node.until(lambda node=node: bool(node.down))
            assert [node.down for node in nodes] == [
                [(b"all", bytes(range(4)))], [(b"all", bytes(range(4, 8)))], [(b"all", bytes([8, 9]))]
            ]  # fmt: skip
            for rank in range(10):
                nodes[rank // 4].tree.say_together(1, 7, True, rank=rank)
            await nodes[0].until(lambda: bool(nodes[0].together))
        finally:
            await asyncio.gather(*(node.tree.close() for node in nodes))

    asyncio.run(run())


def test_a_lost_rank_is_noticed_on_both_sides() -> None:
    async def body(nodes: list[Node]) -> None:
        await nodes[1].tree.close()
        await nodes[0].until(lambda: bool(nodes[0].lost))
        assert nodes[0].lost[0][0] == 1
        await nodes[2].until(lambda: bool(nodes[2].lost))
        assert nodes[2].lost[0][0] == 1

    with_tree(5, body)


@contextlib.contextmanager
def processes(size: int, group: int, fan_out: int) -> Iterator[list["subprocess.Popen[str]"]]:
    """A tree of as many processes; all have joined."""
    script, port = Path(__file__).parent / "scripts" / "tree_node.py", free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, (rank, size, group, fan_out, port))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            assert process.stdout.readline() == f"{rank} joined\n"
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("voted", [True, False], ids=["after its vote", "before its vote"])
def test_kill_9_of_an_inner_node(voted: bool) -> None:
    """Rank 2 has rank 3 of its host and the hosts of 4, 6 and 8 below it. What they have said is lost with it, or has been passed
    on as theirs; nobody speaks for it, and its death reaches everybody."""
    with processes(10, group=2, fan_out=1) as ranks:
        root, inner = ranks[0], ranks[2]
        assert root.stdin is not None
        assert root.stdout is not None
        root.stdin.write("vote 1\n")
        root.stdin.flush()
        assert [root.stdout.readline() for _ in range(2)] == ["0 voted 1\n", "0 all 1\n"]
        root.stdin.write(f"vote 2 {1 if voted else 2}\n")
        root.stdin.flush()
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            said = "asked 2" if rank == (1 if voted else 2) else "voted 2"
            lines = [process.stdout.readline() for _ in range(1 if rank == 0 else 2)]
            assert lines[-1] == f"{rank} {said}\n"
        inner.kill()
        rest = {rank: process.communicate(timeout=60)[0] for rank, process in enumerate(ranks) if rank != 2}
        assert rest[0] == "0 lost 2\n", "and not all have voted"
        assert {process.wait(60) for process in ranks if process is not inner} == {7}
        assert rest[3] == "3 lost 2\n"
        assert rest[4] == "4 lost 2\n"
        assert rest[8] == "8 lost 6\n"


def test_a_frozen_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "TICK_S", 0.02)

    async def body(nodes: list[Node]) -> None:
        for task in list(nodes[1].tree._tasks):
            task.cancel()  # it does not tick any more, but its connection stays open
        await nodes[0].until(lambda: bool(nodes[0].lost))
        assert "silent" in nodes[0].lost[0][1]

    with_tree(2, body)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"token": b"other"}, "token"),
        ({"incarnation": "old"}, "does not belong"),
        ({"rank": 1}, "already"),
        ({"group": 3}, "KEEPSTEP_RANKS_PER_HOST"),
    ],
)
def test_whoever_does_not_belong_is_refused(changes: dict[str, Any], sentence: str) -> None:
    async def run() -> None:
        port = free_port()
        nodes = [Node(0, 3, port), Node(1, 3, port)]
        odd = Node(changes.get("rank", 2), 3, port, **{k: v for k, v in changes.items() if k != "rank"})
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
            root.tree.broadcast(b"the job is over")
            await late.tree.start(5)
            await late.until(lambda: bool(late.down))
            assert late.down == [(b"the job is over", b"")]
        finally:
            await asyncio.gather(root.tree.close(), late.tree.close())

    asyncio.run(run())


def test_garbage_hurts_nobody() -> None:
    async def body(nodes: list[Node]) -> None:
        assert nodes[0].tree._doorkeeper is not None
        port = nodes[0].tree._doorkeeper.port
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff" + b"x" * 100, b"\x02\x00\x00\x00{}"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(garbage)
            writer.close()
        nodes[0].tree.broadcast(b"still here")
        await nodes[1].until(lambda: bool(nodes[1].down))

    with_tree(2, body)
