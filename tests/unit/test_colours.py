"""The line that says how training goes has colours on a terminal, and nowhere else."""

import os
import subprocess
import sys

import pytest

LINE = (
    "[r0.k0] 12:00 INFO keepstep: step:  120  loss:  3.2102  step_time: 0.31s  replicas: 4/4  quorum_id: 7  ettr: 99.2%"
)
SHOW = "from keepstep.launch.screen import Screen; s = Screen(); s.out({0!r}); s.out('step: 7 of my own\\n'); s.close()"


def shown(stdout: int, **env: str) -> None:
    command = [sys.executable, "-c", SHOW.format(LINE + "\n")]
    plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    subprocess.run(command, stdout=stdout, env={**plain, **env}, check=True, timeout=60)


@pytest.mark.parametrize(("env", "colours"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_on_a_terminal(env: dict[str, str], colours: bool) -> None:
    ours, theirs = os.openpty()
    try:
        shown(theirs, **env)
        text = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ("\x1b[31mstep:  120\x1b[0m  \x1b[32mloss:  3.2102\x1b[0m  step_time: 0.31s" in text) == colours
    assert ("\x1b" in text) == colours
    assert "step: 7 of my own" in text


def test_in_a_pipe() -> None:
    ours, theirs = os.pipe()
    shown(theirs)
    os.close(theirs)
    with os.fdopen(ours) as file:
        assert file.read().splitlines()[0] == LINE
