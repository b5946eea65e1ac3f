"""What a shadow run takes of this machine: time to start, time of a step, processor time, memory of a rank."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import TracebackType

from keepstep.observe.records import Record, Run, read_lines
from keepstep.shadow.verify import Verdict

EVERY_S = 5.0
SAMPLE = 8  # ranks, whose pages are counted: the kernel walks all of them


class Memory:
    """Samples ranks of a run while the `with` block lasts, in a thread. `rank_bytes`: the most that the median rank had that no
    other process shares, while all ranks lived: what ranks share is the last one's when the others have ended."""

    def __init__(self, run_dir: Path) -> None:
        self.rank_bytes = 0
        self._launcher, self._ended = run_dir / "events" / "launcher.jsonl", threading.Event()
        self._thread = threading.Thread(target=self._work, name="keepstep-memory", daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(EVERY_S):
            lives = {e["replica"]: e["pids"] for e in read_lines(self._launcher) if e["event"] == "spawn"}
            own = [n for pid in sample([*lives.values()]) if (n := own_bytes(pid)) is not None]
            if own and all(os.path.exists(f"/proc/{pid}") for pids in lives.values() for pid in pids):
                self.rank_bytes = max(self.rank_bytes, int(median(own)))


def sample(lives: Sequence[Sequence[int]]) -> list[int]:
    """Some processes of all, each another rank of its replica: rank 0, which leads it, has more to hold than the others."""
    return [pids[n % len(pids)] for n in range(SAMPLE) for pids in [lives[n % len(lives)]]] if lives else []


def own_bytes(pid: int) -> int | None:
    """Bytes that this process has written and no other has; None if it has ended. Pages of libraries are nobody's own."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


def measure(run: Run, *, ranks: int, memory: Memory, verdict: Verdict) -> Record:
    """Plain JSON values; None: it did not come to that."""
    begun = next((e["mono"] for e in run.events if e["event"] == "start"), None)
    told, commits = verdict.summary, run.of("commit")
    first: dict[int, float] = {}
    for e in commits:
        first.setdefault(e["replica"], e["mono"])
    everybody = len(first) == told["replicas"] and begun is not None
    times = os.times()
    return {
        "ranks": ranks,
        "start_s": round(max(first.values()) - begun, 1) if everybody and begun is not None else None,
        "steps": told["steps"],
        "step_median_s": told["step_time_median_s"],
        "decisions": len({e["seq"] for e in run.of("decision")}),
        "retries": told["retries"],
        "kills": told["kills"],
        "units": told["units_committed"],
        "cpu_s": round(times.children_user + times.children_system, 1),
        "rank_mb": round(memory.rank_bytes / (1 << 20), 1) or None,
        "problems": list(verdict.problems),
    }
