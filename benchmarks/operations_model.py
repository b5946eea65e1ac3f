"""What every system in `operations.py` trains: the model of `kill_model.py`, on units that leave a trace in the weights.

`seen` is a parameter with one number for each unit. The loss gains `seen[unit]`, minus its value: a gradient of 1, and nothing
else. So what reaches the optimizer says of which units a step was made, whoever summed it, and the optimizer counts them. At the
end `seen` says how often each unit was trained into the weights beside it: it is saved, restored, fetched and thrown away with
them, and asks nobody's bookkeeping.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from kill_model import Rows, batch_of, digest, loss_of
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor, int]


class Units(torch.utils.data.Dataset[Batch]):
    """Unit n is batch n, and its number."""

    def __init__(self, length: int) -> None:
        self.rows, self.length = Rows(), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, unit: int) -> Batch:
        return *batch_of(self.rows, unit), unit


def only(batch: list[Batch]) -> Batch:
    """A unit is one item, and has no further dimension."""
    (item,) = batch
    return item


class Traced(nn.Module):
    """A model with the trace beside its weights."""

    def __init__(self, model: nn.Module, units: int) -> None:
        super().__init__()
        self.model = model
        self.seen = nn.Parameter(torch.zeros(units))

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of a unit."""
        x, y, unit = batch
        mark = self.seen[unit]
        return loss_of(self.model, (x, y)) + (mark - mark.detach())


class Counting(torch.optim.AdamW):
    """AdamW for the weights; adds up whose gradients arrived in `seen`."""

    def __init__(self, model: Traced) -> None:
        super().__init__(model.parameters(), lr=1e-4)
        self.seen = model.seen

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        arrived = self.seen.grad
        assert arrived is not None
        self.seen.add_(
            (arrived / arrived[arrived > 0].min()).round()
        )  # a mean: 1 / how many units there were, for each
        self.seen.grad = None  # AdamW leaves it alone
        return super().step(closure)


def write_counts(model: Traced) -> None:
    """At the end, beside the journal: how many units are not in the weights, and how often units are beyond the first time."""
    seen, journal = model.seen.detach(), Path(os.environ["KILL_JOURNAL"])
    counts = {"lost": int((seen == 0).sum()), "duplicated": int((seen - 1).clamp(min=0).sum()), "digest": digest(model)}
    journal.with_name(journal.name.replace("journal", "units")).write_text(json.dumps(counts))
