"""kill -9 of replicas: what it costs the survivors, on keepstep, torchft and (steady state only) plain gloo, in one run.

    make bench-kill        or   .venv/bin/python benchmarks/kill.py --kills 12 --out runs/bench-kill

Three replicas of one process each train the model of kill_model.py. First, in turns, steady steps of each system. Then each
fault-tolerant one runs on while random replicas are killed at random moments; a killed one is started again at once. The next
kill comes when all three have trained together for a while.

    stall         longest gap between two commits of a survivor, from the kill to the first commit without the victim,
                  minus the steady step
    rejoin        longest gap of a survivor in the steps around the victim's return, and after the stall, minus the steady step
    dropped       steps whose gradients were computed and then thrown away by the survivors
    bits          whether replicas that committed the same step hold the same parameters (sampled)

On a machine with fewer cores than processes, whatever the returning replica does (start, build the model, load) takes CPU from
the survivors' own computation, and shows as "rejoin" for every system. `--device-s 0.4` takes most of that out: forward and
backward become a sleep and a batch of one row, as if an accelerator did them.

Prints a table; writes OUT/kill.json.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPLICAS = 3
WARM_UP = 10  # steps after a start or a return that are not steady yet
Row = dict[str, Any]


class System:
    """Something that trains on three replicas, whose processes the driver may kill."""

    name = ""
    tolerant = True

    def __init__(self, folder: Path, steps: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.steps = folder, steps
        self.env = {
            **os.environ, "OMP_NUM_THREADS": "1", "KILL_STEPS": str(steps), "GLOO_SOCKET_IFNAME": "lo",
            "KILL_JOURNAL": str(folder / "journal"), "KILL_SIZE": str(REPLICAS),
        }  # fmt: skip
        self.log = (folder / "output.log").open("wb")

    def spawn(self, command: list[str], **env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *command],
            env={**self.env, **env},
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def start(self) -> None: ...
    def keep_up(self) -> None:
        """Starts again what was killed."""

    def running(self) -> bool:
        raise NotImplementedError

    def stop(self) -> None: ...

    def rows(self) -> list[Row]:
        """Everything the replicas have written, in order of time."""
        found = []
        for path in self.folder.glob("journal.*"):
            for line in path.read_text().splitlines():
                if line.endswith("}"):
                    found.append(json.loads(line))
        return sorted(found, key=lambda r: r["mono"])


class Launched(System):
    """One process, which starts the others and restarts them."""

    process: subprocess.Popen[bytes]

    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        if self.running():
            self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


class Keepstep(Launched):
    name, script = "keepstep", "kill_keepstep.py"
    options: tuple[str, ...] = ()

    def start(self) -> None:
        run = ["-m", "keepstep", "run", "--run-dir", str(self.folder / "run"), "--replicas", str(REPLICAS)]
        self.process = self.spawn([*run, "--max-restarts", "1000", *self.options, str(HERE / self.script)])


class Scripts(System):
    """Processes that the driver starts itself."""

    script = ""

    def start(self) -> None:
        self.processes = {r: self._start_one(r) for r in range(REPLICAS)}

    def _start_one(self, replica: int) -> subprocess.Popen[bytes]:
        path = self.folder / f"journal.{replica}.{time.monotonic_ns()}"
        return self.spawn([str(HERE / self.script)], KILL_REPLICA=str(replica), KILL_JOURNAL=str(path))

    def keep_up(self) -> None:
        for replica, process in self.processes.items():
            if process.poll() not in (None, 0):
                self.processes[replica] = self._start_one(replica)

    def running(self) -> bool:
        return any(p.poll() is None for p in self.processes.values())

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class Gloo(Scripts):
    name, script, tolerant = "gloo", "kill_gloo.py", False

    def start(self) -> None:
        self.env["KILL_RENDEZVOUS"] = str(self.folder / "rendezvous")
        super().start()


class Torchft(Scripts):
    """With join_timeout_ms=100, its default, three replicas on this model never form a quorum of three: they take turns."""

    name, script = "torchft", "kill_torchft.py"
    heartbeat_ms = 5000  # the lighthouse's default

    def start(self) -> None:
        code = (
            "from torchft.coordination import LighthouseServer as L; import sys, threading; "
            f"l = L(bind='127.0.0.1:0', min_replicas=1, join_timeout_ms=10000, heartbeat_timeout_ms={self.heartbeat_ms}); "
            "print(l.address(), flush=True); threading.Event().wait()"
        )
        self.lighthouse = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=self.log, env=self.env, start_new_session=True
        )
        assert self.lighthouse.stdout is not None
        address = self.lighthouse.stdout.readline().decode().strip()
        self.env["TORCHFT_LIGHTHOUSE"] = "http://127.0.0.1:" + address.rsplit(":", 1)[1].strip("/")
        super().start()

    def stop(self) -> None:
        super().stop()
        self.lighthouse.kill()
        self.lighthouse.wait()


class TorchftFast(Torchft):
    name, heartbeat_ms = "torchft, heartbeat 1 s", 1000


# --- measuring -------------------------------------------------------------------------------------------------


def gaps(rows: list[Row], pid: int) -> list[tuple[Row, float]]:
    """Each committed step of one process with the time since its previous one."""
    mine = [r for r in rows if r["pid"] == pid and r["committed"]]
    return [(b, b["mono"] - a["mono"]) for a, b in pairwise(mine)]


def steady_times(rows: list[Row]) -> list[float]:
    """Step times of all processes in full membership, warm-up left out."""
    found = []
    for pid in {r["pid"] for r in rows}:
        found += [gap for row, gap in gaps(rows, pid)[WARM_UP:] if row["members"] == REPLICAS]
    return found


def steady(kind: type[System], folder: Path, steps: int) -> float:
    system = kind(folder, steps)
    system.start()
    try:
        while system.running():
            time.sleep(0.1)
            if len(system.rows()) >= REPLICAS * steps:
                break
    finally:
        system.stop()
    return statistics.median(steady_times(system.rows()))


def together(rows: list[Row], after: float, count: int) -> bool:
    """Whether all three have committed `count` steps in full membership since `after`, and most recently."""
    for replica in range(REPLICAS):
        mine = [r for r in rows if r["replica"] == replica and r["mono"] > after and r["committed"]]
        if len(mine) < count or any(r["members"] != REPLICAS for r in mine[-count:]):
            return False
    newest = {r["replica"]: r["step"] for r in rows}
    return max(newest.values()) - min(newest.values()) <= 1


def with_kills(kind: type[System], folder: Path, kills: int, seed: int, limit_s: float) -> tuple[list[Row], list[Row]]:
    """Runs the system and kills replicas; returns its rows and the kills."""
    rng, system, done = random.Random(seed), kind(folder, 1 << 30), []
    system.start()
    end = time.monotonic() + limit_s
    try:
        since = time.monotonic()
        while time.monotonic() < end and system.running():
            system.keep_up()
            rows = system.rows()
            if together(rows, since, 12):
                if len(done) == kills:
                    break
                time.sleep(rng.random() * 0.5)
                victim = rng.randrange(REPLICAS)
                pid = [r for r in rows if r["replica"] == victim][-1]["pid"]
                os.kill(pid, signal.SIGKILL)
                since = time.monotonic()
                done.append({"replica": victim, "pid": pid, "mono": since})
            time.sleep(0.05)
    finally:
        system.stop()
    return system.rows(), done


def analyse(rows: list[Row], kills: list[Row], step_s: float) -> Row:
    """What the kills cost."""
    stalls, rejoins = [], []
    for kill, following in zip(kills, [*kills[1:], None], strict=True):
        until = following["mono"] if following else float("inf")
        first = {}  # the victim's first committed step of its next life
        for r in rows:
            if r["replica"] == kill["replica"] and kill["mono"] < r["mono"] < until and r["pid"] != kill["pid"]:
                first = first or r
        stall, rejoin = 0.0, None
        for pid in {r["pid"] for r in rows if r["mono"] < kill["mono"]} - {kill["pid"]}:
            after = [(row, gap) for row, gap in gaps(rows, pid) if kill["mono"] < row["mono"] < until]
            over = 0  # steps of the stall
            for row, gap in after:
                stall, over = max(stall, gap), over + 1
                if row["members"] < REPLICAS:
                    break
            if first and after:  # it may be back within a second: the stall does not count twice
                around = [gap for row, gap in after[over:] if first["step"] - 3 <= row["step"] <= first["step"] + 2]
                rejoin = max([*around, rejoin or 0.0])
        stalls.append(stall - step_s)
        if rejoin is not None:
            rejoins.append(rejoin - step_s)
    digests: dict[int, set[str]] = {}
    for r in rows:
        if "digest" in r:
            digests.setdefault(r["step"], set()).add(r["digest"])
    return {
        "kills": len(kills),
        "stall_median_s": statistics.median(stalls),
        "stall_worst_s": max(stalls),
        "rejoins": len(rejoins),
        "rejoin_median_s": statistics.median(rejoins) if rejoins else None,
        "rejoin_worst_s": max(rejoins) if rejoins else None,
        "steps_dropped": len({(r["replica"], r["step"]) for r in rows if not r["committed"]}),
        "sampled_steps": len(digests),
        "sampled_steps_unequal": sum(len(d) > 1 for d in digests.values()),
        "stalls_s": stalls,
        "rejoins_s": rejoins,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="steady measurements of each system")
    parser.add_argument("--steps", type=int, default=60, help="in a steady measurement")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-kill"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=900.0, help="of each system's run with kills")
    parser.add_argument("--device-s", type=float, default=0.0, help="pretend an accelerator computes for so long")
    parser.add_argument("--systems", nargs="*", help="only these, by name")
    args = parser.parse_args()
    os.environ["KILL_DEVICE_S"] = str(args.device_s)
    kinds: list[type[System]] = [Keepstep, TorchftFast, Torchft, Gloo]
    kinds = [k for k in kinds if not args.systems or k.name in args.systems]
    times: dict[str, list[float]] = {k.name: [] for k in kinds if k is not Torchft}
    for turn in range(args.rounds):
        for kind in kinds:
            if kind.name in times:
                times[kind.name].append(steady(kind, args.out / f"steady-{kind.name}-{turn}", args.steps))
                print(f"steady {kind.name:24} {times[kind.name][-1] * 1e3:7.1f} ms a step", flush=True)
    results: dict[str, Row] = {}
    for kind in kinds:
        measured = times.get(kind.name) or times.get(TorchftFast.name) or [0.0]
        results[kind.name] = {"step_s": statistics.median(measured), "steady_s": measured}
        if kind.tolerant:
            rows, kills = with_kills(kind, args.out / f"kills-{kind.name}", args.kills, args.seed, args.limit_s)
            full = statistics.median(steady_times(rows))
            results[kind.name] |= {"step_between_kills_s": full, **analyse(rows, kills, full)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "kill.json").write_text(json.dumps(results, indent=2) + "\n")
    print_table(results)


def print_table(results: dict[str, Row]) -> None:
    gloo = results.get("gloo", {}).get("step_s")
    print(f"\n{'':24} {'step':>8} {'/gloo':>6} {'kills':>6} {'stall':>15} {'rejoin':>15} {'dropped':>8} {'bits':>10}")
    print(
        f"{'':24} {'ms':>8} {'':>6} {'':>6} {'median/worst s':>15} {'median/worst s':>15} {'steps':>8} {'unequal':>10}"
    )
    for name, r in results.items():
        ratio = f"{r['step_s'] / gloo:.2f}" if gloo else "-"
        line = f"{name:24} {r['step_s'] * 1e3:8.1f} {ratio:>6}"
        if "kills" in r:
            rejoin = f"{r['rejoin_median_s']:.2f}/{r['rejoin_worst_s']:.2f}" if r["rejoins"] else "-"
            line += f" {r['kills']:6} {r['stall_median_s']:8.2f}/{r['stall_worst_s']:.2f} {rejoin:>15}"
            line += f" {r['steps_dropped']:8} {r['sampled_steps_unequal']:5}/{r['sampled_steps']}"
        print(line)


if __name__ == "__main__":
    main()
