"""A real `keepstep run` that a benchmark disturbs: started, its events read as they come, ended. For spares.py, detection.py."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


class Job:
    """A job in a `with` block; nothing of it is left at the end."""

    def __init__(self, folder: Path, options: list[str], script: Path, args: list[str], **env: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.run_dir = folder / "run"
        self._command = [
            sys.executable, "-m", "keepstep", "run", "--run-dir", str(self.run_dir), *options, str(script), "--", *args
        ]  # fmt: skip
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        self._log = (folder / "output.log").open("wb")
        self.output = folder / "output.log"
        self._at: dict[Path, int] = {}
        self.events: list[Row] = []

    def __enter__(self) -> "Job":
        self.process = subprocess.Popen(self._command, env=self._env, stdout=self._log, stderr=self._log)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def of(self, event: str, **fields: Any) -> list[Row]:
        """Events so far, in order of time."""
        for path in sorted((self.run_dir / "events").glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._at.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._at[path] = self._at.get(path, 0) + len(whole) + 1
                self.events += [json.loads(line) for line in whole.splitlines()]
        self.events.sort(key=lambda e: e["mono"])
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def wait(self, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        """The condition's first true value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := condition():
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"it never came to that, see {self.output}:\n{self.output.read_text()[-3000:]}")

    def stays(self, seconds: float) -> None:
        """It runs for so long."""
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end, seconds + 30)

    def last_step(self) -> int:
        return max((e["step"] for e in self.of("commit")), default=-1)

    def together(self, replicas: int, steps: int, after: float = 0.0) -> None:
        """Waits until all have committed so many steps as WORKERs after a time, the newest with everybody."""

        def reached() -> bool:
            for replica in range(replicas):
                commits = [e for e in self.of("commit", replica=replica) if e["mono"] > after and e["role"] == "worker"]
                if len(commits) < steps or any(e["workers"] != replicas for e in commits[-steps:]):
                    return False
            return True

        self.wait(reached)

    def rank(self, replica: int, rank: int = 0) -> psutil.Process:
        """The process of a rank in the newest life of its replica."""
        return psutil.Process(self.of("spawn", replica=replica)[-1]["pids"][rank])

    def zygote(self) -> psutil.Process:
        """Ranks are forked from it, so it is the oldest with its command line."""
        children = psutil.Process(self.process.pid).children()
        return min((p for p in children if "keepstep.launch.zygote" in p.cmdline()), key=lambda p: p.create_time())


def gaps(commits: list[Row]) -> list[tuple[Row, float]]:
    """Each commit with the time since the one before."""
    return [(b, b["mono"] - a["mono"]) for a, b in pairwise(commits)]
