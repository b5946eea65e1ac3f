"""Fault specifications: what they mean, and what is refused."""

import os
from pathlib import Path

import pytest

from keepstep.protocol.errors import ConfigError
from keepstep.runtime.environment import Environment
from keepstep.runtime.faults import Fault, Faults, InjectedFault, Phase


def environment(tmp_path: Path, **more: str) -> Environment:
    base = {
        "RANK": "0", "WORLD_SIZE": "2", "REPLICA_ID": "1", "NUM_REPLICAS": "3", "KEEPSTEP_STORE": "etcd://127.0.0.1:1",
        "KEEPSTEP_TOKEN": "t", "KEEPSTEP_RUN_DIR": str(tmp_path), "KEEPSTEP_INCARNATION": "a",
    }  # fmt: skip
    return Environment.from_env({**base, **more})


def test_a_fault_fires_once_in_a_run_where_everything_fits(tmp_path: Path) -> None:
    text = "raise replica=1 rank=0 step=5+ phase=forward count=2 incarnation=second role=worker"
    first, second = (Faults.parse(text, environment(tmp_path, KEEPSTEP_LIFE=life)) for life in ("1", "2"))
    for step in (5, 6, 7):
        first.point(Phase.FORWARD, step=step, role="worker")
    second.point(Phase.BACKWARD, step=5, role="worker")
    second.point(Phase.FORWARD, step=4, role="worker")
    second.point(Phase.FORWARD, step=5, role="catching_up")
    second.point(Phase.FORWARD, step=5, role="worker")
    with pytest.raises(InjectedFault):
        second.point(Phase.FORWARD, step=6, role="worker")
    assert (tmp_path / "faults.jsonl").read_text().count("\n") == 1
    again = Faults.parse(text, environment(tmp_path, KEEPSTEP_LIFE="2"))
    for step in (5, 6, 7):
        again.point(Phase.FORWARD, step=step, role="worker")


def test_other_ranks_have_no_faults(tmp_path: Path) -> None:
    assert not Faults.parse("kill replica=0 rank=0 phase=forward", environment(tmp_path))
    assert not Faults.parse("", environment(tmp_path))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("explode replica=0 rank=0 phase=forward", "unknown action"),
        ("kill replica=0 rank=0 phase=sideways", "unknown phase"),
        ("kill replica=0 phase=forward", "rank= is missing"),
        ("kill replica=0 rank=0 phase=forward colour=red", "unknown field"),
        ("kill replica=x rank=0 phase=forward", "cannot be read"),
        ("kill replica=0 rank=0 phase=forward incarnation=ninth", "incarnation must be"),
        ("exit=soon replica=0 rank=0 phase=forward", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Fault.parse(line)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "2", "RANK must be"),
        ("WORLD_SIZE", "many", "whole number"),
        ("REPLICA_ID", "3", "REPLICA_ID must be"),
        ("KEEPSTEP_STORE", "", "KEEPSTEP_STORE is not set"),
        ("KEEPSTEP_LEADER", "here", "HOST:PORT"),
        ("KEEPSTEP_LEASE_S", "0.1", "at least 0.5"),
        ("KEEPSTEP_TOKEN", "", "KEEPSTEP_TOKEN"),
        ("KEEPSTEP_MIN_REPLICAS", "4", "KEEPSTEP_MIN_REPLICAS"),
    ],
)
def test_an_environment_that_cannot_work_is_a_sentence(tmp_path: Path, name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        environment(tmp_path, **{name: value})


def test_the_token_can_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    env = environment(tmp_path, KEEPSTEP_TOKEN="", KEEPSTEP_TOKEN_FILE=str(tmp_path / "token"))
    assert env.token == b"secret"
    os.truncate(tmp_path / "token", 0)
    with pytest.raises(ConfigError, match="is empty"):
        environment(tmp_path, KEEPSTEP_TOKEN="", KEEPSTEP_TOKEN_FILE=str(tmp_path / "token"))
