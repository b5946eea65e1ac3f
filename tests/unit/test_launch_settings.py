"""What `keepstep run` accepts, what it refuses, and that a refusal leaves no trace."""

import re
from pathlib import Path
from typing import Any

import pytest

from keepstep.launch.settings import LaunchSettings
from keepstep.protocol.errors import ConfigError


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("pass\n")
    return path


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPSTEP_TOKEN", raising=False)


def checked(script: Path, run_dir: Path | None, **options: Any) -> LaunchSettings:
    return LaunchSettings.checked(
        script, ("--steps", "3"), **{"replicas": 2, "ranks": 2, "run_dir": run_dir, **options}
    )


def test_what_is_asked_for_is_kept(tmp_path: Path, script: Path) -> None:
    fault = "kill replica=1 rank=1 step=5 phase=in_exchange"
    got = checked(
        script,
        tmp_path / "run",
        job="j",
        store="etcd://127.0.0.1:2379",
        min_replicas=2,
        max_restarts=0,
        faults=(fault,),
    )
    assert (got.script, got.args, got.replicas, got.ranks) == (script, ("--steps", "3"), 2, 2)
    assert (got.job, got.store, got.min_replicas, got.max_restarts) == ("j", "etcd://127.0.0.1:2379", 2, 0)
    assert (got.faults, got.token) == ((fault,), None)
    assert got.run_dir == (tmp_path / "run").resolve()
    assert (got.run_dir / "events").is_dir()
    assert (got.run_dir / "logs").is_dir()


def test_the_default_names(tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(r"train-\d{8}-\d{6}", checked(script, None).run_dir.name)
    named = checked(script, None, job="mine")
    assert named.run_dir.parent == tmp_path / "runs"
    assert re.fullmatch(r"mine-\d{8}-\d{6}", named.run_dir.name)


def test_a_made_up_job_is_one_word(tmp_path: Path) -> None:
    odd = tmp_path / "my train/é.py"
    odd.parent.mkdir()
    odd.write_text("pass\n")
    job = checked(odd, tmp_path / "run").job
    assert "/" not in job
    assert " " not in job


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"replicas": 0}, "--replicas must be at least 1, got 0"),
        ({"ranks": 0}, "--ranks-per-replica must be at least 1, got 0"),
        ({"min_replicas": 0}, "--min-replicas must be at least 1, got 0"),
        ({"min_replicas": 3}, "--min-replicas 3 can never be reached with --replicas 2"),
        ({"max_restarts": -1}, "--max-restarts must be at least 0, got -1"),
        ({"restart_window_s": float("nan")}, "--restart-window must be at least 0, got nan"),
        ({"spares": -1}, "--spares must be at least 0, got -1"),
        ({"join_wait_s": -1.0}, "--join-wait must be at least 0, got -1.0"),
        ({"slow_floor_s": 0.0}, "--slow-floor must be at least 0.1, got 0.0"),
        ({"slow_floor_s": 5.0, "slow_ceiling_s": 4.0}, "--slow-ceiling must be at least 5.0, got 4.0"),
        ({"finish_grace_s": -1.0}, "--finish-grace must be at least 0, got -1.0"),
        ({"finish_grace_s": float("nan")}, "--finish-grace must be at least 0, got nan"),
        ({"job": "a/b"}, "--job must be one word"),
        ({"job": ""}, "--job must be one word"),
        ({"store": "http://127.0.0.1:2379"}, "etcd://HOST:2379"),
        ({"store": "etcd://127.0.0.1:0"}, "etcd://HOST:2379"),
        ({"faults": ("kill replica=0 rank=0",)}, "phase= is missing"),
        ({"faults": ("kill replica=2 rank=0 phase=forward",)}, "--fault names replica 2 rank 0"),
        ({"faults": ("kill replica=0 rank=2 phase=forward",)}, "--fault names replica 0 rank 2"),
    ],
)
def test_a_refusal_is_one_sentence_and_leaves_no_trace(
    tmp_path: Path, script: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        checked(script, tmp_path / "run", **options)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists(), "the same command must work once the mistake is corrected"


@pytest.mark.parametrize("content", [None, "", " \n"], ids=["missing", "empty", "blank"])
def test_a_token_file_that_cannot_be_used(tmp_path: Path, script: Path, content: str | None) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"--token-file .*secret"):
        checked(script, tmp_path / "run", token_file=path)
    assert not (tmp_path / "run").exists(), "the same command must work once the mistake is corrected"


def test_the_token_is_what_the_ranks_will_read(tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They strip what is in their file, so a line end must make no difference here."""
    (tmp_path / "secret").write_text("from the file\n")
    monkeypatch.setenv("KEEPSTEP_TOKEN", "from the environment\n")
    assert checked(script, tmp_path / "a").token == b"from the environment"
    assert checked(script, tmp_path / "b", token_file=tmp_path / "secret").token == b"from the file", "the option wins"
    monkeypatch.setenv("KEEPSTEP_TOKEN", "  ")
    with pytest.raises(ConfigError, match="KEEPSTEP_TOKEN"):
        checked(script, tmp_path / "c")


@pytest.mark.parametrize("entry", ["events", "logs", "etcd", "run.json", "faults.jsonl", "token"])
def test_a_run_directory_that_holds_something_of_ours(tmp_path: Path, script: Path, entry: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / entry).write_text("precious")
    with pytest.raises(ConfigError, match="--run-dir"):
        checked(script, run_dir)
    assert [p.name for p in run_dir.iterdir()] == [entry]
    assert (run_dir / entry).read_text() == "precious"


def test_an_empty_run_directory_is_fine_and_stays(tmp_path: Path, script: Path) -> None:
    (tmp_path / "run").mkdir()
    checked(script, tmp_path / "run").take_back()
    assert not list((tmp_path / "run").iterdir())


def test_a_run_that_cannot_begin_leaves_no_trace(tmp_path: Path, script: Path) -> None:
    settings = checked(script, tmp_path / "new" / "run")
    (settings.run_dir / "events" / "launcher.jsonl").touch()
    settings.take_back()
    assert not (tmp_path / "new" / "run").exists()


def test_a_run_directory_that_cannot_be_made(tmp_path: Path, script: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be written to .*: choose another one"):
        checked(script, tmp_path / "file" / "run")


def test_a_script_that_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.py", tmp_path):
        with pytest.raises(ConfigError, match="there is no script"):
            checked(path, tmp_path / "run")


def test_what_the_ranks_are_told(tmp_path: Path, script: Path) -> None:
    settings = checked(script, tmp_path / "run", job="j", min_replicas=2)
    ours = {"HOME": "/home/me", "KEEPSTEP_TOKEN": "secret", "MASTER_ADDR": "x", "KEEPSTEP_HOST": "10.0.0.7"}
    told = settings.environment(ours, "etcd://127.0.0.1:1", tmp_path / "token")
    assert "secret" not in told.values(), "environments are easier to see than files"
    assert "MASTER_ADDR" not in told
    assert (told["HOME"], told["OMP_NUM_THREADS"], told["KEEPSTEP_HOST"]) == ("/home/me", "1", "127.0.0.1")
    assert (told["NUM_REPLICAS"], told["KEEPSTEP_MIN_REPLICAS"], told["KEEPSTEP_JOB"]) == ("2", "2", "j")
    assert settings.environment({"OMP_NUM_THREADS": "4"}, "", tmp_path)["OMP_NUM_THREADS"] == "4"
