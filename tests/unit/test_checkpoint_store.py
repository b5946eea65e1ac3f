"""A checkpoint is published whole or not at all, whenever its writer dies; what is found can be read; old ones go."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machines import LEDGER, state

from keepstep.protocol.errors import CheckpointCorrupt
from keepstep.protocol.ids import Incarnation
from keepstep.runtime.checkpoint_store import MANIFEST, CheckpointStore, Found, Part, TensorRow, rows_of, write_file

LIFE = Incarnation("cafe0123cafe0123")
CALLS = ("open", "write", "fsync", "rename", "unlink", "rmdir", "mkdir")  # of the system, that change something


def save(store: CheckpointStore, step: int, lineage: int | None = None, ranks: int = 2) -> Found:
    """All that the ranks of a replica do."""
    named = state(step, step if lineage is None else lineage)
    staging = store.staging(named, LIFE)
    os.mkdir(staging)
    for rank in range(ranks):
        write_file(staging / f"__{rank}_0.distcp", b"%d of %d" % (rank, step) * 100)
        row = TensorRow(path="model/w", dtype="torch.float32", shape=(2, 3), sharded=True)
        store.write_part(
            staging, rank, Part(files=rows_of(staging, [f"__{rank}_0.distcp"]), tensors=(row,), values='{"lr": NaN}')
        )
    found = store.publish(staging, ranks, version="1", state=named, ledger=LEDGER)
    store.prune()
    return found


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "checkpoints").mkdir()
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def publish_and_die(root: Path, k: int) -> int:
    """Publishes step 2 and removes step 1, in a process that is killed at its k-th system call; returns how it ended."""
    pid = os.fork()
    if pid == 0:
        left = [k]
        for name in CALLS:
            setattr(os, name, dying(getattr(os, name), left))
        save(CheckpointStore(root, keep=1), 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def dying(genuine: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return genuine(*args, **kwargs)

    return call


def steps(store: CheckpointStore) -> list[int]:
    """Newest first; as a reader sees them who has seen nothing before, and all files are right."""
    found = CheckpointStore(store.root, keep=store.keep).found()
    for each in found:
        for part in each.manifest.parts:
            for row in part.files:
                each.check(row.name)
    return [each.checkpoint.state.step for each in found]


def test_what_is_published_is_found_with_its_ledger_and_its_values(store: CheckpointStore) -> None:
    save(store, 1)
    (found,) = store.found()
    assert (found.checkpoint.state, found.checkpoint.ledger, len(found.manifest.parts)) == (state(1, 1), LEDGER, 2)
    assert found.checkpoint.name == "000000001-1-cafe0123"
    assert found.manifest.parts[0].values == '{"lr": NaN}'
    assert sorted(os.listdir(found.path)) == ["__0_0.distcp", "__1_0.distcp", MANIFEST]


def test_a_publisher_may_be_killed_at_any_system_call(tmp_path: Path) -> None:
    """Then the one before is found, or the new one, each of them whole; and what is left is not in the way of the next writer."""
    outcomes = []
    for k in range(1, 100):
        root = tmp_path / str(k)
        root.mkdir()
        save(CheckpointStore(root, keep=1), 1)
        code = publish_and_die(root, k)
        assert code in (0, -signal.SIGKILL)
        outcomes.append((code, steps(CheckpointStore(root, keep=1))))
        if code == 0:
            break
        assert outcomes[-1][1] in ([1], [2, 1], [2]), (k, outcomes[-1])
        save(CheckpointStore(root, keep=1), 3)
        assert steps(CheckpointStore(root, keep=1))[0] == 3
        shutil.rmtree(root)
    assert outcomes[-1] == (0, [2])
    assert outcomes[0] == (-9, [1])
    assert [(-9, [2, 1])] != [o for o in outcomes if o[1] == [2, 1]] != [], (
        "it was killed while it removed the old one, too"
    )
    assert len(outcomes) > 20, "the harness counts too little"


def test_what_a_reader_finds_incomplete_is_no_checkpoint(store: CheckpointStore) -> None:
    for step in (1, 2):
        save(store, step)
    newest = store.found()[0].path
    with open(newest / "__1_0.distcp", "r+b") as file:
        file.truncate(3)
    assert steps(store) == [1]
    (newest / "__1_0.distcp").unlink()
    assert [f.checkpoint.state.step for f in store.found()] == [1], "even by who knew it before"
    for nonsense in (b"", b"{", b"[]", b'{"version":"1"}', b"\xff" * 10):
        (newest / MANIFEST).write_bytes(nonsense)
        assert steps(store) == [1]
    (store.root / "notes.txt").write_text("not ours")
    (store.root / "000000009-9-file").write_text("no directory")
    assert steps(store) == [1]


def test_a_manifest_cannot_name_files_elsewhere(store: CheckpointStore) -> None:
    path = save(store, 1).path / MANIFEST
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../../x/yyyy"))
    assert steps(store) == []


def test_a_file_that_has_changed_since_is_damaged(store: CheckpointStore) -> None:
    found = save(store, 1)
    found.check("__0_0.distcp")
    with open(found.path / "__0_0.distcp", "r+b") as file:
        file.write(b"X")
    with pytest.raises(CheckpointCorrupt, match="checksum"):
        found.check("__0_0.distcp")
    with pytest.raises(CheckpointCorrupt, match="no file"):
        found.check("__9_0.distcp")


def test_the_newest_is_the_one_that_was_decided_last(store: CheckpointStore) -> None:
    save(store, 30, lineage=30)
    save(store, 20, lineage=40)  # of a history that began again at an older one: the other was revoked
    assert steps(store) == [20, 30]


def test_old_ones_are_removed_and_what_the_dead_have_left(store: CheckpointStore) -> None:
    left = store.root / ".staging-000000001-1-dead"
    left.mkdir()
    (left / "__0_0.distcp").write_text("some")
    for path in (left, left / "__0_0.distcp"):
        os.utime(path, ns=(1, 1))
    half = store.root / "000000001-1-dead"
    half.mkdir()
    os.utime(half, ns=(1, 1))
    other = store.root / "somebody's"
    other.mkdir()
    for step in range(1, 5):
        save(store, step)
    writing = store.staging(state(3, 3), Incarnation("slow"))
    writing.mkdir()
    store.prune()
    assert steps(store) == [4, 3]
    assert not left.exists()
    assert not half.exists()
    assert other.exists()
    assert writing.exists(), "somebody is still writing it"


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "nowhere", keep=1).found() == []
