"""How a rank leaves `keepstep.join()`: with the code of what ended it, not of what came of that."""

from types import SimpleNamespace

import pytest

from keepstep.protocol.errors import InvariantViolation, JobMismatch, NoStateLeft, ReplicaLost
from keepstep.training import join as module


@pytest.mark.parametrize(
    ("fatal", "code"),
    [(ReplicaLost("rank 1 is gone"), 75), (JobMismatch("another model"), 78), (NoStateLeft("all are gone"), 93)],
)
@pytest.mark.parametrize("first", [True, False], ids=["told by us", "a broken collective"])
def test_the_cause_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fatal: Exception, code: int, first: bool
) -> None:
    end = leave(monkeypatch, fatal, fatal if first else RuntimeError("connection closed by peer"))
    assert isinstance(end, SystemExit)
    assert end.code == code
    assert capsys.readouterr().err == f"keepstep: {fatal}\n", "one sentence"


def test_a_bug_is_shown_with_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fatal, consequence = InvariantViolation("impossible"), RuntimeError("connection closed by peer")
    assert leave(monkeypatch, fatal, consequence) is fatal
    assert fatal.__cause__ is consequence


def test_the_scripts_own_error_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("a typo")
    assert leave(monkeypatch, None, error) is error


def leave(monkeypatch: pytest.MonkeyPatch, fatal: Exception | None, error: Exception) -> BaseException:
    """The script raises `error` in its `with` block, after `fatal` if there was one; returns what comes out."""
    job = SimpleNamespace(runtime=SimpleNamespace(fatal=fatal))
    monkeypatch.setattr(module, "_join", lambda: job)
    monkeypatch.setattr(module, "_leave", lambda job: None)
    with pytest.raises((type(error), SystemExit, InvariantViolation)) as caught, module.join():
        raise error
    return caught.value
