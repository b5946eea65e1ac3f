"""One rank of a control tree, in a process of its own: RANK SIZE GROUP FAN_OUT PORT. Ends with 7 when a neighbour is lost.

What comes down as `vote N` it votes on, unless the message also names it: then it says "asked" and doesn't vote.
"""

import asyncio
import os
import sys

from keepstep.protocol.together import VOTED
from keepstep.runtime.tree import ControlTree
from keepstep.runtime.tree_shape import TreeShape

rank, size, group, fan_out, port = map(int, sys.argv[1:])


def say(what: str) -> None:
    print(f"{rank} {what}", flush=True)


async def main() -> None:
    lost = asyncio.Event()

    def on_down(common: bytes, _: bytes) -> None:
        seq, *silent = map(int, common.split()[1:])
        if rank in silent:
            say(f"asked {seq}")
        else:
            tree.say_together(VOTED, seq, True)
            say(f"voted {seq}")

    def on_lost(peer: int, reason: str) -> None:
        say(f"lost {peer}")
        lost.set()

    tree = ControlTree(
        rank=rank, shape=TreeShape(size=size, group=group, fan_out=fan_out), token=b"t", job="j", incarnation="i",
        host="127.0.0.1", leader_address=("127.0.0.1", port), listen_fd=None, welcome=b"", on_down=on_down,
        on_up=lambda *_: None, on_together=lambda topic, seq, agreed: say(f"all {seq}"), on_lost=on_lost,
    )  # fmt: skip
    await tree.start(60)
    say("joined")
    if rank == 0:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            tree.broadcast(line.strip())
    await lost.wait()
    os._exit(7)  # as a rank without its replica ends: it closes nothing


asyncio.run(main())
