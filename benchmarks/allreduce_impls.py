"""What sums buffers in `allreduce.py`: gloo, torchft's gloo group, keepstep over TCP and shared memory, and pypccl.

    open ──> member() of everybody ──> configure(members, position, generation) ──> exchange(buffers) ...

Used inside a rank process. gloo and torchft work in place, on `buffers.target`, which is filled anew before each round;
keepstep and pypccl read `buffers.source` and write `buffers.target`.
"""

import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from keepstep.protocol.ids import Incarnation, QuorumId, Rank, ReplicaId, Seq
from keepstep.protocol.messages import Endpoint, Peer
from keepstep.runtime import native
from keepstep.runtime.engine import Engine
from keepstep.runtime.engine_events import EngineEvent, EngineSettings, RingReady, StepDone, StepFailed
from keepstep.runtime.handshake import Identity
from keepstep.runtime.links import LinkSettings
from keepstep.training.buckets import FlatBuffer

TIMEOUT = timedelta(seconds=60)
PATTERN = 13 * 4096  # elements after which the inputs repeat
Member = dict[str, Any]


class ExchangeFailed(Exception):
    """A member is gone; `at` is when we were told."""

    def __init__(self, reason: str, suspect: int | None = None, phase: str = "") -> None:
        super().__init__(reason)
        self.suspect, self.phase, self.at = suspect, phase, time.monotonic()


