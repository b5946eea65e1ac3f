"""Optimizer state in host memory: the same bits, a bounded part on the device, and no wait missing."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from races import Race, RaceFinder
from storage_meter import StorageMeter
from test_state import Replica, fetch, name, reader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from keepstep.protocol.errors import ConfigError
from keepstep.training.offload import Offload
from keepstep.training.state import TrainingState

MB = 1 << 20
Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "AdamW amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "SGD momentum": partial(torch.optim.SGD, momentum=0.9),
    "SGD momentum foreach": partial(torch.optim.SGD, momentum=0.9, foreach=True),
    "SGD momentum fused": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "SGD": torch.optim.SGD,  # has no state
    "Adagrad": torch.optim.Adagrad,  # has its state before the first step
    "Adafactor": torch.optim.Adafactor,  # keeps rows and columns
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
}


def model_of(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(33, 70), torch.nn.LayerNorm(70), torch.nn.Linear(70, 1), torch.nn.Linear(1, 9).to(torch.float64)
    )


def groups_of(model: torch.nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters()), "lr": 0.02}, {"params": list(model[1:].parameters())}]


def give_gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, p in enumerate(model.parameters()):
        p.grad = None if index == 3 and step % 2 else torch.randn(p.shape, generator=generator).to(p.dtype)


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return TrainingState(model, optimizer).digest()


@pytest.mark.parametrize("piece_bytes", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_bits_are_those_without_it(kind: str, piece_bytes: int) -> None:
    model = model_of()
    other = copy.deepcopy(model)
    plain = OPTIMIZERS[kind](groups_of(model), lr=0.01)
    optimizer = OPTIMIZERS[kind](groups_of(other), lr=0.01)
    offload = Offload(optimizer, piece_bytes=piece_bytes)
    for step in range(5):
        give_gradients(model, step)
        give_gradients(other, step)
        plain.step()
        offload.step()
        assert bits(other, optimizer) == bits(model, plain), step
        assert offload.pieces == {1: 8 - step % 2, 1 << 30: 1}.get(piece_bytes, offload.pieces)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 6]


def test_the_bits_are_the_same_for_sharded_parameters(one_rank: Any) -> None:
    def sharded() -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(33, 70), torch.nn.LayerNorm(70), torch.nn.Linear(70, 5))
        fully_shard(model, mesh=one_rank)
        return model

    for make in (OPTIMIZERS["AdamW"], OPTIMIZERS["AdamW foreach"], OPTIMIZERS["AdamW fused"]):
        model, other = sharded(), sharded()
        plain, optimizer = make(model.parameters(), lr=0.01), make(other.parameters(), lr=0.01)
        offload = Offload(optimizer, piece_bytes=20_000)
        for _ in range(4):
            for each in (model, other):
                each(torch.ones(2, 33)).square().mean().backward()
            plain.step()
            offload.step()
            plain.zero_grad()
            optimizer.zero_grad()
            assert bits(other, optimizer) == bits(model, plain)
        assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())


@pytest.fixture
def one_rank() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# --- memory -------------------------------------------------------------------------------------------------------


class Big:
    """Eight layers of 1 MB each, and AdamW, which keeps 16 MB of state for them."""

    def __init__(self, piece_bytes: int, **options: Any) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.offload = Offload(self.optimizer, piece_bytes=piece_bytes)
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)


@pytest.mark.parametrize("pieces", [2, 4])
def test_two_pieces_at_most_are_on_the_device_and_none_between_steps(pieces: int) -> None:
    big = Big(16 * MB // pieces)
    for _ in range(3):
        big.offload.step()
        assert (big.offload.pieces, big.offload.device_bytes) == (pieces, 0)
    assert big.offload.host_bytes == 16 * MB
    assert big.offload.device_bytes_max == 2 * 16 * MB // pieces, "in the first step too, which makes the state"


def test_what_is_allocated_in_a_step_is_two_pieces_and_what_the_optimizer_needs_for_one() -> None:
    """By a meter that knows nothing of offloading. With foreach, AdamW needs a temporary tensor for each parameter at hand."""
    big = Big(4 * MB, foreach=True)
    big.offload.step()
    with StorageMeter() as meter:
        big.offload.step()
    scalars = 4096
    assert 0 <= meter.peak - (2 * 4 * MB + 2 * MB) <= scalars, "two buffers, and a temporary for each of two parameters"
    assert meter.left <= scalars, "nothing stays"
    with StorageMeter() as without:
        big.optimizer.step()
    assert without.peak >= 8 * MB, "one step for all parameters has temporaries for all of them"


def test_a_parameter_larger_than_a_piece_has_one_of_its_own() -> None:
    big = Big(1)
    big.offload.step()
    assert (big.offload.pieces, big.offload.device_bytes_max) == (8, 2 * 2 * MB)


# --- order --------------------------------------------------------------------------------------------------------


def find_races(deaf: tuple[str, str] | None = None) -> RaceFinder:
    """Four steps of five pieces; what the optimizer does is in the compute lane, and the host reads the state after each."""
    finder = RaceFinder(deaf)

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.touch()
            super().step()
            self.touch()

        def touch(self) -> None:
            for param in (p for group in self.param_groups for p in group["params"]):
                for tensor in self.state.get(param, {}).values():
                    if tensor.dim():
                        finder.compute.access(tensor, write=True)

    params = [torch.nn.Parameter(torch.randn(100)) for _ in range(5)]
    optimizer = Watched(params, lr=0.01)
    offload = Offload(optimizer, piece_bytes=800, lanes=finder)
    for _ in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        offload.step()
        assert offload.pieces == 5
        for state in optimizer.state.values():
            finder.host.access(state["exp_avg"], write=False)
    return finder


def test_every_copy_waits_for_what_it_must() -> None:
    find_races()


@pytest.mark.parametrize(
    "wait",
    [
        ("fetch", "step"),  # for whoever had the memory of the buffers before
        ("fetch", "_fetch"),  # for the piece that is leaving the buffer
        ("compute", "_update"),  # for the piece to be there
        ("compute", "_let_go"),  # before new state takes the place of what is still being drained
        ("drain", "_drain"),  # for the update
        ("host", "step"),  # for everything to be back
    ],
)
def test_no_wait_can_be_left_out(wait: tuple[str, str]) -> None:
    with pytest.raises(Race):
        find_races(deaf=wait)


# --- with the rest of the state -----------------------------------------------------------------------------------


class Offloaded(Replica):
    """`test_state.Replica`, offloaded in several pieces."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.offload = Offload(self.optimizer, piece_bytes=200)

    def train(self) -> None:
        self.model(torch.ones(2, 5)).square().mean().backward()
        self.offload.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("source", "target"), [(Offloaded, Replica), (Replica, Offloaded), (Offloaded, Offloaded)])
