"""How the learning rate follows the number of healthy replicas (FT-HSDP section 8).

With h of t replicas training, a step sees h/t of the batch. The factor multiplies the scheduler's rate for that one
step and is taken back after it, so that schedulers and checkpoints only ever see the base rate. The gradient is a weighted mean,
so it needs no correction of its own.

    none    1          linear  h/t          sqrt  sqrt(h/t), the default

All replicas must compute the same factor from the same decision: weights diverge under identical gradients otherwise.
"""

from math import sqrt
from typing import Literal

from keepstep.protocol.errors import ConfigError

LearningRatePolicy = Literal["none", "linear", "sqrt"]
POLICIES: tuple[LearningRatePolicy, ...] = ("none", "linear", "sqrt")


def factor(policy: str, healthy: int, total: int) -> float:
    """What to multiply the learning rate by; `healthy` WORKERs of `total` configured replicas. Never above 1."""
    if total < 1 or not 0 <= healthy <= total:
        raise ConfigError(f"healthy replicas must be in 0..total, got {healthy} of {total}")
    match policy:
        case "none":
            return 1.0
        case "linear":
            return healthy / total
        case "sqrt":
            return sqrt(healthy / total)
        case _:
            raise ConfigError(f"unknown learning-rate policy {policy!r}: use one of {', '.join(POLICIES)}")
