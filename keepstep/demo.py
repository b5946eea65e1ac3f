"""`keepstep demo`: trains the example on three replicas, kills two of its processes, and proves that nothing was lost.

It runs `keepstep run` like anybody would, as a process of its own, with two faults asked for: SIGKILL to a random rank in the
middle of a step, later to a leader. Meanwhile it reads the event files and says how training goes: one moving line on a
terminal, a line every few seconds in a plain log.

Fails: exit code 1 if the run failed, the replicas' states differ or a unit was lost or trained twice; 78 with one sentence if it
cannot start. Ctrl-C ends the run too.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keepstep.observe.picture import draw
from keepstep.observe.records import Record, read_run, whole_lines
from keepstep.observe.summary import summarize
from keepstep.protocol.errors import EX_CONFIG, ConfigError

REPLICAS, RANKS = 3, 2
SEQ_LEN = 128  # bytes, the tokens of the example, in a sample
MARK = ".keepstep-demo"  # a directory that holds it was made by us and may be emptied
MID_STEP = ("backward", "in_exchange")
LEADER_PHASES = ("forward", "before_vote", "between_vote_and_commit", "optimizer_step")
POLL_S, PLAIN_LINE_S, RATE_WINDOW_S = 0.25, 5.0, 5.0
LEAST_STEPS = 60


def demo(
    run_dir: Annotated[Path, typer.Option(help="where events, logs, summary.json and picture.png go")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(help="optimizer updates")] = 160,
    quick: Annotated[bool, typer.Option("--quick", help="100 steps: about a minute")] = False,
    seed: Annotated[
        int | None, typer.Option(help="who is killed, and when; printed, so that you can repeat it")
    ] = None,
) -> None:
    """Watch a model train, a replica die, the others go on, the dead one catch up."""
    console = Console(highlight=False)
    try:
        ok = run_demo(console, run_dir, 100 if quick else steps, random.randrange(10_000) if seed is None else seed)
    except ConfigError as error:
        print(f"keepstep: {error}", file=sys.stderr)
        raise typer.Exit(EX_CONFIG) from None
    raise typer.Exit(0 if ok else 1)


def run_demo(console: Console, run_dir: Path, steps: int, seed: int) -> bool:
    """Runs all of it; True if the run ended well and its proof holds."""
    if steps < LEAST_STEPS:
        raise ConfigError(f"--steps must be at least {LEAST_STEPS}, so that the killed replicas have time to come back")
    script = find_example()
    prepare(run_dir)
    faults = choose_faults(steps, seed)
    console.print(f"[bold]{REPLICAS} replicas x {RANKS} ranks[/] train {script.name} for {steps} steps (--seed {seed})")
    console.print(f"everything it writes is in {run_dir}")
    code = _train(console, run_dir, script, steps, faults)
    run = read_run(run_dir)
    summary = summarize(run)
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(run, run_dir / "picture.png")
    problems = find_problems(summary, code, len(faults))
    console.print(summary_table(summary))
    console.print(f"picture: {run_dir / 'picture.png'}   numbers: {run_dir / 'summary.json'}")
    for problem in problems:
        console.print(f"[bold red]FAILED[/] {problem}")
    if code:
        console.print(
            "".join((run_dir / "output.log").read_text(errors="replace").splitlines(keepends=True)[-20:]), markup=False
        )
    return not problems


def find_example() -> Path:
    """The example script: it lives in the source checkout, not in the installed package."""
    script = Path(__file__).resolve().parent.parent / "examples" / "train_fsdp.py"
    if not script.exists():
        raise ConfigError(
            "the demo runs examples/train_fsdp.py of a source checkout: clone keepstep and run `make demo` there"
        )
    return script


def prepare(run_dir: Path) -> None:
    """An empty run directory. Never deletes what the demo has not made."""
    if (run_dir / MARK).exists():
        shutil.rmtree(run_dir)
    elif run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError(f"{run_dir} holds something that the demo has not made: choose another --run-dir")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / MARK).touch()
    except OSError as error:
        raise ConfigError(f"cannot write to --run-dir {run_dir}: {error.strerror}") from None


def choose_faults(steps: int, seed: int) -> tuple[str, ...]:
    """First any rank, in the middle of a step; then the leader of another replica, at any point."""
    rng = random.Random(seed)
    first, second = rng.sample(range(REPLICAS), 2)
    early = rng.randint(steps // 8, steps // 6)
    late = rng.randint(steps * 5 // 10, steps * 6 // 10)
    return (
        f"kill replica={first} rank={rng.randrange(RANKS)} step={early} phase={rng.choice(MID_STEP)}",
        f"kill replica={second} rank=0 step={late} phase={rng.choice(LEADER_PHASES)}",
    )


# --- the run and its progress ----------------------------------------------------------------------------------


def _train(console: Console, run_dir: Path, script: Path, steps: int, faults: tuple[str, ...]) -> int:
    command = [sys.executable, "-m", "keepstep", "run", "--run-dir", str(run_dir)]
    command += ["--replicas", str(REPLICAS), "--ranks-per-replica", str(RANKS)]
    command += [part for fault in faults for part in ("--fault", fault)]
    command += [str(script), "--", "--steps", str(steps), "--seq-len", str(SEQ_LEN)]
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with (run_dir / "output.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
        try:
            return _watch(console, run_dir, process, steps)
        except KeyboardInterrupt:  # the terminal sent it to the run as well
            console.print("stopping")
            return 128 + signal.SIGINT
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leaves nothing running, whatever ended us."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch(console: Console, run_dir: Path, process: "subprocess.Popen[bytes]", steps: int) -> int:
    tail, progress, said = Tail(run_dir), Progress(steps=steps), time.monotonic()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        code = None
        while code is None:
            code = process.poll()  # before reading, so that the last events are read too
            for line in progress.feed(tail.read()):
                console.print(line)
            if console.is_terminal:
                live.update(Text(progress.line(time.monotonic())), refresh=True)
            elif time.monotonic() - said >= PLAIN_LINE_S or code is not None:
                said = time.monotonic()
                console.print(progress.line(said), markup=False)
            if code is None:
                time.sleep(POLL_S)
    return code


class Tail:
    """Reads what was appended to a run's records since the last look."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Record]:
        """New records of all files, in order of time; a half-written line waits for its end."""
        records: list[Record] = []
        for path in [*(self._run_dir / "events").glob("*.jsonl"), self._run_dir / "faults.jsonl"]:
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + (1 if whole else 0)
            records += whole_lines(whole.decode(errors="replace").splitlines())
        return sorted(records, key=lambda r: float(r["mono"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The newest step that was committed, and when it was (monotonic seconds)."""

    step: int
    loss: float | None
    samples: int
    members: int
    workers: int
    mono: float


class Progress:
    """How training goes, in words."""

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._recent: deque[Commit] = deque()
        self._lives: dict[int, str] = {}

    def feed(self, records: list[Record]) -> list[str]:
        """Takes new records in; returns what deserves a line of its own."""
        lines = []
        for record in records:
            if record.get("action") == "kill":
                where = f"replica {record['replica']} rank {record['rank']}"
                lines.append(
                    f"[bold red]kill -9[/] {where}, step {record['step']}, {record['phase'].replace('_', ' ')}"
                )
            elif record.get("event") == "commit":
                lines += self._commit(record)
        return lines

    def _commit(self, record: Record) -> list[str]:
        known = self._recent[-1].step if self._recent else -1
        if record["step"] > known:
            names = ("step", "loss", "samples", "members", "workers", "mono")
            self._recent.append(Commit(**{name: record[name] for name in names}))
            while self._recent[0].mono < record["mono"] - RATE_WINDOW_S:
                self._recent.popleft()
        if record.get("role") != "worker":
            return []
        before, now = self._lives.get(record["replica"]), record["incarnation"]
        self._lives[record["replica"]] = now
        if before in (None, now):
            return []
        return [
            f"[bold green]back[/] replica {record['replica']} has caught up and trains again, step {record['step']}"
        ]

    def line(self, now: float) -> str:
        """Step, loss, members, speed."""
        if not self._recent:
            return "starting: importing torch, building the model, reading the data ..."
        newest, oldest = self._recent[-1], self._recent[0]
        span = max(newest.mono, now - RATE_WINDOW_S) - oldest.mono
        rate = sum(c.samples for c in self._recent if c is not oldest) / span if span > 0 else 0.0
        loss = "-" if newest.loss is None else f"{newest.loss:.3f}"
        catching_up = newest.members - newest.workers
        who = f"{newest.workers} workers" + (f" + {catching_up} catching up" if catching_up else "")
        return f"step {newest.step + 1}/{self._steps}   loss {loss}   {who}   {rate * SEQ_LEN:,.0f} tokens/s"


# --- the end ---------------------------------------------------------------------------------------------------


def find_problems(summary: Record, code: int, kills: int) -> list[str]:
    """Everything that the demo promises and did not keep, in words."""
    promises = [
        (code == 0, f"the run exited with code {code}"),
        (summary["digests_equal"], "the replicas do not all end with the same state"),
        (summary["units_lost"] == 0, f"{summary['units_lost']} units were lost"),
        (summary["units_duplicated"] == 0, f"{summary['units_duplicated']} units were trained twice"),
        (summary["ledgers_agree"], "the replicas' ledgers do not match what was committed"),
        (len(summary["kills"]) == kills, f"only {len(summary['kills'])} of {kills} kills took place"),
    ]
    return [words for kept, words in promises if not kept]


def summary_table(summary: Record) -> Table:
    """The summary for people."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    digests = sorted(set(summary["state_digest"].values()))
    same = "equal on all replicas" if summary["digests_equal"] else "[bold red]DIFFERENT[/]"
    table.add_row("state digest", f"{', '.join(digests) or 'none'} ({same})")
    lost, twice = summary["units_lost"], summary["units_duplicated"]
    table.add_row("units of data", f"{summary['units_committed']} trained, {lost} lost, {twice} trained twice")
    for kill in summary["kills"]:
        table.add_row(f"kill at step {kill['step']}", _kill_in_words(kill))
    table.add_row("loss", f"{_number(summary['loss_first'], 3)} -> {_number(summary['loss_last'], 3)}")
    table.add_row("steps", f"{summary['steps']}, median {_number(summary['step_time_median_s'], 3)} s")
    return table


def _kill_in_words(kill: Record) -> str:
    return (
        f"replica {kill['replica']} rank {kill['rank']}, {str(kill['phase']).replace('_', ' ')}: "
        f"seen after {_number(kill['detected_s'], 3)} s, survivors stalled {_number(kill['stall_s'], 2)} s; "
        f"back at step {kill['rejoined_at_step'] or '-'}, which cost the others {_number(kill['rejoin_stall_s'], 2)} s"
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
