"""Checkpoints in a directory that all replicas share: published whole or not at all (FT-HSDP section 5.6).

    DIR/.staging-NAME/   being written by the ranks of one replica; part-K.json: what rank K has written
    DIR/NAME/            the same, renamed when all parts are on the disk
    DIR/NAME/manifest.json   written last: a checkpoint exists when its manifest does, and every file that it names, in full

Publication: files written and synced; the directory synced and renamed; DIR synced; the manifest written beside its place,
synced and renamed; the directory synced. Whoever dies anywhere in there, or loses power, leaves a checkpoint that is complete or
one that `found` does not see. NAME holds step, lineage and the life that saved it, so two writers never meet.

Fails: OSError where storage does; CheckpointCorrupt for a file that is not what its manifest says. Nothing is believed unseen:
sizes are compared when a checkpoint is looked for, checksums by whoever reads a file. No torch, no pickle.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from keepstep.protocol import checkpoints
from keepstep.protocol.errors import CheckpointCorrupt, RemoteProtocolError
from keepstep.protocol.ids import Incarnation
from keepstep.protocol.ledger import ill_formed
from keepstep.protocol.messages import Checkpoint, LedgerState, StateName
from keepstep.runtime.wire import decode, encode

MANIFEST = "manifest.json"
STAGING = ".staging-"
MANIFEST_MAX = 1 << 30  # bytes
PIECE = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor of a state."""

    path: str
    dtype: str
    shape: tuple[int, ...]  # of all ranks together if it is sharded
    sharded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """One file of a checkpoint."""

    name: str
    size: int  # bytes
    xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has written."""

    files: tuple[FileRow, ...]
    tensors: tuple[TensorRow, ...]  # rank 0: all of them; the others: those that no other rank has
    values: str  # of the state, beside its tensors: JSON as Python writes it, which knows NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint. `parts` by rank."""

    version: str  # of keepstep
    state: StateName
    ledger: LedgerState
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint that is complete, as far as one can see without reading it."""

    checkpoint: Checkpoint
    manifest: Manifest
    path: Path

    def check(self, name: str) -> None:
        """Reads a file and compares its checksum. Raises CheckpointCorrupt."""
        row = next((row for part in self.manifest.parts for row in part.files if row.name == name), None)
        if row is None:
            raise CheckpointCorrupt(f"checkpoint {self.checkpoint.name} has no file {name}")
        if file_row(self.path / name) != row:
            raise CheckpointCorrupt(f"{self.path / name} is damaged: its checksum is not that of its manifest")


class CheckpointStore:
    """One directory of checkpoints. Any thread."""

    def __init__(self, root: Path, *, keep: int) -> None:
        self.root, self.keep = root, keep
        self._known: dict[str, Found] = {}

    # --- writing ----------------------------------------------------------------------------------------------

    def staging(self, state: StateName, life: Incarnation) -> Path:
        """Where the ranks of this life write this state to. Not made yet."""
        return self.root / f"{STAGING}{state.step:09d}-{state.lineage}-{life[:8]}"

    def write_part(self, staging: Path, rank: int, part: Part) -> None:
        """Says what a rank has written. Its files are synced already."""
        write_file(staging / f"part-{rank}.json", encode(part))

    def publish(self, staging: Path, ranks: int, *, version: str, state: StateName, ledger: LedgerState) -> Found:
        """Every rank has written its part: makes the checkpoint exist. One rank of the replica calls it."""
        parts = tuple([decode((staging / f"part-{rank}.json").read_bytes(), Part) for rank in range(ranks)])
        manifest = Manifest(version=version, state=state, ledger=ledger, parts=parts)
        for rank in range(ranks):
            os.unlink(staging / f"part-{rank}.json")
        path = self.root / staging.name.removeprefix(STAGING)
        sync_directory(staging)
        os.rename(staging, path)
        sync_directory(self.root)
        write_file(path / f"{MANIFEST}.new", encode(manifest))
        os.rename(path / f"{MANIFEST}.new", path / MANIFEST)
        sync_directory(path)
        return _found(path, manifest)

    def discard(self, staging: Path) -> None:
        """It won't be published."""
        shutil.rmtree(staging, ignore_errors=True)

    def prune(self) -> list[str]:
        """Removes what is older than the newest `keep`, and what others began and left before these; returns the names.

        Whoever is still writing has written after the oldest of them was published, or is not heard of again.
        """
        complete = self.found()
        gone = [each.path for each in complete[self.keep :]]
        kept = {each.path for each in complete[: self.keep]}
        if kept:
            since = min((path / MANIFEST).stat().st_mtime_ns for path in kept)
            others = [path for path in self._directories() if path not in kept and path not in gone]
            gone += [path for path in others if _touched(path) < since]
        for path in gone:
            _remove(path)
        return [path.name for path in gone]

    # --- reading ----------------------------------------------------------------------------------------------

    def found(self) -> list[Found]:
        """All complete ones, newest first. Raises OSError if the directory cannot be read; it may not exist."""
        seen: dict[str, Found] = {}
        for path in self._directories():
            if not path.name.startswith(STAGING) and (found := self._look(path)) is not None:
                seen[path.name] = found
        self._known = seen
        return sorted(seen.values(), key=lambda found: checkpoints.age(found.checkpoint), reverse=True)

    def _directories(self) -> list[Path]:
        """Those that are ours, by their names."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        return [self.root / name for name in sorted(names) if _is_ours(name.removeprefix(STAGING))]

    def _look(self, path: Path) -> Found | None:
        try:
            found = self._known.get(path.name) or _found(path, _read_manifest(path / MANIFEST))
            rows = [row for part in found.manifest.parts for row in part.files]
            whole = all((path / row.name).stat().st_size == row.size for row in rows)
        except (FileNotFoundError, NotADirectoryError, RemoteProtocolError):
            return None
        return found if whole and (path / MANIFEST).exists() else None


def _is_ours(name: str) -> bool:
    step, _, rest = name.partition("-")
    return len(step) == 9 and step.isascii() and step.isdigit() and bool(rest)


def _found(path: Path, manifest: Manifest) -> Found:
    checkpoint = Checkpoint(name=path.name, state=manifest.state, ledger=manifest.ledger)
    return Found(checkpoint=checkpoint, manifest=manifest, path=path)


def _read_manifest(path: Path) -> Manifest:
    """Raises RemoteProtocolError if it is none."""
    if path.stat().st_size > MANIFEST_MAX:
        raise RemoteProtocolError(f"{path} is too large to be a manifest")
    manifest = decode(path.read_bytes(), Manifest)
    names = [row.name for part in manifest.parts for row in part.files]
    if ill_formed(manifest.ledger) or not manifest.parts or manifest.state.step < 0 or manifest.state.lineage < 0:
        raise RemoteProtocolError(f"{path} is no manifest that can be meant")
    if not all(map(_is_file_name, names)):
        raise RemoteProtocolError(f"{path} names files that cannot be in its directory")
    return manifest


def _is_file_name(name: str) -> bool:
    """Of one that may be in a directory: asking for any other is an error, not its absence."""
    return 0 < len(name.encode()) <= 255 and name not in (".", "..") and not set(name) & {"/", "\0"}


def _touched(path: Path) -> int:
    """When something in a directory was last written, by the clock of its file system; ns."""
    with contextlib.suppress(FileNotFoundError):
        return max(p.stat().st_mtime_ns for p in (path, *path.iterdir()))
    return 1 << 62  # it is being removed or renamed


def _remove(path: Path) -> None:
    """The manifest first: what is half removed must not look complete."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path / MANIFEST)
        sync_directory(path)
    shutil.rmtree(path, ignore_errors=True)


# --- files -----------------------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes) -> None:
    """Writes and syncs."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Makes renames in it last."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_row(path: Path) -> FileRow:
    """A file's size and checksum, by reading it."""
    hasher, size = xxhash.xxh3_64(), 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            hasher.update(piece)
            size += len(piece)
    return FileRow(name=path.name, size=size, xxh3=hasher.hexdigest())


def rows_of(path: Path, names: Iterable[str]) -> tuple[FileRow, ...]:
    return tuple([file_row(path / name) for name in sorted(names)])
