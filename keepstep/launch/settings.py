"""What `keepstep run` was asked to do, checked before anything starts.

Fails: ConfigError, one sentence that says what is wrong and what to do. The run directory is made last, and taken back if the run
cannot begin, so that the same command works once the mistake is corrected.
"""

import math
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keepstep.protocol.errors import ConfigError
from keepstep.runtime.faults import Faults

ENTRIES_OF_A_RUN = ("events", "logs", "pace", "etcd", "run.json", "faults.jsonl", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """One run on this machine."""

    script: Path
    args: tuple[str, ...]
    replicas: int
    ranks: int
    spares: int  # replicas that wait for a place
    run_dir: Path
    made_run_dir: bool  # by us, just now
    job: str
    store: str | None  # None: the embedded one
    token: bytes | None  # None: a random one
    min_replicas: int
    waits_s: Mapping[
        str, float
    ]  # environment variable: what was asked for; for the others, what the environment says holds
    max_restarts: int  # of one replica, within
    restart_window_s: float
    finish_grace_s: float  # for the rest to end, once a replica or a rank of it has
    faults: tuple[str, ...]
    checkpoint_dir: Path | None
    checkpoint_every: int  # steps
    keep_checkpoints: int

    @staticmethod
    def checked(
        script: Path,
        args: tuple[str, ...],
        *,
        replicas: int,
        ranks: int,
        run_dir: Path | None = None,
        job: str | None = None,
        store: str | None = None,
        token_file: Path | None = None,
        min_replicas: int = 1,
        spares: int = 0,
        join_wait_s: float | None = None,
        straggler_s: float | None = None,
        slow_floor_s: float | None = None,
        slow_ceiling_s: float | None = None,
        max_restarts: int = 20,
        restart_window_s: float = 3600.0,
        finish_grace_s: float = 30.0,
        faults: tuple[str, ...] = (),
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 100,
        keep_checkpoints: int = 3,
    ) -> "LaunchSettings":
        """Fills defaults in and checks everything that can be checked without starting a process."""
        for name, value, least in (
            ("--replicas", replicas, 1),
            ("--ranks-per-replica", ranks, 1),
            ("--min-replicas", min_replicas, 1),
            ("--spares", spares, 0),
            ("--join-wait", join_wait_s or 0, 0),
            ("--straggler", straggler_s or 0, 0),
            ("--slow-floor", 1 if slow_floor_s is None else slow_floor_s, 0.1),
            ("--slow-ceiling", math.inf if slow_ceiling_s is None else slow_ceiling_s, slow_floor_s or 1.0),
            ("--max-restarts", max_restarts, 0),
            ("--restart-window", restart_window_s, 0),
            ("--finish-grace", finish_grace_s, 0),
            ("--checkpoint-every", checkpoint_every, 1),
            ("--keep-checkpoints", keep_checkpoints, 1),
        ):
            if not value >= least:  # this way around, "nan" is refused too
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if min_replicas > replicas:
            raise ConfigError(f"--min-replicas {min_replicas} can never be reached with --replicas {replicas}")
        if not script.is_file():
            raise ConfigError(f"there is no script {script}: name an existing Python file")
        if store is not None:
            from keepstep.runtime.etcd_members import parse_url

            parse_url(store)
        for fault in Faults.check("\n".join(faults)):
            if fault.replica >= replicas or fault.rank >= ranks:
                raise ConfigError(
                    f"--fault names replica {fault.replica} rank {fault.rank}, which this run does not have"
                )
        if checkpoint_dir is not None:
            _prepare_checkpoints(checkpoint_dir)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{script.stem if job is None else check_job(job)}-{stamp}"
        token = read_token_file(token_file)
        run_dir = run_dir or Path("runs") / name
        made = prepare(run_dir)
        return LaunchSettings(
            script=script,
            args=args,
            replicas=replicas,
            ranks=ranks,
            spares=spares,
            run_dir=run_dir.resolve(),
            made_run_dir=made,
            job=job if job is not None else re.sub(r"[^\w.-]", "_", f"{name}-{os.getpid()}"),
            store=store,
            token=token,
            min_replicas=min_replicas,
            waits_s={
                name: value
                for name, value in (
                    ("KEEPSTEP_JOIN_WAIT_S", join_wait_s),
                    ("KEEPSTEP_STRAGGLER_S", straggler_s),
                    ("KEEPSTEP_SLOW_FLOOR_S", slow_floor_s),
                    ("KEEPSTEP_SLOW_CEILING_S", slow_ceiling_s),
                )
                if value is not None
            },
            max_restarts=max_restarts,
            restart_window_s=restart_window_s,
            finish_grace_s=finish_grace_s,
            faults=faults,
            checkpoint_dir=None if checkpoint_dir is None else checkpoint_dir.resolve(),
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
        )

    def take_back(self) -> None:
        """The run could not begin: removes what it has made, and nothing else."""
        for name in ENTRIES_OF_A_RUN:
            path = self.run_dir / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if self.made_run_dir and not any(self.run_dir.iterdir()):
            self.run_dir.rmdir()

    def environment(self, ours: Mapping[str, str], url: str, token_file: Path) -> dict[str, str]:
        """What every rank is told, beside its own place in the job: `ours`, and over it what this run decides."""
        return {
            "OMP_NUM_THREADS": "1",
            **{k: v for k, v in ours.items() if k not in ("KEEPSTEP_TOKEN", "MASTER_ADDR", "MASTER_PORT")},
            "PYTHONUNBUFFERED": "1",
            "NUM_REPLICAS": str(self.replicas),
            "KEEPSTEP_STORE": url,
            "KEEPSTEP_JOB": self.job,
            "KEEPSTEP_HOST": "127.0.0.1",  # one machine, whatever is set for torchrun
            "KEEPSTEP_TOKEN_FILE": str(token_file),
            "KEEPSTEP_RUN_DIR": str(self.run_dir),
            "KEEPSTEP_FAULTS": "\n".join(self.faults),
            "KEEPSTEP_MIN_REPLICAS": str(self.min_replicas),
            **{name: str(seconds) for name, seconds in self.waits_s.items()},
            **self._checkpoint_variables(),
        }

    def _checkpoint_variables(self) -> dict[str, str]:
        """Nothing without --checkpoint-dir: what the environment says holds then."""
        if self.checkpoint_dir is None:
            return {}
        return {
            "KEEPSTEP_CHECKPOINT_DIR": str(self.checkpoint_dir),
            "KEEPSTEP_CHECKPOINT_EVERY": str(self.checkpoint_every),
            "KEEPSTEP_KEEP_CHECKPOINTS": str(self.keep_checkpoints),
        }


def check_job(job: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,80}", job):
        raise ConfigError(f"--job must be one word of letters, digits, dots, dashes and underscores, got {job!r}")
    return job


def prepare(run_dir: Path) -> bool:
    """Makes the run directory, and says whether it was not there before. Never mixes two runs."""
    made = not run_dir.exists()
    if run_dir.is_dir() and any((run_dir / name).exists() for name in ENTRIES_OF_A_RUN):
        raise ConfigError(f"--run-dir {run_dir} holds another run already: choose a new directory")
    try:
        (run_dir / "events").mkdir(parents=True)
        (run_dir / "logs").mkdir()
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir} cannot be written to ({error.strerror}): choose another one") from None
    return made


def _prepare_checkpoints(path: Path) -> None:
    """It is left behind empty if the run cannot begin: it may be everybody's."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--checkpoint-dir {path} cannot be made ({error.strerror}): choose another one") from None


def read_token_file(path: Path | None) -> bytes | None:
    """Stripped, as the ranks will read it from their file."""
    if path is None:
        token = os.environb.get(b"KEEPSTEP_TOKEN", b"")
        if token and not token.strip():
            raise ConfigError("KEEPSTEP_TOKEN is blank: set it to the job's secret, or unset it to have one made up")
        return token.strip() or None
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"--token-file {path} cannot be read ({error.strerror}): name a file that holds the job's secret"
        ) from None
    if not token:
        raise ConfigError(f"--token-file {path} is empty: put the job's secret in it")
    return token
