"""The launcher with small scripts: exits, restarts, signals, and nothing left behind."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import command, finish, kill_all, processes_of, read_events, run, start, wait_until

from keepstep.launch.processes import Life, Output, start_cold
from keepstep.launch.screen import HELD_MAX, Screen
from keepstep.protocol.ids import Incarnation

# A rank that trains nothing, but says so as the real ones do, so that the launcher takes its lives for fruitful.
PREFACE = """
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
run_dir, life = Path(os.environ["KEEPSTEP_RUN_DIR"]), int(os.environ["KEEPSTEP_LIFE"])
replica, rank = int(os.environ["REPLICA_ID"]), int(os.environ["RANK"])
def say(event):
    if rank == 0:
        name = f"replica{replica}-rank0-{os.environ['KEEPSTEP_INCARNATION']}.jsonl"
        with (run_dir / "events" / name).open("a") as file:
            file.write(json.dumps({"event": event, "mono": time.monotonic()}) + "\\n")
say("commit")
print("hello from", replica, rank, life, flush=True)
"""
FOREVER = "threading.Event().wait()\n"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(PREFACE + body)
        return path

    return write


def spawned(run_dir: Path) -> list[dict[str, Any]]:
    return [e for e in read_events(run_dir) if e["event"] == "spawn"]


def test_a_job_that_ends_well(tmp_path: Path, script: Callable[[str], Path]) -> None:
    result = run(
        tmp_path / "run", "--replicas", "2", "--ranks-per-replica", "2", script=script("say('final')\n"), args=("x",)
    )
    assert result.code == 0, result.output
    for replica in range(2):
        for rank in range(2):
            assert f"[r{replica}.k{rank}] hello from {replica} {rank} 1" in result.output
            log = (tmp_path / "run" / "logs" / f"replica{replica}-rank{rank}.log").read_text()
            assert f"\nhello from {replica} {rank} 1\n" in log, "without the prefix"
    assert "logs are in" in result.output
    assert not (tmp_path / "run" / "token").exists()
    assert not list(processes_of(tmp_path / "run"))


def test_only_the_replica_that_died_is_restarted(tmp_path: Path, script: Callable[[str], Path]) -> None:
    body = """
if replica == 1 and rank == 1 and life == 1:
    sys.exit(3)
while not list(run_dir.glob("go-*")):
    if replica == 1 and life == 2:
        (run_dir / "go-1").touch()
    threading.Event().wait(0.01)
say("final")
"""
    result = run(tmp_path / "run", "--replicas", "2", "--ranks-per-replica", "2", script=script(body))
    assert result.code == 0, result.output
    lives = [(e["replica"], e["life"]) for e in result.of("spawn")]
    assert sorted(lives) == [(0, 1), (1, 1), (1, 2)]
    assert len({e["incarnation"] for e in result.of("spawn")}) == 3
    first = [(e["rank"], e["code"]) for e in result.of("exit") if e["replica"] == 1 and e["life"] == 1]
    assert sorted(first) == [(0, -9), (1, 3)], "the rest of the replica is ended"
    log = (tmp_path / "run" / "logs" / "replica1-rank0.log").read_text()
    assert "life 1" in log
    assert "life 2" in log


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path: Path, script: Callable[[str], Path], how: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    body = "subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\n" + FOREVER
    process = start(run_dir, "--replicas", "2", "--ranks-per-replica", "2", script=script(body))
    try:
        wait_until(lambda: len(list((run_dir / "events").glob("replica*"))) == 2)
        process.send_signal(how)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 128 + how, output
        wait_until(lambda: not list(processes_of(run_dir)))
    finally:
        kill_all(run_dir)


def test_a_second_signal_does_not_wait(tmp_path: Path, script: Callable[[str], Path]) -> None:
    run_dir = tmp_path / "run"
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('begun')\nwhile True:\n    threading.Event().wait(1)\n"
    process = start(run_dir, "--replicas", "1", script=script(body))
    try:
        wait_until(lambda: any(e["event"] == "begun" for e in read_events(run_dir)))
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        while "SIGINT: ending every rank" not in process.stdout.readline():
            assert process.poll() is None
        second = time.monotonic()
        process.send_signal(signal.SIGINT)
        result = finish(process, run_dir, 30)
        assert result.code == 130, result.output
        assert "the job was ended by SIGINT" in result.output
        (end,) = result.of("exit")
        assert end["code"] == -9
        assert end["mono"] - second < 4.0, "the grace is 5 s"
    finally:
        kill_all(run_dir)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path, script: Callable[[str], Path]) -> None:
    """kill -9: ranks and etcd die with it (the kernel), what the ranks had started soon after (the guard)."""
    run_dir = tmp_path / "run"
    body = (
        "subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\nsay('begun')\n"
        + FOREVER
    )
    process = start(run_dir, "--replicas", "2", script=script(body))
    try:
        wait_until(lambda: sum(e["event"] == "begun" for e in read_events(run_dir)) == 2)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 6
        process.kill()
        process.communicate(timeout=30)
        wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family))
        wait_until(lambda: not list(processes_of(run_dir)))
    finally:
        kill_all(run_dir)


def test_what_a_dead_rank_had_started_dies_too(tmp_path: Path, script: Callable[[str], Path]) -> None:
    body = """
