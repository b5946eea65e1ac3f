"""FTARProcessGroup on real processes: every operation, every dtype, and what becomes of the group when members die."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crew import Crew, Failure
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp

from keepstep import FTARProcessGroup
from keepstep.protocol.errors import ConfigError, ExchangeError
from keepstep.runtime.engine_events import EngineSettings

SIZES = (0, 1, 3, 7, 1000, 300_001)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew(3)
    made.configure()
    yield made
    made.close()


@pytest.fixture
def mortals() -> Iterator[Crew]:
    """A crew whose members may be killed."""
    made = Crew(4)
    made.configure()
    yield made
    made.close()


def tensors_of(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    return [torch.randint(0, 50, (n,)).to(dtype) for n in SIZES]


def bits(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


def reduce(pg: FTARProcessGroup, op: str, dtype: torch.dtype, bare: bool) -> bytes:
    mine = tensors_of(pg.rank(), dtype)
    opts: Any = getattr(ReduceOp, op)
    if not bare:
        opts = dist.AllreduceOptions()
        opts.reduceOp = getattr(ReduceOp, op)
    works = [pg.allreduce([t], opts) for t in mine]
    assert all(work.wait() for work in works)
    assert all(work.is_success() for work in works)
    assert works[3].get_future().value()[0].equal(mine[3])
    return bits(mine)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX", "MIN"])
def test_reductions(crew: Crew, op: str, dtype: torch.dtype) -> None:
    if op == "AVG" and not dtype.is_floating_point:
        with pytest.raises(Failure, match="does not support the average of"):
            crew.all(reduce, op, dtype, True)
        return
    inputs = [torch.stack(each) for each in zip(*(tensors_of(r, dtype) for r in range(3)), strict=True)]
    match op:  # small whole numbers: every order of additions is exact
        case "SUM":
            expected = [x.sum(0).to(dtype) for x in inputs]
        case "AVG":
            expected = [x.sum(0).to(dtype) / 3 for x in inputs]
        case "MAX":
            expected = [x.max(0).values for x in inputs]
        case _:
            expected = [x.min(0).values for x in inputs]
    got = crew.all(reduce, op, dtype, op == "MAX")
    assert got == [bits(expected)] * 3


def random_sum(pg: FTARProcessGroup, together: bool) -> bytes:
    torch.manual_seed(pg.rank())
    mine = [torch.randn(n) for n in (5, 100, 70_000, 12, 1, 300_000)]
    if together:
        pg.allreduce_coalesced(mine, dist.AllreduceCoalescedOptions()).wait()
    else:
        for t in mine:
            pg.allreduce([t]).wait()
    return bits(mine)


def test_all_members_and_every_run_have_the_same_bits(crew: Crew) -> None:
    first, second = crew.all(random_sum, True), crew.all(random_sum, True)
    assert len({*first, *second}) == 1
    assert len(set(crew.all(random_sum, False))) == 1


def odd_bits(rank: int) -> torch.Tensor:
    """NaNs with payloads, -0.0, denormals: bytes that must survive."""
    torch.manual_seed(rank)
    return torch.randint(0, 256, (4 * 1001,), dtype=torch.uint8).view(torch.float32)


def in_order(pg: FTARProcessGroup) -> list[bool]:
    """Whether the future is complete when `wait` returns, and `wait` returns in one of its callbacks."""
    said = []
    for _ in range(200):
        work = pg.allreduce([torch.ones(10)])
        work.get_future().then(lambda _, work=work: said.append(work.wait()))
        work.wait()
        said.append(work.get_future().done())
    return said


def test_the_future_is_complete_when_wait_returns(crew: Crew) -> None:
    assert crew.all(in_order) == [[True] * 400] * 3


def others(pg: FTARProcessGroup) -> dict[str, Any]:
    rank, size = pg.rank(), pg.size()
    sent = odd_bits(rank)
    opts = dist.BroadcastOptions()
    opts.rootRank = 2
    pg.broadcast([sent], opts).wait()
    outs = [torch.empty(1001) for _ in range(size)]
    pg.allgather([outs], [odd_bits(rank)], AllgatherOptions()).wait()
    flat = torch.empty(size * 1001)
    pg._allgather_base(flat, odd_bits(rank)).wait()
    pg.barrier(dist.BarrierOptions()).wait()
    nothing = pg.allreduce([]).wait()
    return {"broadcast": bits([sent]), "allgather": bits(outs), "flat": bits([flat]), "nothing": nothing}


def test_broadcast_allgather_and_barrier_keep_every_bit(crew: Crew) -> None:
    everything = bits([odd_bits(r) for r in range(3)])
    expected = {"broadcast": bits([odd_bits(2)]), "allgather": everything, "flat": everything, "nothing": True}
    assert crew.all(others) == [expected] * 3


def around(pg: FTARProcessGroup) -> list[float]:
    """Each sends two tensors to the next and receives two from the previous, asynchronously."""
    rank, size = pg.rank(), pg.size()
    mine = [torch.full((50_000,), float(rank)), torch.full((3,), rank + 0.5)]
    got = [torch.empty(50_000), torch.empty(3)]
    works = [pg.send([mine[i]], (rank + 1) % size, i) for i in range(2)]
    works += [pg.recv([got[i]], (rank - 1) % size, i) for i in range(2)]
    assert all(work.wait() for work in works)
    return [t.unique().item() for t in got]


def test_send_and_receive(crew: Crew) -> None:
    for _ in range(2):
        assert crew.all(around) == [[2.0, 2.5], [0.0, 0.5], [1.0, 1.5]]


def refusals(pg: FTARProcessGroup) -> list[str]:
    one = torch.ones(4)
    calls = {
        "contiguous": lambda: pg.allreduce([torch.ones(4, 4).t()]),
        "sparse": lambda: pg.allreduce([torch.ones(4).to_sparse()]),
        "complex": lambda: pg.allreduce([torch.ones(4, dtype=torch.complex64)]),
        "bool": lambda: pg.allreduce([torch.ones(4, dtype=torch.bool)]),
        "device": lambda: pg.allreduce([torch.ones(4, device="meta")]),
        "product": lambda: pg.allreduce([one], ReduceOp.PRODUCT),
        "scatter": lambda: pg.scatter([one], [[one]]),
        "reduce_scatter": lambda: pg.reduce_scatter([one], [[one]]),
        "outputs": lambda: pg.allgather([[one]], [one]),
    }
    said = []
    for call in calls.values():
        try:
            call()
        except (RuntimeError, ConfigError) as error:
            said.append(str(error))
    assert pg.errored() is None
    return said


def test_what_is_not_supported_is_said_and_harms_nothing(crew: Crew) -> None:
    said = crew.all(refusals)[0]
    for text, expected in zip(said, [
        "not contiguous", "does not support sparse", "does not support sparse", "does not support reductions of torch.bool",
        "does not support tensors on meta", "does not support", "FTARProcessGroup does not support scatter",
        "FTARProcessGroup does not support reduce_scatter", "needs 3 outputs",
    ], strict=True):  # fmt: skip
        assert expected in text
    assert len(set(crew.all(random_sum, False))) == 1


# --- when something goes wrong --------------------------------------------------------------------------------------


def big_sum(pg: FTARProcessGroup) -> float:
    t = torch.ones(8 << 20)
    pg.allreduce([t]).wait()
    return t[-1].item()


def failing(pg: FTARProcessGroup) -> dict[str, Any]:
    """Operations until one fails; how all of that looks."""
    with pytest.raises(ExchangeError) as caught:  # noqa: PT012
        while True:
            big_sum(pg)
    later = pg.allreduce([torch.ones(3)])
    with pytest.raises(ExchangeError) as again:
        later.wait()
    future = later.get_future()
    assert future.done(), "the future of a failed operation must be set"
    with pytest.raises(Exception, match="ring"):
        future.wait()
    assert pg.errored() is caught.value is again.value
    return {"suspect": caught.value.suspect, "text": str(caught.value)}


def test_a_killed_member_is_named_and_the_others_go_on(mortals: Crew) -> None:
    victim, survivors = mortals.members[2], [m for m in mortals.members if m.number != 2]
    mortals.all(big_sum)
    for member in mortals.members:
        member.start(failing)
    assert not victim._connection.poll(0.3), "nothing has failed yet"
    victim.kill()
    for member in survivors:
        said = member.end()
        assert (said["suspect"], "rank 2 (member-" in said["text"]) == (2, True), said
    mortals.configure(survivors)
    assert mortals.all(big_sum, members=survivors) == [3.0] * 3


def test_a_frozen_member_is_named_and_may_come_back(mortals: Crew) -> None:
    frozen, others_ = mortals.members[1], [m for m in mortals.members if m.number != 1]
    mortals.all(big_sum)
    for member in mortals.members:
        member.start(failing)
    assert not frozen._connection.poll(0.3), "nothing has failed yet"
    os.kill(frozen.process.pid or 0, signal.SIGSTOP)
    try:
        assert {member.end()["suspect"] for member in others_} == {1}
        mortals.configure(others_)
        assert mortals.all(big_sum, members=others_) == [3.0] * 3
    finally:
        os.kill(frozen.process.pid or 0, signal.SIGCONT)
    frozen.end()
    mortals.configure()
    assert mortals.all(big_sum) == [4.0] * 4


def resources(pg: FTARProcessGroup) -> tuple[int, int]:
    """Descriptors and threads, once what has ended is gone."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(t.name == "keepstep-hello" for t in threading.enumerate()):
        pg.barrier().wait(timedelta(seconds=5))
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_fifty_memberships_leave_nothing_behind(mortals: Crew) -> None:
    m = mortals.members
    mortals.all(around)
    before = mortals.all(resources)
    for turn in range(50):
        now = [m[(turn + i) % 4] for i in range(2 + turn % 3)]
        mortals.configure(now)
        assert mortals.all(random_sum, False, members=now)
    mortals.configure()
    mortals.all(around)
    for (files, threads), (files_before, threads_before) in zip(mortals.all(resources), before, strict=True):
        assert files <= files_before + 2
        assert threads <= threads_before


