"""One step of a small model, before the ranks are forked: torch loads much of itself when it is first used.

Without it, each rank would load some 200 modules of torch when it makes its first tensor without values: 5 s of a processor, and
60 MB that are its own. Starts no thread and leaves no process group behind, so that forking stays safe.
"""

import asyncio
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from keepstep.shadow.stand_in import StandIn
from keepstep.training.state import TrainingState

BATCH, LENGTH, WIDTH = 2, 8, 32


class _Small(torch.nn.Module):
    """Some of most things that models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(16, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        q, k, v = self.qkv(x).view(BATCH, LENGTH, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
        return self.out(F.dropout(F.gelu(x) + F.silu(x), 0.1))  # type: ignore[no-any-return]


def warm_up(init_process_group: object) -> None:
    """Call it with the device replaced; `init_process_group`: torch's own."""
    assert callable(init_process_group)
    hook = sys.excepthook
    init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for mixed in (False, True):
        _one_step(mixed)
    dist.destroy_process_group()
    sys.excepthook = hook  # torch puts its rank before what is said, and would again in each rank
    asyncio.new_event_loop().close()
    if threading.active_count() > 1:
        raise RuntimeError(f"forking is not safe any more: {threading.enumerate()} run")


def _one_step(mixed: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = _Small().to("cuda")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    fully_shard(model.out, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stand_in = StandIn(model, optimizer, mesh=mesh, bucket_bytes=1 << 12, fraction=0.5)
    stand_in.start()
    hooks = list(stand_in.hooks(lambda index: stand_in.arrived(index, 0.5)))
    tokens = torch.randint(0, 16, (BATCH, LENGTH + 1))
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten().to("cuda")).backward()  # type: ignore[no-untyped-call]
    assert hooks
    with _disable_current_modes():
        torch.nn.utils.clip_grad_norm_(stand_in.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        TrainingState(stand_in, optimizer).digest()
