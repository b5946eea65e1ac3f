"""What the tests of the fault matrix share: a job that runs while it is disturbed, and what must hold at its end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest
from jobs import SCRIPTS, TINY, Result, finish, kill_all, read_events, start, wait_until
from test_reference import replay
from test_training import check

sys.path.insert(0, str(SCRIPTS))

import train_tiny

FAULTY = SCRIPTS / "train_faulty.py"


class Job:
    """A job in a `with` block; nothing of it is left at the end, whatever happens."""

    def __init__(
        self,
        run_dir: Path,
        *options: str,
        replicas: int = 3,
        script: Path = TINY,
        args: tuple[str, ...] = (),
        **env: str,
    ) -> None:
        self.run_dir, self.replicas, self.args = run_dir, replicas, args
        self._begin: Callable[[], subprocess.Popen[str]] = lambda: start(
            run_dir, "--replicas", str(replicas), *options, script=script, args=args, **env
        )

    def __enter__(self) -> "Job":
        self.process = self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill_all(self.run_dir)
        if self.process.poll() is None:
            self.process.kill()
        output, _ = self.process.communicate()
        if error is not None and output:
            error.add_note(output[-6000:])

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.run_dir)

    def of(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Events of a kind so far, with these fields."""
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def until_step(self, step: int, *, replica: int | None = None, role: str = "worker", seconds: float = 60.0) -> None:
        """Some replica, or that one, has committed this step or a later one."""

        def reached() -> bool:
            return any(
                e["step"] >= step and replica in (None, e["replica"]) and e["role"] == role for e in self.of("commit")
            )

        self.wait(reached, seconds)

    def wait(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        """The condition's first true value, for as long as the job runs."""

        def checked() -> Any:
            ended = self.process.poll() is not None
            found = condition()
            assert found or not ended, "the job has ended"
            return found

        return wait_until(checked, seconds)

    def stays(self, seconds: float) -> None:
        """For so long, the job runs and no rank ends."""
        exits, until = len(self.of("exit")), time.monotonic() + seconds

        def over() -> bool:
            assert len(self.of("exit")) == exits, self.of("exit")
            return time.monotonic() >= until

        self.wait(over, seconds + 30)

    def last_step(self) -> int:
        return max((e["step"] for e in self.of("commit")), default=-1)

    def goes_on(self, steps: int = 10, seconds: float = 30.0) -> None:
        """It commits so many steps from now."""
        self.until_step(self.last_step() + steps, seconds=seconds)

    def rank(self, replica: int, rank: int = 0) -> psutil.Process:
        """The process of a rank in the newest life of its replica."""
        return psutil.Process(self.of("spawn", replica=replica)[-1]["pids"][rank])

    def lives(self, replica: int) -> int:
        return len(self.of("spawn", replica=replica))

    def etcd(self) -> psutil.Process:
        """The embedded one."""
        (etcd,) = [p for p in psutil.Process(self.process.pid).children(recursive=True) if p.name() == "etcd"]
        return etcd

    def finish(self, seconds: float = 120.0) -> Result:
        return finish(self.process, self.run_dir, seconds)

    def same_bits(self, result: Result, *, replicas: int | None = None) -> None:
        """All replicas, or `replicas` of them, end equal, every unit is trained once, and one process gets the same bits."""
        check(result, self.replicas if replicas is None else replicas)
        same_as_reference(result, train_tiny.arguments().parse_known_args(self.args)[0])


def same_as_reference(result: Result, args: Any) -> None:
    """A single process that trains the recorded units with the recorded memberships gets the same parameters."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        everyone = {m["replica"] for d in result.committed() for m in d["members"]}
        ranks = 1 + max(e["rank"] for e in result.of("final"))
        reference = replay(result, args, replicas=len(everyone), ranks=ranks)
    finally:
        torch.set_num_threads(before)
    written = 0
    for rank in range(ranks):
        expected = train_tiny.fingerprint(list(reference.shards[rank]))
        for path in result.run_dir.glob(f"parameters-*-{rank}"):
            written += 1
            assert path.read_text() == expected, path.name
    assert written == len(result.digests) * ranks


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 256 MB: etcd alone sets 128 MB aside. Skips the test where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = folder / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", path], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path) -> Path:
    """Takes all that is left; returns what to delete to give it back."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return filler
