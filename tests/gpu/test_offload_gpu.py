"""Offloading on a device: the same bits as without, less memory, through real streams and pinned memory.

    .venv/bin/python -m pytest tests/gpu -rs        # with a torch that is built for the device

Everything that needs no device is in `tests/unit/test_offload.py`.
"""

import copy

import pytest
import torch

from keepstep.training.lanes import StreamLanes
from keepstep.training.offload import Offload

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(),
    reason="no accelerator here: streams and pinned memory of lanes.StreamLanes are untested",
)

MB = 1 << 20
LAYERS, WIDTH = 16, 2048  # 16 MB of float32 each


def train(kind: str, *, piece_bytes: int | None, steps: int) -> tuple[list[torch.Tensor], int, int]:
    """Parameters and state at the end, and the device memory beyond weights and gradients: between steps, and at most."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device, generator=generator)) for _ in range(LAYERS)]
    for p in params:
        p.grad = torch.zeros_like(p)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    options = {"foreach": kind == "foreach", "fused": kind == "fused"}
    optimizer = torch.optim.AdamW(params, lr=0.01, **options)
    offload = Offload(optimizer, piece_bytes=piece_bytes) if piece_bytes is not None else None
    for _ in range(steps):
        torch.accelerator.reset_peak_memory_stats()
        for p in params:
            p.grad.normal_(generator=generator)  # type: ignore[union-attr]
        (offload or optimizer).step()
    between, most = torch.accelerator.memory_allocated() - before, torch.accelerator.max_memory_allocated() - before
    if offload is not None:
        assert isinstance(offload._lanes, StreamLanes)
        assert all(state["exp_avg"].is_pinned() for state in optimizer.state.values())
    state = [optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
    return [copy.deepcopy(t.detach()).cpu() for t in [*params, *state]], between, most


@pytest.mark.parametrize("kind", ["single", "foreach", "fused"])
@pytest.mark.parametrize("piece_bytes", [1, 64 * MB, 1 << 34])
def test_the_bits_are_those_without_it(kind: str, piece_bytes: int) -> None:
    plain, _, _ = train(kind, piece_bytes=None, steps=10)
    offloaded, _, _ = train(kind, piece_bytes=piece_bytes, steps=10)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


def test_the_state_leaves_the_device() -> None:
    state = 2 * LAYERS * WIDTH * WIDTH * 4
    _, between, _ = train("fused", piece_bytes=None, steps=3)
    assert between >= state
    _, between, most = train("fused", piece_bytes=64 * MB, steps=3)
    assert between <= MB, "step counts"
    assert most <= 2 * 64 * MB + 2 * MB
