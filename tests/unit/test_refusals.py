"""Refusals are said, but not once per attempt."""

import logging

import pytest

from keepstep.protocol.errors import StaleQuorum, Unauthorized
from keepstep.runtime.refusals import EVERY_S, MAX_KINDS, Refusals, plain


def test_a_kind_is_said_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    refusals = Refusals("a connection", clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "keepstep"):
        for _ in range(1000):
            refusals.note("somebody", Unauthorized("no token"))
        refusals.note("somebody", StaleQuorum("an older ring"))
        assert [r.getMessage() for r in caplog.records] == [
            "refused a connection from somebody: no token",
            "refused a connection from somebody: an older ring",
        ]
        assert [r.levelno for r in caplog.records] == [logging.WARNING, logging.INFO]
        now[0] += EVERY_S
        refusals.note("somebody", Unauthorized("no token"))
    assert caplog.messages[-1].endswith("no token (999 more like this since the last such line)")
    assert refusals.count == 1002


def test_there_are_not_endless_kinds(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals("a value", clock=lambda: 0.0)
    for kind in range(10 * MAX_KINDS):
        refusals.note("the store", "nonsense", f"kind {kind}")
    assert len(caplog.records) == MAX_KINDS + 1


def test_what_a_stranger_says_cannot_forge_a_line_or_fill_it() -> None:
    assert plain("a\nERROR keepstep: all is lost\x1b[2J\ud800") == "a\\nERROR keepstep: all is lost\\x1b[2J\\ud800"
    assert len(plain("x" * 10**6)) < 400