def abort_soon(pg: FTARProcessGroup) -> str:
    work = pg.allreduce([torch.ones(1000)])  # nobody else takes part
    threading.Timer(0.1, pg.abort).start()
    with pytest.raises(ExchangeError) as caught:
        work.wait()
    return str(caught.value)


def test_abort_from_another_thread_ends_waiting_and_the_group_can_be_formed_again(mortals: Crew) -> None:
    mortals.members[0].start(abort_soon)
    assert "aborted" in mortals.members[0].end()
    mortals.configure()
    assert mortals.all(big_sum) == [4.0] * 4


def impatient(pg: FTARProcessGroup) -> str:
    with pytest.raises(ExchangeError) as caught:
        pg.allreduce([torch.ones(1000)]).wait(timedelta(seconds=0.2))
    return str(caught.value)


def lonely(pg: FTARProcessGroup) -> str:
    pg.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(RuntimeError):  # a future's errors are native: without their type
        pg.allreduce([torch.ones(1000)]).get_future().wait()
    pg.set_timeout(timedelta(seconds=10))
    return str(pg.errored())


def test_waiting_ends_when_a_member_never_comes(mortals: Crew) -> None:
    """By the time that `wait` is given; and without any `wait`, as under DDP, by the group's own."""
    a = mortals.members[0]
    a.start(impatient)
    assert "not complete after 0.2 s" in a.end()
    mortals.configure()
    a.start(lonely)
    assert "has sent nothing for 0.5 s" in a.end()