if life == 1:
    orphan = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"], start_new_session=True)
    (run_dir / "orphan").write_text(str(orphan.pid))
    os.kill(os.getpid(), signal.SIGKILL)
say("final")
"""
    result = run(tmp_path / "run", "--replicas", "1", script=script(body))
    assert result.code == 0, result.output
    assert not psutil.pid_exists(int((tmp_path / "run" / "orphan").read_text()))


def test_what_a_healthy_replica_has_started_lives_on(tmp_path: Path, script: Callable[[str], Path]) -> None:
    """A daemon is orphaned onto the launcher, which must not take it for one of the replica that dies."""
    body = """
if replica == 1:
    forever = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    spawn = f"import subprocess; print(subprocess.Popen({forever!r}, start_new_session=True, stdout=-3, stderr=-3).pid)"
    daemon = int(subprocess.run([sys.executable, "-c", spawn], capture_output=True, check=True).stdout)
    (run_dir / "part").write_text(str(daemon))
    (run_dir / "part").rename(run_dir / "daemon")
    while "restart" not in (run_dir / "events" / "launcher.jsonl").read_text():
        threading.Event().wait(0.01)
    print("the daemon is", Path(f"/proc/{daemon}/stat").read_text().split()[2], flush=True)
else:
    while not (run_dir / "daemon").exists():
        threading.Event().wait(0.01)
    if life == 1:
        sys.exit(3)
say("final")
"""
    result = run(tmp_path / "run", "--replicas", "2", script=script(body))
    assert result.code == 0, result.output
    assert "[r1.k0] the daemon is S" in result.output
    assert not psutil.pid_exists(int((tmp_path / "run" / "daemon").read_text())), "it ends with its own replica"


def test_a_crash_loop_ends_and_names_its_cause(tmp_path: Path, script: Callable[[str], Path]) -> None:
    path = script("")
    path.write_text("raise ValueError('no such thing')\n")
    result = run(tmp_path / "run", "--replicas", "2", script=path)
    assert result.code == 1
    for replica in range(2):
        assert f"replica {replica} is given up" in result.output
    assert "ValueError: no such thing" in result.output
    last = result.output.splitlines()[-1]
    assert "rank 0 failed first; logs are in" in last
    assert max(e["life"] for e in result.of("spawn")) == 2


def test_a_crash_loop_that_trains_a_little_uses_up_its_budget_and_is_named(
    tmp_path: Path, script: Callable[[str], Path]
) -> None:
    body = """
if replica == 0:
    print("RuntimeError: the disk is odd" if life == 1 else "RuntimeError: out of memory", flush=True)
    sys.exit(1)
while "gave_up" not in (run_dir / "events" / "launcher.jsonl").read_text():
    threading.Event().wait(0.01)
say("final")
"""
    result = run(tmp_path / "run", "--replicas", "2", "--max-restarts", "3", script=script(body))
    assert result.code == 0, result.output
    assert sorted(e["life"] for e in result.of("spawn") if e["replica"] == 0) == [1, 2, 3, 4]
    assert (
        "replica 0 is given up: it has been restarted 3 times in 3600 s (--max-restarts, --restart-window); 3 of 4 "
        "failures said: RuntimeError: out of memory (its first failure said: RuntimeError: the disk is odd)"
    ) in result.output


def test_exit_code_93_is_not_restarted_and_the_others_go_on(tmp_path: Path, script: Callable[[str], Path]) -> None:
    body = """
if replica == 0:
    sys.exit(93)
while "gave_up" not in (run_dir / "events" / "launcher.jsonl").read_text():
    threading.Event().wait(0.01)
