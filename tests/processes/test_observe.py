"""What is told of a real run with kills: status while it goes on, the log's line, incidents, goodput, the report."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Result, finish, kill_all, read_events, start, wait_until

from keepstep.observe.findings import Findings
from keepstep.observe.goodput import NS, State
from keepstep.observe.incidents import Incident
from keepstep.observe.records import read_run
from keepstep.runtime.etcd_server import EmbeddedEtcd

LINE = re.compile(
    r"step: +(\d+)  loss: +[\d.]+  step_time: [\d.]+s  sps: [\d,]+  replicas: (\d)/3  quorum_id: \d+  ettr: [\d.]+%$"
)
STEPS, STEP_S = 120, 0.1


def keepstep(*arguments: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "keepstep", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def in_order(incident: Incident, *points: str) -> None:
    times = [getattr(incident, point) for point in points]
    assert None not in times, incident
    assert times == sorted(times), incident


def test_a_run_with_kills(tmp_path: Path, server: tuple[EmbeddedEtcd, str]) -> None:
    _, url = server
    run_dir, kills = tmp_path / "run", ("1 rank=0 step=12 phase=in_exchange", "0 rank=1 step=20 phase=before_vote")
    faults = [word for kill in kills for word in ("--fault", f"kill replica={kill}")]
    process = start(
        run_dir, "--replicas", "3", "--ranks-per-replica", "2", "--store", url, "--job", "told", *faults,
        args=("--steps", str(STEPS), "--step-seconds", str(STEP_S)),
    )  # fmt: skip
    try:
        wait_until(lambda: len([e for e in read_events(run_dir) if e["event"] == "commit"]) > 30)
        by_files = json.loads(keepstep("status", str(run_dir), "--json").stdout)
        by_store = json.loads(keepstep("status", "--store", url, "--job", "told", "--json").stdout)
        result = finish(process, run_dir, 150)
    finally:
        kill_all(run_dir)
    assert result.code == 0, result.output[-6000:]
    assert (by_files["state"], by_store["state"]) == ("running", "running")
    assert by_files["num_replicas"] == by_store["num_replicas"] == len(by_store["replicas"]) == 3
    assert by_files["workers"] >= 1
    assert 0 < by_files["goodput"]["ettr_replica"] < 1
    assert by_store["step"] > 0

    check_accounts(run_dir)
    check_incidents(run_dir)
    check_lines(result)
    check_afterwards(run_dir, url)


def check_accounts(run_dir: Path) -> None:
    goodput = Findings.of(read_run(run_dir)).goodput
    assert list(goodput.slots) == [0, 1, 2]
    for slot in goodput.slots:
        assert sum(goodput.totals(slot).values()) == goodput.elapsed
    totals = goodput.totals()
    assert totals[State.UNATTRIBUTED] < 0.01 * goodput.elapsed
    for slot in (0, 1):
        for state in (State.PRODUCTIVE, State.DISCARDED, State.RESTART, State.TRANSFER, State.CATCH_UP, State.INIT):
            assert goodput.totals(slot)[state] > 0, (slot, state)
    steps = STEPS * STEP_S * NS  # what the script pretends to compute in each
    assert goodput.totals(2)[State.PRODUCTIVE] > steps
    assert 0 < (goodput.ettr_replica or 0) < (goodput.ettr_wall or 0) < 1


def check_incidents(run_dir: Path) -> None:
    run = read_run(run_dir)
    found = Findings.of(run).incidents
    assert [(i.replica, i.rank, i.step, i.phase) for i in found] == [
        (1, 0, 12, "in_exchange"),
        (0, 1, 20, "before_vote"),
    ]
    for incident in found:
        assert incident.cause == "SIGKILL (injected)"
        in_order(incident, "fault", "seen", "restarted", "reported", "admitted", "fetched", "loaded", "worker")
        in_order(incident, "fault", "told", "decided", "committed")
        assert incident.committed is not None
        assert incident.worker is not None
        assert incident.committed < incident.worker
        assert incident.stall_s is not None


def check_lines(result: Result) -> None:
    found = [match for line in result.output.splitlines() if (match := LINE.search(line))]
    assert [int(match[1]) for match in found] == list(range(10, STEPS + 1, 10)), result.output[-6000:]
    assert found[-1][2] == "3"
    assert "\x1b[" not in result.output  # this is no terminal


def check_afterwards(run_dir: Path, url: str) -> None:
    by_files, by_store = keepstep("status", str(run_dir)), keepstep("status", "--store", url, "--job", "told")
    assert "the job is complete" in by_files.stdout
    assert "failures: 2" in by_files.stdout
    assert "the job is complete" in by_store.stdout
    metrics = keepstep("status", str(run_dir), "--prometheus").stdout
    assert re.search(r"^keepstep_productive_seconds_total [\d.]+$", metrics, re.MULTILINE)
    written = keepstep("report", str(run_dir))
    assert written.returncode == 0, written.stderr
    page = (run_dir / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "SIGKILL (injected)" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("status", "{tmp}/nowhere"), "there is no directory"),
        (("status", "{tmp}"), "holds no events of a run"),
        (("report", "{tmp}"), "holds no events of a run"),
        (("status",), "name either the run directory, or --store and --job"),
        (("status", "--store", "{url}"), "name either the run directory, or --store and --job"),
        (("status", "--store", "{url}", "--job", "nobody"), "knows no job 'nobody'"),
        (("status", "--store", "etcd://127.0.0.1:1", "--job", "told"), "no etcd answers at etcd://127.0.0.1:1"),
        (("status", "--store", "127.0.0.1:1", "--job", "told"), "must look like etcd://HOST:2379"),
    ],
)
def test_one_sentence_when_there_is_nothing(
    tmp_path: Path, server: tuple[EmbeddedEtcd, str], arguments: tuple[str, ...], words: str
) -> None:
    done = keepstep(*(a.format(tmp=tmp_path, url=server[1]) for a in arguments))
    assert done.returncode == 78
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
