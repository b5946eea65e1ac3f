"""What a shadow run was asked for, as the launcher's process tells it to every rank: two variables of the environment.

KEEPSTEP_SHADOW     JSON of `ShadowSettings`
KEEPSTEP_PRELOAD    the module that replaces the device; imported before ranks are forked, or by a rank that starts cold
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from keepstep.protocol.errors import ConfigError

VARIABLE = "KEEPSTEP_SHADOW"
PRELOAD = "keepstep.shadow.preload"
WAITS_S = {  # as `runtime.environment` has them
    "KEEPSTEP_LEASE_S": 2.0,
    "KEEPSTEP_SLOW_FLOOR_S": 1.0,
    "KEEPSTEP_SLOW_CEILING_S": 300.0,
    "KEEPSTEP_START_WAIT_S": 60.0,
    "KEEPSTEP_STRAGGLER_S": 60.0,
}
NICE = 15  # of a rank: etcd and the launcher come first
RANKS_A_PROCESSOR = 16  # for which the product's own deadlines do


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSettings:
    """One shadow run."""

    step_s: float = 0.0  # forward and backward of a step take at least so many seconds
    state_fraction: float = 0.001  # of the bytes of weights, gradients and optimizer state that are real
    patience: float = 1.0  # every wait is so many times as long: hundreds of ranks share two processors

    def __post_init__(self) -> None:
        if not 0 <= self.step_s < math.inf:
            raise ConfigError(f"--step-s must be at least 0, got {self.step_s}")
        if not 0 <= self.state_fraction <= 1:
            raise ConfigError(f"--state-fraction must be between 0 and 1, got {self.state_fraction}")

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """For the environment of the launcher, `env` so far; ranks inherit it."""
        return {
            **{name: env.get(name, str(seconds * self.patience)) for name, seconds in WAITS_S.items()},
            "KEEPSTEP_NICE": env.get("KEEPSTEP_NICE", str(NICE)),
            VARIABLE: json.dumps(asdict(self)),
            "KEEPSTEP_PRELOAD": PRELOAD,
            "MALLOC_ARENA_MAX": os.environ.get(
                "MALLOC_ARENA_MAX", "1"
            ),  # an arena a thread would cost each rank megabytes
        }

    @staticmethod
    def patience_for(ranks: int) -> float:
        """What this machine needs for so many ranks."""
        return max(1.0, ranks / (RANKS_A_PROCESSOR * len(os.sched_getaffinity(0))))

    @staticmethod
    def from_env(env: Mapping[str, str]) -> "ShadowSettings":
        """In a rank."""
        if VARIABLE not in env:
            raise ConfigError(f"{VARIABLE} is not set: start the script with `keepstep shadow ...`")
        return ShadowSettings(**json.loads(env[VARIABLE]))
