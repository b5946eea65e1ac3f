"""The demo's parts that need no training: what is killed, how progress reads, what counts as failure."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.demo import LEADER_PHASES, MARK, MID_STEP, Progress, Tail, choose_faults, find_problems, prepare
from keepstep.protocol.errors import ConfigError


def parse(fault: str) -> dict[str, str]:
    return dict(part.split("=") for part in fault.split()[1:])


@pytest.mark.parametrize("steps", [60, 100, 240])
def test_first_any_rank_mid_step_then_a_leader(steps: int) -> None:
    for seed in range(200):
        first, second = map(parse, choose_faults(steps, seed))
        assert first["phase"] in MID_STEP
        assert first["replica"] != second["replica"]
        assert second["rank"] == "0"
        assert second["phase"] in LEADER_PHASES
        assert 0 < int(first["step"]) < int(second["step"]) < steps - 1
    assert choose_faults(steps, 3) == choose_faults(steps, 3)


def commit(step: int, mono: float, replica: int = 0, incarnation: str = "a", **fields: Any) -> dict[str, Any]:
    row = {
        "event": "commit",
        "step": step,
        "seq": step + 1,
        "mono": mono,
        "replica": replica,
        "incarnation": incarnation,
        "role": "worker",
    }
    return {**row, "loss": 3.0, "samples": 48, "members": 3, "workers": 3, **fields}


def test_the_progress_line() -> None:
    progress = Progress(steps=100)
    assert "starting" in progress.line(0.0)
    progress.feed([commit(0, 10.0), commit(0, 10.1, 1), commit(1, 10.5), commit(2, 11.0, workers=2)])
    assert progress.line(11.0) == "step 3/100   loss 3.000   2 workers + 1 catching up   12,288 tokens/s"


def test_kills_and_returns_get_a_line() -> None:
    progress = Progress(steps=100)
    shot = {"action": "kill", "replica": 1, "rank": 0, "step": 4, "phase": "in_exchange", "mono": 4.5}
    lines = progress.feed([commit(4, 4.0, 1, "b0"), shot, commit(8, 9.0, 1, "b1", role="catching_up")])
    assert len(lines) == 1
    assert "replica 1 rank 0, step 4, in exchange" in lines[0]
    (back,) = progress.feed([commit(9, 9.5, 1, "b1"), commit(10, 10.0, 1, "b1")])
    assert "replica 1 has caught up" in back
    assert "step 9" in back


def test_a_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    path, row = tmp_path / "events" / "replica0-rank0-a.jsonl", json.dumps(commit(0, 1.0))
    tail = Tail(tmp_path)
    assert tail.read() == []
    path.write_text(row + "\n" + row[:20])
    assert len(tail.read()) == 1
    assert tail.read() == []
    with path.open("a") as file:
        file.write(row[20:] + "\n")
    assert tail.read() == [commit(0, 1.0)]


def test_only_its_own_directory_is_emptied(tmp_path: Path) -> None:
    ours = tmp_path / "demo"
    prepare(ours)
    (ours / "summary.json").touch()
    prepare(ours)
    assert [p.name for p in ours.iterdir()] == [MARK]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="choose another"):
        prepare(tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").exists()


GOOD = {
    "digests_equal": True,
    "units_lost": 0,
    "units_duplicated": 0,
    "ledgers_agree": True,
    "kills": [{}, {}],
}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({}, 3, "exited with code 3"),
        ({"digests_equal": False}, 0, "same state"),
        ({"units_lost": 2}, 0, "2 units were lost"),
        ({"units_duplicated": 1}, 0, "1 units were trained twice"),
        ({"ledgers_agree": False}, 0, "ledgers"),
        ({"kills": [{}]}, 0, "1 of 2 kills"),
    ],
)
def test_broken_promises(change: dict[str, Any], code: int, words: str) -> None:
    assert find_problems(GOOD, 0, 2) == []
    (problem,) = find_problems({**GOOD, **change}, code, 2)
    assert words in problem
