"""FTARProcessGroup under code that is not ours: stock DistributedDataParallel, torch.distributed, torchft's Manager."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crew import Crew
from test_process_group import bits

from keepstep import FTARProcessGroup


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew(3)
    made.configure()
    yield made
    made.close()


def model_of() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [
        torch.nn.Linear(20, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 1),
    ]
    return torch.nn.Sequential(*layers)


def train(model: torch.nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(16, 20)).pow(2).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def both(pg: FTARProcessGroup) -> tuple[bytes, bool]:
    """The same training under DDP on our group and on gloo: our parameters' bits, and whether they are close."""
    wrap = torch.nn.parallel.DistributedDataParallel
    ours = train(wrap(model_of(), process_group=pg, bucket_cap_mb=0.01), pg.rank())  # type: ignore[arg-type]
    host, port = pg.test_address.rsplit(":", 1)  # type: ignore[attr-defined]
    store = dist.PrefixStore("gloo", dist.TCPStore(host, int(port), is_master=False))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=pg.rank(), world_size=pg.size())
    theirs = train(wrap(model_of(), bucket_cap_mb=0.01), pg.rank())
    dist.destroy_process_group()
    return bits(ours), all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_stock_ddp_trains_as_on_gloo_and_stays_equal_bit_for_bit(crew: Crew) -> None:
    results = crew.all(both)
    assert [close for _, close in results] == [True] * 3
    assert len({parameters for parameters, _ in results}) == 1


def functions(pg: FTARProcessGroup) -> list[Any]:
    """torch.distributed's functions, with `group=`."""
    total, root, rank = torch.tensor([float(pg.rank())]), torch.tensor([pg.rank()]), pg.rank()
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # the functions ask for a default group
    dist.all_reduce(total, group=pg)
    handle = dist.all_reduce(total, op=dist.ReduceOp.AVG, group=pg, async_op=True)
    handle.wait()
    pg.broadcast_one(root, 1).wait()
    gathered = [torch.zeros(1) for _ in range(pg.size())]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=pg)
    dist.barrier(group=pg)
    dist.destroy_process_group()
    return [total.item(), root.item(), [t.item() for t in gathered]]


def test_torch_distributed_functions(crew: Crew) -> None:
    assert crew.all(functions) == [[3.0, 1, [0.0, 1.0, 2.0]]] * 3


REPLICA = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torchft.manager import Manager
import keepstep

class Mortal(keepstep.FTARProcessGroup):
    # Dies in the middle of an all-reduce, when it is told to: its part is under way, and not complete.
    def allreduce(self, tensors, opts=dist.ReduceOp.SUM):
        work = super().allreduce(tensors, opts)
        if os.path.exists(sys.argv[2]) and tensors[0].numel() > 1000:
            os.kill(os.getpid(), 9)
        return work

torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 500_000), torch.nn.ReLU(), torch.nn.Linear(500_000, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)  # small: a wide model soon has NaN otherwise

def load(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=Mortal(timedelta(seconds=20)),
    load_state_dict=load, min_replica_size=1, rank=0, world_size=1,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1", replica_id=f"replica{sys.argv[1]}-",
    timeout=timedelta(seconds=20), heartbeat_interval=timedelta(milliseconds=100),
)
while True:
    manager.start_quorum()
    optimizer.zero_grad()
    model(torch.randn(8, 20)).pow(2).mean().backward()
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    manager.allreduce(flat).wait()
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.grad.copy_(part.view_as(p))
    committed = manager.should_commit()
    if committed:
        optimizer.step()
    digest = float(sum(p.double().sum() for p in model.parameters()))
    print(json.dumps([manager.current_step(), manager.num_participants(), committed, digest]), flush=True)
"""


def next_line(process: "subprocess.Popen[str]") -> list[Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the replica has ended"
    return list(json.loads(line))


@pytest.mark.timeout(120)
def test_torchft_trains_on_it_and_goes_on_when_a_replica_is_killed(tmp_path: Path) -> None:
    """Its Manager, and a death in the middle of an all-reduce.

    Not its DDP wrapper: after a failed bucket that asks the next one, which is a dummy, for something dummies do not have.
    """
    pytest.importorskip("torchft", reason="torchft is not installed (make setup-bench)")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1000)
    port = lighthouse.address().rsplit(":", 1)[1]
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    die = tmp_path / "die"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", REPLICA, str(r), str(die if r == 1 else tmp_path / "never")],
            stdout=subprocess.PIPE, text=True, env=environment,
            stderr=(tmp_path / f"{r}.log").open("w"),
        )
        for r in range(2)
    ]  # fmt: skip
    try:
        survivor, victim = processes
        deadline, together = time.monotonic() + 60, dict[int, float]()
        while len(together) < 3:
            step, participants, committed, digest = next_line(survivor)
            if participants == 2 and committed:
                together[step] = digest
            assert time.monotonic() < deadline, "the replicas have not found each other"
        compared = 0
        while compared < 2:
            step, _, committed, digest = next_line(victim)
            if committed and step in together:
                assert digest == together[step], "the replicas differ"
                compared += 1
        die.touch()
        while (line := next_line(survivor))[1] == 2:
            pass
        assert line[1] == 1
        first = line[0]
        for _ in range(5):
            line = next_line(survivor)
        assert line[2]
        assert line[0] >= first + 4, "it does not commit any more"
        assert victim.wait(10) == -9
        assert "replica" in (tmp_path / "0.log").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        lighthouse.shutdown()
