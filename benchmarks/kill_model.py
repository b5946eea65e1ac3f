"""What every system in `kill.py` and `operations.py` trains: the same model, batches and optimizer."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

WIDTH, BATCH = int(os.environ.get("KILL_WIDTH", "1024")), 16
BUCKET_MB = 25
DIGEST_EVERY = 20
DEVICE_S = float(os.environ.get("KILL_DEVICE_S", "0"))


def build() -> nn.Module:
    """Six layers; at the width of 1024 21M parameters, 84 MB of gradients."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 64))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Made-up rows: a pure function of the index."""

    def __init__(self, length: int = 1 << 20) -> None:
        self.pool = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(1))
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool[index % 4096], torch.tensor(index % 64)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    if DEVICE_S:  # as beside an accelerator: the step takes its time, but not the host's CPU
        time.sleep(DEVICE_S)
        x, y = x[:1], y[:1]
    return nn.functional.cross_entropy(model(x), y)


def batch_of(rows: Rows, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch `number`, for the systems that leave data to the script."""
    items = [rows[(number * BATCH + i) % len(rows)] for i in range(BATCH)]
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


class Journal:
    """One line for each step this process has committed or dropped, for the driver to read."""

    def __init__(self) -> None:
        self._path = Path(os.environ["KILL_JOURNAL"])
        self._common = {"replica": int(os.environ["KILL_REPLICA"]), "pid": os.getpid()}
        self._file = self._path.open("a", buffering=1)

    def write(self, model: nn.Module, step: int, members: int, *, committed: bool = True, **more: int) -> None:
        row: dict[str, Any] = {**self._common, "step": step, "members": members, "committed": committed, **more}
        row["mono"] = time.monotonic()
        if committed and step % DIGEST_EVERY == 0:
            row["digest"] = digest(model)
        self._file.write(json.dumps(row) + "\n")


def digest(model: nn.Module) -> str:
    hasher = xxhash.xxh3_64()
    for p in model.parameters():
        hasher.update(p.detach().numpy())
    return hasher.hexdigest()
