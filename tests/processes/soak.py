"""A job under continuous random failures: `make soak FAILURES=2000`.

Four replicas train; every few steps one of their processes is killed (kill -9, SIGSEGV, SIGTERM) or frozen for longer than its
lease, or two are killed at once; short freezes, which must cost nothing, come in between. One healthy worker is left. At the
end, all replicas must hold the bits that one process gets from the same units, every unit trained exactly once, nothing may be
left running, and no process that lived through it all may have grown. Then as many units are trained undisturbed: the losses are
compared. Writes RUN_DIR/soak.json and soak.png; the last line tells the result.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from jobs import SCRIPTS, Result, finish, kill_all, processes_of, run, start
from matrix import same_as_reference
from test_training import check

sys.path.insert(0, str(SCRIPTS))

import train_tiny

REPLICAS = 4
KINDS = {"SIGKILL": 60, "SIGSEGV": 8, "SIGTERM": 8, "two at once": 8, "frozen": 4, "short freeze": 12}
FREEZES_S = {"frozen": 6.0, "short freeze": 0.3}  # thawed after so long; a lease is 2 s
STALL_S = 90.0  # without a step: a violation
CALM = 60  # steps at the end in which nothing fails, so that everybody comes back


class Watched:
    """What the events say, read as they come."""

    def __init__(self, run_dir: Path) -> None:
        self._folder, self._at = run_dir / "events", dict[Path, int]()
        self.step = -1
        self.workers: dict[int, int] = {}  # replica: the last step it committed as a worker
        self.pids: dict[int, list[int]] = {}
        self.trained: dict[int, bool] = {}  # whether the life of now has committed anything

    def look(self) -> None:
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._at.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            self._at[path] = self._at.get(path, 0) + len(whole) + bool(whole)
            for line in whole.splitlines():
                self._note(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "spawn":
            self.pids[event["replica"]], self.trained[event["replica"]] = event["pids"], False
        elif event["event"] == "commit":
            self.step = max(self.step, event["step"])
            if event["role"] == "worker":
                self.workers[event["replica"]] = event["step"]
                self.trained[event["replica"]] = True

    def healthy(self) -> list[int]:
        """Replicas that trained just now."""
        return [r for r, step in self.workers.items() if step >= self.step - 1 and self.trained.get(r)]


class Sampler:
    """What the processes that live through it all hold, and how many files there are."""

    def __init__(self, launcher: int, run_dir: Path) -> None:
        self._launcher, self._run_dir, self._began = psutil.Process(launcher), run_dir, time.monotonic()
        self.rows: list[dict[str, float]] = []

    def sample(self) -> None:
        row: dict[str, float] = {"at_s": time.monotonic() - self._began}
        children = self._launcher.children(recursive=True)
        processes = {"launcher": self._launcher, **self._lasting(children)}
        for name, process in processes.items():
            with process.oneshot():
                row[f"{name} MB"] = process.memory_info().rss / 1e6
                row[f"{name} descriptors"] = process.num_fds()
                row[f"{name} threads"] = process.num_threads()
        row["processes"] = len(children) + 1
        job = {self._launcher.pid, *(p.pid for p in children)}
        row["sockets"] = sum(c.pid in job for c in psutil.net_connections("tcp"))
        self.rows.append(row)

    def _lasting(self, children: list[psutil.Process]) -> dict[str, psutil.Process]:
        """etcd and the zygote: the oldest with that command line, since ranks are forked from it."""
        found: dict[str, psutil.Process] = {}
        for process in sorted(children, key=lambda p: p.create_time()):
            try:
                command = process.cmdline()
            except psutil.NoSuchProcess:  # a rank that has just died
                continue
            for name, part in (("etcd", "--listen-client-urls"), ("zygote", "keepstep.launch.zygote")):
                if part in command:
                    found.setdefault(name, process)
        return found

    def growth(self) -> dict[str, tuple[float, float]]:
        """Medians of the second and of the last quarter."""
        quarter = len(self.rows) // 4
        early, late = self.rows[quarter : 2 * quarter], self.rows[-quarter:]
        names = [name for name in self.rows[-1] if name != "at_s"] if quarter else []
        return {n: (_median([r[n] for r in early if n in r]), _median([r[n] for r in late if n in r])) for n in names}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def disturb(watched: Watched, rng: random.Random, kind: str) -> int:
    """Does it to a random replica, and leaves a healthy one alone. Returns how many failures that were; 0: not possible now."""
    healthy = watched.healthy()
    able = [r for r, trained in watched.trained.items() if trained]
    count = 2 if kind == "two at once" else 1
    if len(healthy) < 2 or len(able) < count + 1:
        return 0
    spared = rng.choice(healthy)
    victims = rng.sample([r for r in able if r != spared], count)
    for replica in victims:
        pid = rng.choice(watched.pids[replica])
        sent = {
            "SIGSEGV": signal.SIGSEGV,
            "SIGTERM": signal.SIGTERM,
            "frozen": signal.SIGSTOP,
            "short freeze": signal.SIGSTOP,
        }
        try:
            os.kill(pid, sent.get(kind, signal.SIGKILL))
        except ProcessLookupError:
            return 0
        if kind in FREEZES_S:
            thaw = threading.Timer(FREEZES_S[kind], _thaw, [pid])
            thaw.daemon = True
            thaw.start()
        if kind == "frozen":
            watched.workers.pop(replica, None)  # it trains again in the same life: healthy once it says so
        elif kind != "short freeze":
            watched.trained[replica] = False
    return 0 if kind == "short freeze" else count


def _thaw(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass  # somebody else has killed it meanwhile


def soak(run_dir: Path, failures: int, gap: int, seed: int) -> tuple[dict[str, Any], Result, Sampler]:
    rng, done, kinds = random.Random(seed), 0, Counter[str]()
    steps = failures * gap * 3 + CALM  # some are due, and not possible just then
    args = options(steps)
    process = start(run_dir, "--replicas", str(REPLICAS), "--max-restarts", str(10 * failures), args=args)
    began = moved = time.monotonic()
    try:
        watched, sampler, pause = Watched(run_dir), Sampler(process.pid, run_dir), threading.Event()
        due, sampled, last = 30, 0.0, -1
        while watched.step < steps - CALM and process.poll() is None:
            pause.wait(rng.uniform(0.01, 0.05))
            watched.look()
            now = time.monotonic()
            if watched.step > last:
                last, moved = watched.step, now
            assert now - moved < STALL_S, f"no step for {STALL_S:.0f} s after step {last}"
            if now - sampled > 5:
                sampler.sample()
                sampled = now
                print(f"\r{now - began:6.0f} s  step {last}  {done} failures", end="", file=sys.stderr, flush=True)
            if last >= due and done < failures:
                kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
                count = disturb(watched, rng, kind)
                if count or kind == "short freeze":
                    done, due = done + count, last + max(1, round(gap * count * rng.uniform(0.5, 1.5)))
                    kinds[kind] += 1
        took = time.monotonic() - began
        result = finish(process, run_dir, 300)
    finally:
        kill_all(run_dir)
    report = {
        "failures": done, "seconds": took, "one_every_s": took / max(1, done), "kinds": dict(kinds),
        "steps": len(result.committed()),
        "units": len(result.units()), "lives": len(result.of("spawn")), "seed": seed,
    }  # fmt: skip
    return report, result, sampler


def options(steps: int) -> tuple[str, ...]:
    return ("--steps", str(steps), "--step-seconds", "0.03", "--gamma", "1.0", "--epochs", "1000", "--final-loss")


def loss_of(run_dir: Path) -> float:
    return float(next(run_dir.glob("loss-*")).read_text())


def draw(sampler: Sampler, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = ("MB", "descriptors", "threads", "processes", "sockets")
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 12), sharex=True)
    for axis, panel in zip(axes, panels, strict=True):
        for name in sorted({n for row in sampler.rows for n in row if n.endswith(panel)}):
            points = [(row["at_s"] / 60, row[name]) for row in sampler.rows if name in row]
            axis.plot(*zip(*points, strict=True), label=name)
        axis.set_ylabel(panel)
        axis.set_ylim(bottom=0)
        axis.legend(loc="lower right", fontsize=8)
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=2000)
    parser.add_argument("--gap", type=int, default=8, help="steps from one failure to the next, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=None)
    args = parser.parse_args()
    folder = args.run_dir or Path(tempfile.mkdtemp(prefix="keepstep-soak-"))
    run_dir = folder / "disturbed"
    report, result, sampler = soak(run_dir, args.failures, args.gap, args.seed)
    check(result, REPLICAS)
    same_as_reference(result, train_tiny.arguments().parse_args(options(0)))
    assert not list(processes_of(run_dir)), "processes were left behind"
    report["growth"] = sampler.growth()
    calm = run(
        folder / "undisturbed", "--replicas", str(REPLICAS), args=options(report["units"] // REPLICAS), timeout=36_000
    )
    check(calm, REPLICAS)
    report["loss"], report["loss_undisturbed"] = loss_of(run_dir), loss_of(folder / "undisturbed")
    (folder / "soak.json").write_text(json.dumps(report, indent=1))
    (folder / "samples.json").write_text(json.dumps(sampler.rows))
    draw(sampler, folder / "soak.png")
    print(json.dumps(report, indent=1), f"\nresults in {folder}")
    grown = {n: (a, b) for n, (a, b) in report["growth"].items() if b > a * 1.25 + 3}
    assert not grown, f"these have grown: {grown}"
    print(
        f"soak: {report['failures']} failures, one every {report['one_every_s']:.1f} s, {report['steps']} steps, 0 violations"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