def dead_letter(pg: FTARProcessGroup, to: int) -> str:
    pg.set_timeout(timedelta(seconds=3))
    with pytest.raises(ExchangeError) as caught:
        pg.recv([torch.ones(4)], to).wait()
    return f"{caught.value.suspect}: {caught.value}"


def wrong_tag(pg: FTARProcessGroup) -> str:
    if pg.rank() == 0:
        pg.send([torch.ones(4)], 1, tag=7).wait()
        return ""
    with pytest.raises(ExchangeError) as caught:
        pg.recv([torch.ones(4)], 0, tag=8).wait()
    return str(caught.value)


def test_receiving_what_does_not_come_or_does_not_fit(mortals: Crew) -> None:
    said = mortals.all(wrong_tag, members=mortals.members[:2])
    assert "16 bytes with tag 7; expected 16 bytes with tag 8" in said[1]
    mortals.members[0].start(dead_letter, 3)
    mortals.members[3].kill()
    assert "rank 3" in mortals.members[0].end()


def test_a_wrong_token_and_other_settings_are_refused_in_words() -> None:
    other = replace(EngineSettings(), chunk_bytes=1 << 18)
    for options, expected in (
        ({"tokens": ["a", "b"]}, "token"),
        ({"settings": [None, other]}, "different EngineSettings"),
    ):
        crew = Crew(2, **options)  # type: ignore[arg-type]
        try:
            with pytest.raises(Failure, match=expected):
                crew.configure()
        finally:
            crew.close()


def test_before_configure_and_with_bad_ranks() -> None:
    pg = FTARProcessGroup()
    with pytest.raises(ConfigError, match="call configure"):
        pg.allreduce([torch.ones(1)]).wait()
    with pytest.raises(ConfigError, match="rank must be between"):
        pg.configure("127.0.0.1:1/x", "r", 2, 2)
    pg.set_timeout(timedelta(seconds=1))
    with pytest.raises(ExchangeError, match="did not meet"):
        pg.configure("127.0.0.1:1/x", "r", 0, 2)
    pg.shutdown()


