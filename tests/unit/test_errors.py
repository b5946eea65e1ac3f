"""What a rank's exit code tells the launcher."""

import pytest

from keepstep.protocol.errors import ConfigError, InvariantViolation, JobMismatch, NoStateLeft, ReplicaLost, exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 78),
        (JobMismatch("x"), 78),
        (NoStateLeft("x"), 93),
        (ReplicaLost("x"), 75),
        (InvariantViolation("x"), 1),
        (RuntimeError("x"), 1),
    ],
)
def test_every_end_has_its_code(error: Exception, code: int) -> None:
    assert exit_code(error) == code