class Buffers:
    """An input of small integers, different on each rank, and a place for the sum. Sizes share one allocation."""

    def __init__(self, rank: int, nbytes_max: int) -> None:
        self._all = [torch.empty(nbytes_max // 4) for _ in range(2)]
        self._pattern = torch.arange(PATTERN).remainder(13).to(torch.float32)
        self.rank = rank

    def resize(self, nbytes: int) -> None:
        self.source, self.target = (whole[: nbytes // 4] for whole in self._all)
        for lo, part in self._parts(self.source):
            part.copy_(self._pattern[: len(part)]).add_(self.rank)
            self.target[lo : lo + len(part)].zero_()
        self.flat = FlatBuffer(self.source, self.target)

    def refill(self) -> None:
        self.target.copy_(self.source)

    def is_sum_of(self, ranks: list[int]) -> bool:
        expected = self._pattern * len(ranks) + sum(ranks)
        return all(torch.equal(part, expected[: len(part)]) for _, part in self._parts(self.target))

    @staticmethod
    def _parts(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        return [(lo, tensor[lo : lo + PATTERN]) for lo in range(0, len(tensor), PATTERN)]


class Impl:
    """One way to sum, on one rank."""

    def __init__(self, rank: int, life: int, host: str, congestion: str, settings: dict[str, Any]) -> None:
        self.rank, self.life, self.host, self.congestion, self.settings = rank, life, host, congestion, settings
        self.open()

    in_place = False
    moves_whole_buffers = False  # a sum moves 2(N-1)/N of them

    def open(self) -> None: ...

    def port(self) -> int:
        """What the others must know to connect."""
        return 0

    def configure(self, members: list[Member], position: int, generation: int) -> None:
        """Returns when connected."""
        raise NotImplementedError

    def exchange(self, buffers: Buffers) -> None:
        """Returns when the sum is in `buffers.target`."""
        raise NotImplementedError

    def result(self, members: list[int]) -> list[int]:
        """Whose inputs are in the target then."""
        return members


class Store(Impl):
    """Each rank keeps a store, of which that of the first member is used."""

    in_place = True

    def open(self) -> None:
        self.store = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)

    def port(self) -> int:
        return int(self.store.port)


class Gloo(Store):
    """`torch.distributed`, as DDP uses it. Cannot change its members."""

    def configure(self, members: list[Member], position: int, generation: int) -> None:
        if not dist.is_initialized():
            first, size = members[0], len(members)
            store = self.store if position == 0 else dist.TCPStore(first["host"], first["port"], timeout=TIMEOUT)
            dist.init_process_group("gloo", store=store, rank=position, world_size=size, timeout=TIMEOUT)
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def exchange(self, buffers: Buffers) -> None:
        dist.all_reduce(buffers.target, group=self.group)


class Torchft(Store):
    """torchft's reconfigurable gloo group, without its manager."""

    def open(self) -> None:
        super().open()
        from torchft.process_group import ProcessGroupGloo

        self.group = ProcessGroupGloo(timeout=TIMEOUT)

    def configure(self, members: list[Member], position: int, generation: int) -> None:
        store = f"{members[0]['host']}:{members[0]['port']}/{self.congestion}/{generation}"
        self.group.configure(store, f"replica{self.rank}", position, len(members), quorum_id=generation)

    def exchange(self, buffers: Buffers) -> None:
        try:
            self.group.allreduce([buffers.target], dist.AllreduceOptions()).wait()
        except RuntimeError as error:
            raise ExchangeFailed(str(error)) from error


# --- keepstep: this function is all that depends on how an engine is made -------------------------------------------


def has_shared_memory() -> bool:
    return "shared_memory" in {f.name for f in dataclasses.fields(LinkSettings)}


def make_engine(
    kind: str, *, rank: int, life: int, host: str, on_event: Callable[[EngineEvent], None], congestion: str = "",
    socket_buffer: int = 0, window: int = 0, silent_s: float = 0.0, native: bool = True,
) -> Engine:  # fmt: skip
    """An engine whose links are `kind` "tcp" or "shm", moved in C or in Python; what is not given keeps its default."""
    link: dict[str, Any] = {"shared_memory": kind == "shm"} if has_shared_memory() else {}
    link |= {"congestion": congestion} if congestion else {}
    link |= {"socket_buffer": socket_buffer} if socket_buffer else {}
    link |= {"silent_s": silent_s} if silent_s else {}
    settings = EngineSettings(native=native, link=LinkSettings(**link), **({"window": window} if window else {}))
    me = Identity(
        job="bench", token=b"bench", replica_id=ReplicaId(rank), incarnation=Incarnation(f"{rank}-{life}"), rank=Rank(0),
        layout_digest="same",
    )  # fmt: skip
    return Engine(me, host=host, settings=settings, on_event=on_event)


class Keepstep(Impl):
    """`keepstep.runtime.engine.Engine`, one exchange a decision."""

    kind = "tcp"
    native = True

    def open(self) -> None:
        self.events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self.engine = make_engine(
            self.kind, rank=self.rank, life=self.life, host=self.host, on_event=self.events.put,
            congestion=self.congestion, native=self.native,
            **self.settings,
        )  # fmt: skip

    def port(self) -> int:
        return self.engine.port

    def configure(self, members: list[Member], position: int, generation: int) -> None:
        peers = [
            Peer(
                replica_id=ReplicaId(m["rank"]),
                incarnation=Incarnation(f"{m['rank']}-{m['life']}"),
                endpoint=Endpoint(host=m["host"], ftar_port=m["port"], state_port=1),
            )
            for m in members
        ]
        self.quorum, self.seq = QuorumId(generation), generation << 20
        self.engine.configure(self.quorum, peers, position)
        while True:
            event = self.events.get(timeout=60)
            if isinstance(event, RingReady) and event.quorum_id == self.quorum:
                return

    def exchange(self, buffers: Buffers) -> None:
        self.seq += 1
        self.engine.begin(Seq(self.seq), self.quorum, 1)
        self.engine.submit(Seq(self.seq), 0, buffers.flat)
        while True:
            match self.events.get(timeout=120):
                case StepDone(seq) if seq == self.seq:
                    return
                case StepFailed() as failed if failed.seq == self.seq:
                    raise ExchangeFailed(failed.reason, failed.suspect, failed.phase)


class KeepstepShm(Keepstep):
    kind = "shm"


class KeepstepInPython(Keepstep):
    native = False


class KeepstepShmInPython(KeepstepShm):
    native = False


class Pccl(Impl):
    """Where it loads: Python 3.12, glibc >= 2.38 and libcuda.so.1. Its master runs in the first rank."""

    def open(self) -> None:
        import pccl

        with socket.create_server((self.host, 0)) as probe:
            self._port = int(probe.getsockname()[1])
        if self.rank == 0:
            self.master = pccl.MasterNode(listen_address=f"{self.host}:{self._port}")
            threading.Thread(target=self.master.run, daemon=True).start()

    def port(self) -> int:
        return self._port

    def configure(self, members: list[Member], position: int, generation: int) -> None:
        import pccl

        self.group = pccl.Communicator(f"{members[0]['host']}:{members[0]['port']}", 0)
        self.group.connect(n_attempts=15)
        while self.group.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < len(members):
            self.group.update_topology()

    def exchange(self, buffers: Buffers) -> None:
        import pccl

        self.group.all_reduce(buffers.source, buffers.target, op=pccl.ReduceOp.SUM)


class Bound(Impl):
    """No sum: each rank sends its input to the next one through a plain socket. What bounds a sum over TCP."""

    moves_whole_buffers = True

    def open(self) -> None:
        self.server = socket.socket()
        self._tune(self.server)
        self.server.bind((self.host, 0))
        self.server.listen()
        self.jobs: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[None] = queue.SimpleQueue()

    def port(self) -> int:
        return int(self.server.getsockname()[1])

    def configure(self, members: list[Member], position: int, generation: int) -> None:
        to = members[(position + 1) % len(members)]
        self.to_next = socket.socket()
        self._tune(self.to_next)
        self.to_next.connect((to["host"], to["port"]))
        self.from_previous = self.server.accept()[0]
        self.previous: int = members[position - 1]["rank"]
        threading.Thread(target=self._send, daemon=True).start()

    @staticmethod
    def _tune(sock: socket.socket) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 512 << 10)

    def _send(self) -> None:
        while True:
            self.to_next.sendall(self.jobs.get())
            self.sent.put(None)

    def exchange(self, buffers: Buffers) -> None:
        self.jobs.put(buffers.flat.input(0, buffers.flat.nbytes))
        at, target = 0, buffers.flat.output(0, buffers.flat.nbytes)
        while at < len(target):
            at += self.from_previous.recv_into(target[at : at + (1 << 20)], 0, socket.MSG_WAITALL)
        self.sent.get()

    def result(self, members: list[int]) -> list[int]:
        return [self.previous]


IMPLS: dict[str, type[Impl]] = {
    "bound": Bound,
    "gloo": Gloo,
    "torchft": Torchft,
    "keepstep-tcp": Keepstep,
    "keepstep-shm": KeepstepShm,
    "keepstep-tcp-py": KeepstepInPython,
    "keepstep-shm-py": KeepstepShmInPython,
    "pypccl": Pccl,
}


def why_not(name: str) -> str:
    """Why this implementation cannot run here; empty if it can."""
    if name.startswith("keepstep-shm") and not has_shared_memory():
        return "this version of keepstep has no shared-memory links"
    try:
        if name.startswith("keepstep") and not name.endswith("-py") and native.library() is None:
            return "the part in C was not built (make setup, with a C compiler)"
        if name == "torchft":
            import torchft.process_group  # noqa: F401
        if name == "pypccl":
            import pccl  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        return f"does not load here ({type(error).__name__}: {error})"
    return ""