say("final")
"""
    result = run(tmp_path / "run", "--replicas", "2", script=script(body))
    assert result.code == 0, result.output
    assert [(e["replica"], e["life"]) for e in result.of("spawn")] == [(0, 1), (1, 1)]


def test_a_rank_that_only_misses_another_one_is_not_the_cause(tmp_path: Path, script: Callable[[str], Path]) -> None:
    """It may well be the first to end."""
    body = """
if rank == 1:
    print("keepstep: rank 0 is gone", flush=True)
    sys.exit(75)
while '"exit"' not in (run_dir / "events" / "launcher.jsonl").read_text():
    threading.Event().wait(0.01)
print("keepstep: the true cause", flush=True)
sys.exit(93)
"""
    result = run(tmp_path / "run", "--replicas", "1", "--ranks-per-replica", "2", script=script(body))
    assert result.code == 1, result.output
    assert [(e["rank"], e["code"]) for e in result.of("exit")] == [(1, 75), (0, 93)]
    assert [e["reason"] for e in result.of("gave_up")] == ["the true cause"]
    assert "replica 0 rank 0 failed first" in result.output.splitlines()[-1]


@pytest.mark.parametrize("other", ["os.kill(os.getpid(), signal.SIGSTOP)", "sys.exit(75)"], ids=["frozen", "too"])
def test_a_replica_whose_cause_stays_silent_is_restarted(
    tmp_path: Path, script: Callable[[str], Path], other: str
) -> None:
    body = f"""
if life == 1 and rank == 1:
    sys.exit(75)
elif life == 1:
    {other}
say("final")
"""
    patch = "replica_keeper.CAUSE_S = 0.5"
    result = patched_run(tmp_path, script(body), patch, "--ranks-per-replica", "2")
    assert result.returncode == 0, result.stderr
    events = read_events(tmp_path / "run")
    assert [e["life"] for e in events if e["event"] == "spawn"] == [1, 2]
    assert result.stderr.count("exited with code 75; the rest of the replica is ended") == 1, result.stderr


def test_a_mistake_of_the_last_replica_does_not_undo_what_the_others_did(
    tmp_path: Path, script: Callable[[str], Path]
) -> None:
    body = """
if replica == 0:
    say("final")
    sys.exit(0)
while "replica_done" not in (run_dir / "events" / "launcher.jsonl").read_text():
    threading.Event().wait(0.01)
print("keepstep: this replica does not fit", flush=True)
sys.exit(78)
"""
    result = run(tmp_path / "run", "--replicas", "2", script=script(body))
    assert result.code == 0, result.output
    assert [(e["replica"], e["reason"]) for e in result.of("gave_up")] == [(1, "this replica does not fit")]


@pytest.mark.parametrize("frozen", [0, 1], ids=["leader", "other"])
def test_a_frozen_rank_does_not_hold_the_end_up(tmp_path: Path, script: Callable[[str], Path], frozen: int) -> None:
    body = f"""
if replica == 1:
    if rank == {frozen}:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()
say("final")
"""
    shape = ("--replicas", "2", "--ranks-per-replica", "2", "--finish-grace", "0.5")
    result = run(tmp_path / "run", *shape, script=script(body), timeout=30)
    assert result.code == 0, result.output
    assert [e["replica"] for e in result.of("replica_done")] == [0]
    assert [e["replica"] for e in result.of("gave_up")] == [1]
    assert "replica 1 is given up: another replica finished 0.5 s ago" in result.output
    assert not result.of("restart")
    assert not list(processes_of(tmp_path / "run"))


def test_what_a_script_does_after_training_is_not_cut_short(tmp_path: Path, script: Callable[[str], Path]) -> None:
    body = """
if replica == 2:
    threading.Event().wait()
say("final")
while replica == 1 and "gave_up" not in (run_dir / "events" / "launcher.jsonl").read_text():
    threading.Event().wait(0.01)
print("the model is saved", flush=True)
"""
    result = run(tmp_path / "run", "--replicas", "3", "--finish-grace", "0.5", script=script(body), timeout=30)
    assert result.code == 0, result.output
    assert [e["replica"] for e in result.of("replica_done")] == [0, 1]
    assert [e["replica"] for e in result.of("gave_up")] == [2]
    assert "[r1.k0] the model is saved" in result.output
    assert not result.of("restart"), "who was given up stays so"


def test_the_embedded_etcd_is_started_again(tmp_path: Path, script: Callable[[str], Path]) -> None:
    run_dir = tmp_path / "run"
    body = """
