"""keepstep: fault-tolerant hybrid-sharded data-parallel training for PyTorch.

    with keepstep.join() as job:
        training = keepstep.Training(job, model, optimizer, data=dataset, unit_size=32)
        for step in training:
            step.backward(compute_loss(model, step.batch))
            step.commit()

Importing this package is cheap: torch is imported when `join` or `Training` is first used.
"""

from typing import TYPE_CHECKING, Any

from keepstep.protocol.errors import ConfigError, ExchangeError, KeepstepError
from keepstep.version import __version__

if TYPE_CHECKING:
    from keepstep.training.join import Job, join
    from keepstep.training.process_group import FTARProcessGroup
    from keepstep.training.training import Step, Training

__all__ = [
    "ConfigError",
    "ExchangeError",
    "FTARProcessGroup",
    "Job",
    "KeepstepError",
    "Step",
    "Training",
    "__version__",
    "join",
]


def __getattr__(name: str) -> Any:
    if name in ("Job", "join"):
        from keepstep.training import join as module
    elif name in ("Step", "Training"):
        from keepstep.training import training as module  # type: ignore[no-redef]
    elif name == "FTARProcessGroup":
        from keepstep.training import process_group as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
    return getattr(module, name)
