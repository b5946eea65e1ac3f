"""`keepstep scale quorum` at a size that CI can bear, through the command line; what it refuses, and what it notices."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import processes_of

from keepstep.protocol.errors import StoreError
from keepstep.scale import quorum
from keepstep.scale.quorum import Measurement, Settings
from keepstep.scale.quorum_table import sizes


def command(*options: object, mark: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """`mark`: by which all its processes are known."""
    words = [sys.executable, "-m", "keepstep", "scale", "quorum", *map(str, options)]
    env = {**os.environ, "MARK": str(mark)}
    return subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env=env)


def test_a_thousand_ranks(tmp_path: Path) -> None:
    path = tmp_path / "quorum.json"
    options = ("--replicas", 4, "--ranks", 256, "--ranks-per-host", 8, "--rounds", 3, "--json", path)
    result = command(*options, mark=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1,024" in result.stdout
    got = json.loads(path.read_text())
    assert got["ranks"] == 1024
    for kind in ("steady", "change", "rejoin", "commit"):
        times = got[f"{kind}_s"]
        assert 0 < times["p0"] <= got[f"{kind}_median_s"] <= times["p100"]
    assert got["commit_median_s"] < got["steady_median_s"], "a decision follows the commit"
    assert got["cpu_s"] > 0
    assert got["rss_bytes"] > 0
    hosts = 4 * 256 // 8
    assert 0 < got["bytes"] < 200 * hosts, "a steady step costs a few bytes a host, and nothing a rank"
    assert got["bytes"] < got["change_bytes"], "new neighbours' addresses"
    assert not list(processes_of(tmp_path)), "something was left running"


@pytest.mark.parametrize("options", [("--sockets", "--machines"), ("--ranks-per-host", 1), ("--fan-out", 1)])
def test_other_shapes_come_to_the_same(options: tuple[object, ...]) -> None:
    """Each round is checked at every rank, or the command fails."""
    result = command("--replicas", 3, "--ranks", 24, "--rounds", 1, *options)
    assert result.returncode == 0, result.stderr
    assert "    72 " in result.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--ranks", 100),
            "--ranks 100 is not a multiple of --ranks-per-host 8: a replica has whole hosts; 96 or 104 would fit",
        ),
        (("--rounds", 0), "must be at least 1"),
        (("--sockets", "--ranks", 1 << 30), "leave out --sockets"),
        (("--ranks", 1 << 30), "more --ranks-per-host, or fewer --ranks"),
        (("--ranks", 8, "--json", "/proc/no/q.json"), "/proc/no cannot be made"),
    ],
)
def test_what_cannot_be_measured_is_said(options: tuple[object, ...], sentence: str) -> None:
    result = command(*options)
    assert result.returncode == 78
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_curve_is_about_1k_8k_32k_and_all() -> None:
    got = [(s.replicas, s.replicas * s.ranks) for s in sizes(Settings(replicas=12, ranks=8192))]
    assert got == [(1, 8192), (12, 1056), (12, 8160), (12, 32736), (12, 98304)]


def measured(tmp_path: Path, then: Any) -> None:
    job = Measurement(Settings(replicas=2, ranks=16, rounds=3), tmp_path, lambda _: then(job))
    asyncio.run(job.run())


def test_a_replica_that_dies_by_itself_is_noticed(tmp_path: Path) -> None:
    def kill(job: Measurement) -> None:
        process = job.replicas[1].process
        assert process is not None
        process.send_signal(signal.SIGKILL)

    with pytest.raises(StoreError, match="replica 1 ended"):
        measured(tmp_path, kill)


def test_a_rank_with_other_addresses_than_its_neighbours_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that has other ranks on a host than the others think: where its ranks listen isn't what the rest expects."""

    class Other(quorum.ShadowSettings):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**{**fields, "ranks_per_host": 4 if fields["replica"] == 1 else 8})

    monkeypatch.setattr(quorum, "ShadowSettings", Other)
    with pytest.raises(StoreError, match="another address of replica"):
        measured(tmp_path, lambda job: None)