while not (run_dir / "go").exists():
    threading.Event().wait(0.01)
say("final")
"""
    process = start(run_dir, "--replicas", "1", script=script(body))
    try:
        wait_until(lambda: list((run_dir / "events").glob("replica*")))
        (etcd,) = [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == "etcd"]
        etcd.kill()
        wait_until(lambda: any(e["event"] == "etcd" for e in read_events(run_dir)))
        (run_dir / "go").touch()
        result = finish(process, run_dir, 60)
        assert result.code == 0, result.output
        assert "starting it again" in result.output
    finally:
        kill_all(run_dir)


def test_ranks_start_cold_when_the_forking_process_is_gone(tmp_path: Path, script: Callable[[str], Path]) -> None:
    run_dir = tmp_path / "run"
    body = """
while not (run_dir / "go").exists():
    threading.Event().wait(0.01)
if life == 1:
    os.kill(os.getpid(), signal.SIGKILL)
say("final")
"""
    process = start(run_dir, "--replicas", "1", script=script(body))
    try:
        wait_until(lambda: list((run_dir / "events").glob("replica*")))
        ranks = {pid for e in spawned(run_dir) for pid in e["pids"]}
        family = psutil.Process(process.pid).children()
        (zygote,) = [p for p in family if "keepstep.launch.zygote" in p.cmdline() and p.pid not in ranks]
        zygote.kill()
        (run_dir / "go").touch()
        result = finish(process, run_dir, 60)
        assert result.code == 0, result.output
        assert "started cold from now on" in result.output
        assert len(spawned(run_dir)) == 2
    finally:
        kill_all(run_dir)


def test_odd_output_is_shown_and_kept(tmp_path: Path, script: Callable[[str], Path]) -> None:
    body = r"""
os.write(1, b"\xff\xfe\n")
os.write(1, b"x" * 200_000 + b"\n")
os.write(2, b"no newline at the end")
say("final")
"""
    result = run(tmp_path / "run", "--replicas", "1", script=script(body))
    assert result.code == 0, result.output[-2000:]
    assert "[r0.k0] no newline at the end" in result.output
    assert b"x" * 200_000 in (tmp_path / "run" / "logs" / "replica0-rank0.log").read_bytes()


def test_the_events_tell_the_story(tmp_path: Path, script: Callable[[str], Path]) -> None:
    run(tmp_path / "run", "--replicas", "1", script=script("say('final')\n"))
    lines = (tmp_path / "run" / "events" / "launcher.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "spawn", "exit", "replica_done", "end"]


def patched_run(tmp_path: Path, script: Path, patch: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`keepstep run` with something in it changed or broken."""
    program = f"from keepstep.launch import replica_keeper\nfrom keepstep.cli import main\n{patch}\nmain()\n"
    options = command(tmp_path / "run", "--replicas", "1", *more, script=script)[3:]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    try:
        return subprocess.run(
            [sys.executable, "-c", program, *options], capture_output=True, text=True, timeout=60, env=env, check=False
        )
    finally:
        kill_all(tmp_path / "run")


def test_a_bug_of_the_launcher_ends_the_job_instead_of_hanging(tmp_path: Path, script: Callable[[str], Path]) -> None:
    patch = "replica_keeper.ReplicaKeeper._after_life = lambda *_: 1 / 0"
    result = patched_run(tmp_path, script("say('final')\n"), patch)
    assert result.returncode == 1, result.stderr
    assert "keepstep: the launcher itself has failed" in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_a_machine_without_etcd(tmp_path: Path, script: Callable[[str], Path]) -> None:
    patch = """
import keepstep.runtime.etcd_server as etcd_server
def find_etcd():
    raise etcd_server.ConfigError("no etcd server was found")
etcd_server.find_etcd = find_etcd
"""
    result = patched_run(tmp_path, script(""), patch)
    assert (result.returncode, result.stderr) == (78, "keepstep: no etcd server was found\n")


