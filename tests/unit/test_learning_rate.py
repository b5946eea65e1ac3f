"""The learning rate's answer to missing replicas."""

import pytest

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.learning_rate import POLICIES, factor


@pytest.mark.parametrize(
    ("policy", "expected"), [("none", [1.0, 1.0, 1.0]), ("linear", [0.25, 0.5, 1.0]), ("sqrt", [0.5, 0.5**0.5, 1.0])]
)
def test_policies(policy: str, expected: list[float]) -> None:
    assert [factor(policy, healthy, 4) for healthy in (1, 2, 4)] == pytest.approx(expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_full_strength_is_exactly_the_base_rate(policy: str) -> None:
    assert all(factor(policy, n, n) == 1.0 for n in range(1, 50))


@pytest.mark.parametrize(("healthy", "total"), [(5, 4), (-1, 4), (0, 0)])
def test_impossible_numbers_are_refused(healthy: int, total: int) -> None:
    with pytest.raises(ConfigError, match=r"must be in 0\.\.total"):
        factor("sqrt", healthy, total)


def test_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'cubic'.*none, linear, sqrt"):
        factor("cubic", 1, 1)