def test_a_token_is_needed_where_others_can_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPSTEP_TOKEN", raising=False)
    monkeypatch.delenv("KEEPSTEP_TOKEN_FILE", raising=False)
    with pytest.raises(ConfigError, match="set KEEPSTEP_TOKEN"):
        FTARProcessGroup(host="0.0.0.0").get_reconfigure_handle()
    for pg in (FTARProcessGroup(host="0.0.0.0", token="t"), FTARProcessGroup(host="127.0.0.1")):
        assert pg.get_reconfigure_handle()
        pg.shutdown()


def alone(pg: FTARProcessGroup) -> list[float]:
    t = torch.tensor([3.0])
    pg.allreduce([t], ReduceOp.AVG).wait()
    pg.broadcast([t], 0).wait()
    outs = [torch.zeros(1)]
    pg.allgather([outs], [t]).wait()
    return [t.item(), outs[0].item()]


def test_a_group_of_one(mortals: Crew) -> None:
    mortals.configure(mortals.members[:1])
    assert mortals.all(alone, members=mortals.members[:1]) == [[3.0, 3.0]]


# --- c10d's own contract (torch 2.14 and later calls these; the methods are the same before) -------------------------


def handle(pg: FTARProcessGroup) -> str:
    assert pg.supports_reconfigure
    return pg.get_reconfigure_handle()


def reconfigure(pg: FTARProcessGroup, uuid: int, handles: Any) -> list[Any]:
    """Through torch's function where it has one; the members' ranks, and a sum over them."""
    timeout = timedelta(seconds=10)
    if hasattr(dist, "_reconfigure"):
        work = dist._reconfigure(uuid, handles, group=pg, timeout=timeout)
    else:
        work = pg.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={}))
    assert work.wait()
    t = torch.full((1000,), float(1 << pg.rank()))
    pg.allreduce([t]).wait()
    return [pg.rank(), pg.size(), t[0].item()]


def check_group(crew: Crew, uuid: int, numbers: list[int], handles: list[str]) -> None:
    members = [crew.members[n] for n in numbers]
    got = crew.all(reconfigure, uuid, [handles[n] for n in numbers], members=members)
    assert got == [[rank, len(numbers), float((1 << len(numbers)) - 1)] for rank in range(len(numbers))]


def test_reconfigure_shrinks_grows_splits_merges_and_reorders() -> None:
    crew = Crew(4, tokens=["t"] * 4)
    try:
        handles = crew.all(handle)
        uuids = iter([1 << 62, 5, 123456789, 7, 8, 9, 10, 11, 12, 13])  # new ones, in no order
        for numbers in (
            [0, 1, 2, 3],  # first
            [0, 1, 2, 3],  # identity
            [0, 1, 2],  # shrink: the last
            [0, 2],  # shrink: the middle
            [0, 2, 1, 3],  # grow, late join
            [3, 1],  # split
            [0, 2],  # and the other half
            [3, 1, 0, 2],  # merge, ranks by order of handles
        ):
            check_group(crew, next(uuids), numbers, handles)
        with pytest.raises(Failure, match="RuntimeError: uuid 5 was already used"):
            crew.all(reconfigure, 5, handles)
        crew.members[0].start(abort_soon)
        crew.members[0].end()
        check_group(crew, next(uuids), [0, 1, 2, 3], handles)  # after abort
        ranks = [got[0] for got in crew.all(reconfigure, next(uuids), set(handles))]
        assert sorted(ranks) == [0, 1, 2, 3], "a set lets us choose"
    finally:
        crew.close()


def test_reconfigure_refuses_what_cannot_be() -> None:
    crew = Crew(2, tokens=["t"] * 2)
    try:
        first, second = crew.all(handle)
        for handles, expected in (
            ([second], "own exactly once"), ([first, first], "own exactly once"),
            (["{}"], "is not one of"), (["x"], "is not one of"), (["[" * 5000], "is not one of"),
            ([first.replace('"port":', '"port":9')], "ports lie between"),
            ([first.replace('"host":"', '"host":"a..b')], "is not one of"),
        ):  # fmt: skip
            crew.members[0].start(reconfigure, 1, handles)
            with pytest.raises(Failure, match=expected):
                crew.members[0].end()
        check_group(crew, 1, [0, 1], [first, second])
    finally:
        crew.close()