def test_output_that_can_be_neither_kept_nor_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, and a terminal that knows no accents, must not keep an exit from being seen."""
    shown, terminal = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(terminal, "w", encoding="ascii"))
    screen = Screen()

    async def main() -> None:
        reader, writer = os.pipe()
        output = Output(reader, "[x]", Path("/dev/full"), "banner\n", screen.out)
        os.write(writer, "caf\u00e9 \u2713\n".encode() + b"\xff the end")
        os.close(writer)
        output.read()
        assert list(output.last) == ["caf\u00e9 \u2713", "\ufffd the end"]

    asyncio.run(main())
    screen.close()
    assert os.read(shown, 100) == b"[x] caf? ?\n[x] ? the end\n"
    os.close(shown)
    sys.stdout.close()


def test_a_terminal_that_nobody_reads_stops_nothing_and_is_told_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S, a pager, a full pipe: lines are dropped once enough of them wait."""
    shown, terminal = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(terminal, "w"))
    screen = Screen()
    line = "x" * 999 + "\n"
    for _ in range(2 * HELD_MAX // len(line)):
        screen.out(line)
    got = 0
    while select.select([shown], [], [], 1.0)[0]:
        got += os.read(shown, 1 << 20).count(b"\n")
    screen.out("here again\n")
    screen.close()
    dropped = 2 * HELD_MAX // len(line) - got
    assert dropped > 0
    missed = f"keepstep: {dropped} lines are only in the logs, nobody read them here"
    assert os.read(shown, 1000) == f"{missed}\nhere again\n".encode()
    os.close(shown)
    sys.stdout.close()


def test_what_the_launcher_itself_says_is_shown_while_nobody_reads_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`keepstep run ... | less` in a terminal: the two streams have different readers."""
    pipes = [os.pipe(), os.pipe()]
    for name, (_, end) in zip(("stdout", "stderr"), pipes, strict=True):
        monkeypatch.setattr(sys, name, os.fdopen(end, "w"))
    screen = Screen()
    screen.out("x" * (1 << 19) + "\n")  # more than its pipe takes
    screen.error("keepstep: replica 1 is given up\n")
    assert select.select([pipes[1][0]], [], [], 30)[0]
    assert os.read(pipes[1][0], 1000) == b"keepstep: replica 1 is given up\n"
    while select.select([pipes[0][0]], [], [], 1.0)[0]:
        os.read(pipes[0][0], 1 << 20)
    screen.close()
    for name, (reader, _) in zip(("stdout", "stderr"), pipes, strict=True):
        getattr(sys, name).close()
        os.close(reader)


def test_replicas_are_restarted_while_nobody_reads_what_the_launcher_says(
    tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """Its pipe is full: 64 KB, and it blocks who writes more."""
    loud = script("print('x' * 200_000, flush=True)\n" + FOREVER)
    process = start(tmp_path / "run", "--replicas", "2", script=loud)
    try:
        first = wait_until(lambda: [e for e in spawned(tmp_path / "run") if e["replica"] == 1])[0]
        wait_until(lambda: b"xxx" in (tmp_path / "run" / "logs" / "replica0-rank0.log").read_bytes())
        os.kill(first["pids"][0], signal.SIGKILL)
        wait_until(lambda: len([e for e in spawned(tmp_path / "run") if e["replica"] == 1]) > 1)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.poll() is not None)
    finally:
        kill_all(tmp_path / "run")
        assert process.stdout is not None
        process.stdout.close()


def life(tmp_path: Path, start: Any, on_exit: Callable[[Life, int], None]) -> Life:
    path = tmp_path / "script.py"
    path.write_text("import threading\nthreading.Event().wait()\n")
    return Life(
        replica_id=0, incarnation=Incarnation("a"), number=1, ranks=2, args=[str(path)], start=start, env=dict(os.environ),
        logs=tmp_path, show=lambda _: None, on_exit=on_exit,
    )  # fmt: skip


def test_a_life_that_cannot_begin_leaves_no_rank(tmp_path: Path) -> None:
    pids: list[int] = []

    def start(args: Any, env: Any, output: int, listener: int | None) -> int:
        if pids:
            raise OSError("no more processes")
        pids.append(start_cold(args, env, output, listener))
        return pids[0]

    async def main() -> None:
        ended: asyncio.Future[tuple[Life, int]] = asyncio.get_running_loop().create_future()
        with pytest.raises(OSError, match="no more processes"):
            life(tmp_path, start, lambda *of: ended.set_result(of))
        half, rank = await asyncio.wait_for(ended, 30)
        assert (rank, half.pids, half.processes[0].code) == (0, pids, -9)

    asyncio.run(main())


def test_the_numbers_of_a_buried_life_belong_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        over = asyncio.Event()
        half = life(tmp_path, start_cold, lambda of, _: None if of.running else over.set())
        half.kill()
        await asyncio.wait_for(over.wait(), 30)
        half.bury()
        monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("it may be anybody's by now"))
        half.kill()
        half.bury()

    asyncio.run(main())
