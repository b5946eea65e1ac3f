"""What a life keeps for the next one: whole or not at all, and never in the way."""

import os
import threading
from pathlib import Path

import pytest

from keepstep.protocol.pace import Learned
from keepstep.runtime.environment import Environment
from keepstep.runtime.pace_file import PaceFile

STEPS = Learned(first=20_000_000_000, longest=300_000_000)


def written() -> None:
    for thread in threading.enumerate():
        if thread.name == "keepstep-pace":
            thread.join(30)


def test_the_next_life_reads_what_was_kept_last(tmp_path: Path) -> None:
    path = tmp_path / "pace" / "replica1-rank0.json"
    path.parent.mkdir()
    path.with_suffix(".part").write_text('{"first": 3')  # of a life that was killed while it wrote
    file = PaceFile(path)
    assert file.before is None
    assert file.keep(STEPS)
    written()
    assert PaceFile(path).before == STEPS
    assert not file.keep(STEPS), "nothing new"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert file.keep(None)
    written()
    assert PaceFile(path).before is None


def test_where_it_lies(tmp_path: Path) -> None:
    """The lives of an agent have a directory each; what was learned outlasts them."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "REPLICA_ID": "3", "NUM_REPLICAS": "4"}
    env = {**place, "KEEPSTEP_STORE": "etcd://127.0.0.1:1", "KEEPSTEP_TOKEN": "secret"}
    for more, where in (
        ({"KEEPSTEP_RUN_DIR": str(tmp_path / "h0-1")}, tmp_path / "h0-1" / "pace"),
        ({"KEEPSTEP_RUN_DIR": str(tmp_path / "h0-1"), "KEEPSTEP_AGENT": "h0"}, tmp_path / "pace"),
    ):
        (tmp_path / "h0-1").mkdir(exist_ok=True)
        file = PaceFile.for_rank(Environment.from_env({**env, **more}))
        assert file.keep(STEPS)
        written()
        assert [path.name for path in where.iterdir()] == ["replica3-rank1.json"]
    nowhere = PaceFile.for_rank(Environment.from_env(env))  # plain torchrun
    assert not nowhere.keep(STEPS)
    assert nowhere.before is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"first": 0, "longest": 1}', '{"first": 1}', '{"first": "x", "longest": 1}']
)
def test_what_makes_no_sense_is_as_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "replica1-rank0.json"
    path.write_text(text)
    assert PaceFile(path).before is None


def test_a_disk_that_hangs_holds_nothing_up(tmp_path: Path) -> None:
    """A pipe that nobody reads, in place of the file: opening it to write does not return."""
    path = tmp_path / "replica1-rank0.json"
    os.mkfifo(path.with_suffix(".part"))
    file = PaceFile(path)
    assert file.keep(STEPS)
    assert not file.keep(Learned(first=1, longest=1)), "dropped"
    reader = os.open(path.with_suffix(".part"), os.O_RDONLY | os.O_NONBLOCK)
    written()
    os.close(reader)
    assert file.keep(Learned(first=1, longest=1)), "and it goes on when the disk does"
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # the pipe bears this name by now
    written()
    os.close(reader)


def test_a_directory_that_cannot_be_written_to_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "pace").write_text("a file")
    file = PaceFile(tmp_path / "pace" / "replica1-rank0.json")
    for first in (1, 2):
        assert file.keep(Learned(first=first, longest=1))
        written()
    assert caplog.text.count("cannot be kept for its next life") == 1
