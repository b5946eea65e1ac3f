"""What a newcomer runs first: the examples through `keepstep run`, and `keepstep demo`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import kill_all, run
from test_training import check

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--dim", "32", "--layers", "1", "--seq-len", "16", "--unit-size", "4", "--steps", "11")


@pytest.mark.parametrize(("name", "ranks"), [("train_fsdp.py", 2), ("train_ddp.py", 1)])
def test_an_example(tmp_path: Path, name: str, ranks: int) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 200)
    result = run(
        tmp_path / "run", "--replicas", "2", "--ranks-per-replica", str(ranks),
        script=EXAMPLES / name, args=("--data", str(text), *SMALL),
    )  # fmt: skip
    check(result, 2)
    assert len(result.committed()) == 11
    assert result.output.count("step:   10  loss: ") == 1, result.output  # one replica says it


def test_ddp_on_our_process_group_outlives_a_member() -> None:
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, str(EXAMPLES / "ddp_process_group.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rank 2 (member-2)") == 2, done.stdout
    members = [line.split()[3] for line in done.stdout.splitlines() if line.startswith("step ")]
    assert members == ["3"] * 8 + ["2"] * 12


@pytest.mark.timeout(400)  # the model is the example's, and two of its replicas come back from the dead
def test_the_demo(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    command = [sys.executable, "-m", "keepstep", "demo", "--run-dir", str(run_dir), "--steps", "60", "--seed", "1"]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "COLUMNS": "200"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=360, check=False)
    finally:
        kill_all(run_dir)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    for words in ("equal on all replicas", "trained, 0 lost, 0 trained twice", "kill at step", "step 60/60"):
        assert words in done.stdout, done.stdout
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], len(summary["kills"])) == (60, 2)
    assert (run_dir / "picture.png").read_bytes().startswith(b"\x89PNG")