def test_a_state_goes_from_a_replica_with_it_to_one_without_and_back(
    source: Callable[[int], Replica], target: Callable[[int], Replica]
) -> None:
    healthy, fresh = source(0), target(1)
    for _ in range(2):
        healthy.train()
        fresh.train()
    healthy.state.after_write(name(2))
    fresh.state.load(*fetch(healthy.state, name(2)))
    for _ in range(3):
        assert healthy.state.digest() == fresh.state.digest()
        healthy.train()
        fresh.train()


def test_what_is_copied_aside_is_the_state_before_the_step() -> None:
    healthy, fresh = Offloaded(0), Replica(1)
    healthy.train()
    healthy.state.after_write(name(1))
    before = healthy.state.digest()
    manifest, whole = fetch(healthy.state, name(1))
    healthy.state.serve({reader(): name(1)})
    assert healthy.state.before_write() == len(whole)
    healthy.train()
    healthy.state.after_write(name(2))
    late = healthy.state.read(name(1), 0, len(whole))
    assert late == whole
    fresh.state.load(manifest, whole)
    assert fresh.state.digest() == before


# --- what is refused ----------------------------------------------------------------------------------------------


def test_an_optimizer_that_counts_in_its_settings_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1

    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(ConfigError, match=r"Counting changes its settings \(k\)"):
        Offload(Counting([p], lr=0.1)).step()


def test_hooks_and_nonsense_are_refused() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="has step hooks"):
        Offload(optimizer).step()
    with pytest.raises(ConfigError, match="at least 1"):
        Offload(optimizer, piece_bytes=0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device="meta"))]})
    with pytest.raises(ConfigError, match="one device"):
        Offload(optimizer)
