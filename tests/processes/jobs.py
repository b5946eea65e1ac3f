"""Runs a real job with `keepstep run` and reads what it left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

SCRIPTS = Path(__file__).parent / "scripts"
TINY = SCRIPTS / "train_tiny.py"


@dataclass
class Result:
    """What a finished job left behind."""

    code: int
    output: str
    run_dir: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    @property
    def digests(self) -> dict[int, str]:
        """Final state digest of each replica that ended the job."""
        return {e["replica"]: e["digest"] for e in self.of("final") if e["rank"] == 0}

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """Every decision that was seen, once, in order."""
        return [d for _, d in sorted({d["seq"]: d for d in self.of("decision")}.items())]

    def committed(self) -> list[dict[str, Any]]:
        """The decisions of the one history, first to last: follows the base links back from the last commit."""
        by_seq = {d["seq"]: d for d in self.decisions}
        commits = {c["seq"] for c in self.of("commit")}
        last = max(commits, default=0)
        chain: list[dict[str, Any]] = []
        while last in by_seq and by_seq[last]["kind"] == "train":
            chain.append(by_seq[last])
            if by_seq[last]["base"] == last:
                break
            last = by_seq[last]["base"]
            if last not in commits:
                break  # the name of the initial state
        return chain[::-1]

    def units(self) -> list[int]:
        """The units of the one history, in order, with repetitions if there are any."""
        return [u for d in self.committed() for m in d["members"] for u in m["units"]]

    def shots(self) -> list[dict[str, Any]]:
        """The faults that were injected."""
        path = self.run_dir / "faults.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted((run_dir / "events").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # the last line of a killed process may be torn
    return sorted(rows, key=lambda r: r["mono"])


def command(
    run_dir: Path, *options: str, script: Path = TINY, args: tuple[str, ...] = (), verb: str = "run"
) -> list[str]:
    return [
        sys.executable, "-m", "keepstep", verb, "--run-dir", str(run_dir), *options, str(script), "--", *args,
    ]  # fmt: skip


def start(
    run_dir: Path, *options: str, script: Path = TINY, args: tuple[str, ...] = (), verb: str = "run", **env: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(run_dir, *options, script=script, args=args, verb=verb),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", **env},
    )


def finish(process: subprocess.Popen[str], run_dir: Path, timeout: float) -> Result:
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            kill_all(run_dir)
            output, _ = process.communicate(timeout=15)
        raise AssertionError(f"the job did not end within {timeout} s:\n{output[-6000:]}") from None
    finally:
        kill_all(run_dir)
    return Result(process.returncode, output, run_dir, read_events(run_dir))


def run(
    run_dir: Path,
    *options: str,
    script: Path = TINY,
    args: tuple[str, ...] = (),
    timeout: float = 150.0,
    verb: str = "run",
    **env: str,
) -> Result:
    """Runs a job to its end; nothing of it is left running, whatever happens. `verb`: of keepstep, "run" or "shadow"."""
    return finish(start(run_dir, *options, script=script, args=args, verb=verb, **env), run_dir, timeout)


def processes_of(run_dir: Path) -> Iterator[psutil.Process]:
    """Every process that has the run directory in its command line or environment."""
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            text = " ".join(process.cmdline()) + " ".join(process.environ().values())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if str(run_dir) in text:
            yield process


def kill_all(run_dir: Path) -> None:
    for process in list(processes_of(run_dir)):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The condition's first true value. For conditions that nothing announces: files, processes."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while time.monotonic() < deadline:
        if found := condition():
            return found
        pause.wait(0.02)
    raise AssertionError("it never came to that")
