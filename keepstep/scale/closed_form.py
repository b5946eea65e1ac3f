"""ETTR by formula, where there is one: what the simulator is checked against, and the paper's own arithmetic.

With failures that come at random (Poisson, rate 1/M) and a recovery of R seconds that a failure starts anew, a job is up exactly
when the last R seconds were free of failures: e^(-R/M). A stretch of T seconds of training between two checkpoints, lost as a
whole when a failure comes before its end, takes M (e^(T/M) - 1) e^(R/M) on average (Daly 2006).

Pure. Seconds.
"""

from math import exp, sqrt


def sync_even(mtbf_s: float, recovery_s: float) -> float:
    """The paper's 44%: every failure costs a whole recovery, and they come like a clock."""
    return 1 - recovery_s / mtbf_s


def replicas_even(mtbf_s: float, recovery_s: float, stall_s: float, replicas: int) -> float:
    """The paper's 80%: a whole stop, then one replica less until it is rebuilt."""
    return ((mtbf_s - recovery_s) + (recovery_s - stall_s) * (replicas - 1) / replicas) / mtbf_s


def sync_random(mtbf_s: float, recovery_s: float) -> float:
    """Failures that come at random; one during a recovery starts it anew."""
    return exp(-recovery_s / mtbf_s)


def sync_random_ignored(mtbf_s: float, recovery_s: float) -> float:
    """The same with nothing failing during a recovery: a renewal process."""
    return mtbf_s / (mtbf_s + recovery_s)


def sync_checkpoints(mtbf_s: float, recovery_s: float, every_s: float) -> float:
    """And what was trained since the last checkpoint is lost."""
    return every_s / (mtbf_s * (exp(every_s / mtbf_s) - 1)) * exp(-recovery_s / mtbf_s)


def replicas_random(
    mtbf_s: float, recovery_s: float, stall_s: float, rejoin_s: float, replicas: int, step_s: float
) -> float:
    """To first order in the stalls: each replica is up or not by itself, and all stall for each that is lost or returns."""
    up = exp(-(recovery_s + step_s / 2) / (mtbf_s * replicas))
    return up * exp(-up * stall_s / mtbf_s) / (1 + up * rejoin_s / mtbf_s)


def best_checkpoint_interval(block_s: float, mtbf_s: float) -> float:
    """Young's: sqrt(2 x what one costs x time between losses)."""
    return sqrt(2 * block_s * mtbf_s)
