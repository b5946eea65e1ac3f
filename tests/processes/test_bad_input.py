"""Every mistake gets one clear sentence and a non-zero exit code, and leaves nothing running."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import SCRIPTS, TINY, Result, finish, processes_of, run, start

from keepstep.runtime.etcd import EtcdStore, JobRecord
from keepstep.runtime.etcd_server import EmbeddedEtcd
from keepstep.version import __version__

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fsdp.py"
MISFIT = SCRIPTS / "misfit.py"


def refused(result: Result, sentence: str, *, code: int | None = 78) -> None:
    """The launcher ended with `code` (None: any but 0) and says the sentence exactly once by itself."""
    ours = [line for line in result.output.splitlines() if line.startswith("keepstep: ")]
    assert result.code == code or (code is None and result.code != 0), (result.code, result.output[-4000:])
    assert sum(sentence in line for line in ours) == 1, ours or result.output[-4000:]
    assert not list(processes_of(result.run_dir)), "something was left running"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedEtcd(tmp_path / "own-etcd", tmp_path / "own-etcd.log")
    yield server.start()
    server.stop()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--replicas", "0"), "--replicas must be at least 1"),
        (("--ranks-per-replica", "0"), "--ranks-per-replica must be at least 1"),
        (("--replicas", "2", "--min-replicas", "3"), "can never be reached"),
        (("--fault", "kill everything"), "cannot be read"),
        (("--fault", "kill replica=7 rank=0 phase=forward"), "does not have"),
        (("--store", "http://here"), "etcd://HOST:2379"),
        (("--store", "etcd://127.0.0.1:9"), "no etcd answers at 127.0.0.1:9"),
        (("--token-file", "/does/not/exist"), "cannot be read"),
        (("--job", "two words"), "one word"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    refused(run(tmp_path / "run", *options), sentence)
    assert not (tmp_path / "run").exists(), "the same command must work once the mistake is corrected"


def test_a_rehearsal_whose_step_takes_two_times(tmp_path: Path) -> None:
    refused(run(tmp_path / "run", "--step-s", "1", "--step-like", str(tmp_path), verb="shadow"), "either --step-s or")


def test_a_start_that_fails_takes_back_only_what_it_has_made(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    refused(run(tmp_path, "--store", "etcd://127.0.0.1:9"), "no etcd answers at")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert run(tmp_path, "--replicas", "1", args=("--steps", "3")).code == 0
    assert (tmp_path / "notes.txt").read_text() == "precious"


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    refused(run(tmp_path / "run", script=tmp_path / "missing.py"), "there is no script")


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    refused(run(tmp_path / "file" / "run"), "cannot be written to")


def test_a_run_directory_that_holds_a_run(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    refused(run(tmp_path), "holds another run already")
    assert not list((tmp_path / "events").iterdir()), "nothing of the other run is touched"


def test_a_port_that_something_else_uses(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused(run(tmp_path / "run", "--store", f"etcd://127.0.0.1:{port}"), "no etcd answers at")


def test_a_wrong_token(tmp_path: Path, etcd: str) -> None:
    async def another_token() -> None:
        store = await EtcdStore.open(etcd, "j")
        await store.claim_job(
            JobRecord(
                version=__version__, num_replicas=2, ranks_per_replica=1, data_fingerprint="", layout_digest="",
                token_check=EtcdStore.token_check("j", b"theirs"),
            )
        )  # fmt: skip
        await store.close()

    asyncio.run(another_token())
    refused(run(tmp_path / "run", "--store", etcd, "--job", "j", "--replicas", "2"), "token")


def test_two_jobs_of_one_name_on_one_store(tmp_path: Path, etcd: str) -> None:
    first = start(tmp_path / "a", "--store", etcd, "--job", "j", "--replicas", "1", args=("--steps", "2000"))
    try:
        assert first.stdout is not None
        while not list((tmp_path / "a" / "events").glob("replica0*")):
            assert first.poll() is None
        refused(run(tmp_path / "b", "--store", etcd, "--job", "j", "--replicas", "1"), "is run already by")
        assert first.poll() is None, "the first job must not notice"
    finally:
        first.terminate()
        finish(first, tmp_path / "a", 30)


@pytest.mark.parametrize(
    ("what", "ranks", "sentence"),
    [
        ("model", 1, "model"),
        ("model", 2, "model"),
        ("data", 1, "data set"),
        ("unit size", 1, "data set or unit size"),
        ("version", 1, "version"),
        ("mesh", 2, "the mesh"),
        ("unsharded", 2, "is not sharded"),
        ("never joins", 1, "ended without training"),
        ("never trains", 1, "never trained"),
    ],
)
def test_replicas_and_scripts_that_do_not_fit(tmp_path: Path, what: str, ranks: int, sentence: str) -> None:
    result = run(
        tmp_path, "--replicas", "2", "--ranks-per-replica", str(ranks), script=MISFIT, args=(what,), timeout=100
    )  # fmt: skip
    refused(result, sentence)


def test_a_script_that_raises(tmp_path: Path) -> None:
    result = run(tmp_path, "--replicas", "1", args=("--raise-at", "3"))
    refused(result, "RuntimeError: the script is wrong here", code=1)


def test_the_rank_that_raises_is_named(tmp_path: Path) -> None:
    """The other one waits for it in a collective, and is ended before it."""
    shape = ("--replicas", "1", "--ranks-per-replica", "2", "--max-restarts", "0")
    result = run(tmp_path, *shape, script=MISFIT, args=("one rank raises",))
    refused(result, "RuntimeError: the script is wrong here", code=1)
    assert [(e["rank"], e["code"]) for e in result.of("exit")] == [(0, 75), (1, 1)]
    assert "replica 0 rank 1 failed first" in result.output.splitlines()[-1]


def test_a_script_that_leaves_the_loop_early(tmp_path: Path) -> None:
    refused(run(tmp_path, "--replicas", "1", args=("--leave-at", "3")), "left the training loop before the job ended")


def test_data_that_is_not_there(tmp_path: Path) -> None:
    result = run(tmp_path, "--replicas", "1", script=EXAMPLE, args=("--data", "/does/not/exist"))
    refused(result, "/does/not/exist does not exist")


def test_a_script_with_an_error_in_it(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import keepstep\ndef\n")
    refused(run(tmp_path / "run", "--replicas", "1", script=script), "SyntaxError", code=1)


def test_the_tiny_script_is_fine(tmp_path: Path) -> None:
    """The control: without a mistake the same command works."""
    assert run(tmp_path, "--replicas", "1", script=TINY, args=("--steps", "3")).code == 0
