"""Deterministic fault injection: kill this rank, in this step, at this point.

    kill replica=1 rank=0 step=5 phase=in_exchange [count=N] [incarnation=first|second|any] [role=worker|catching_up|any]

Actions: kill (SIGKILL), stop (SIGSTOP), segv (SIGSEGV), raise (an exception at the point), exit=CODE, slow=SECONDS. Without
`step`, in any step; with `step=5+`, from step 5 on. `count`: the N-th time that all of this fits (a chunk that arrives is one
time `in_exchange`). Each fault fires once in a run: a file in the run directory remembers it across lives, and `faults.jsonl`
tells when, with the fault's place and the clock of the events.

The points are in the product, not in the tests: an operator can rehearse a failure on the real job. They cost one truth test
when no fault was asked for. Any thread.
"""

import itertools
import json
import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from keepstep.protocol.errors import ConfigError, KeepstepError
from keepstep.runtime.environment import Environment


class Phase(StrEnum):
    """Where a fault can be injected."""

    BEFORE_HELLO = "before_hello"
    BEFORE_REPORT = "before_report"  # leader
    WAITING_DECISION = "waiting_decision"  # leader
    FORWARD = "forward"
    BACKWARD = "backward"
    IN_EXCHANGE = "in_exchange"
    AFTER_LAST_BUCKET = "after_last_bucket"  # this rank has handed its last bucket to the ring
    BEFORE_VOTE = "before_vote"
    BETWEEN_VOTE_AND_COMMIT = "between_vote_and_commit"
    OPTIMIZER_STEP = "optimizer_step"
    OFFLOADING = "offloading"  # of an offloaded optimizer's state a piece is updated, and not yet in host memory
    SERVING_STATE = "serving_state"
    FETCHING_STATE = "fetching_state"
    LOADING_STATE = "loading_state"
    REPLAYING = "replaying"
    SAVING = "saving"  # this rank has copied a state for a checkpoint and is about to write it
    PUBLISHING = "publishing"  # rank 0: every rank has written its part of a checkpoint
    RESTORING = "restoring"  # this rank is about to read a checkpoint


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}
LIVES = {"first": 1, "second": 2, "third": 3, "any": None}
ROLES = ("worker", "catching_up", "any")


class InjectedFault(KeepstepError):
    """What `raise` raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One asked-for fault."""

    action: str
    argument: float
    replica: int
    rank: int
    phase: Phase
    step: int | None
    onwards: bool
    life: int | None
    role: str
    count: int
    index: int

    @staticmethod
    def parse(line: str, index: int = 0) -> "Fault":
        """Reads a specification. Raises ConfigError."""
        action, *words = line.split()
        action, _, argument = action.partition("=")
        fields = dict(word.partition("=")[::2] for word in words)
        try:
            if action not in (*SIGNALS, "raise", "exit", "slow"):
                raise ValueError(f"unknown action {action!r}: use kill, stop, segv, raise, exit=CODE or slow=SECONDS")
            if unknown := fields.keys() - {"replica", "rank", "phase", "step", "incarnation", "role", "count"}:
                raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
            if missing := {"replica", "rank", "phase"} - fields.keys():
                raise ValueError(f"{sorted(missing)[0]}= is missing")
            if fields["phase"] not in set(Phase):
                raise ValueError(f"unknown phase {fields['phase']!r}: use one of {', '.join(Phase)}")
            if not 0 <= float(argument or 0) < 1e9:
                raise ValueError(f"{action}={argument} is no number that can be meant")
            life, role = fields.get("incarnation", "any"), fields.get("role", "any")
            if life not in LIVES or role not in ROLES:
                raise ValueError("incarnation must be first, second, third or any, and role worker, catching_up or any")
            return Fault(
                action=action,
                argument=float(argument or 0),
                replica=int(fields["replica"]),
                rank=int(fields["rank"]),
                phase=Phase(fields["phase"]),
                step=int(fields["step"].removesuffix("+")) if "step" in fields else None,
                onwards=fields.get("step", "").endswith("+"),
                life=LIVES[life],
                role=role,
                count=int(fields.get("count", 1)),
                index=index,
            )
        except ValueError as error:
            raise ConfigError(f"the fault {line!r} cannot be read: {error}") from None


class Faults:
    """The faults that were asked for, as one rank sees them. True iff it has any."""

    def __init__(self, faults: tuple[Fault, ...], env: Environment) -> None:
        self._faults = faults
        self._env = env
        self._times = {fault.index: itertools.count(1) for fault in faults}

    @staticmethod
    def check(text: str) -> tuple[Fault, ...]:
        """Reads specifications, one a line. Raises ConfigError."""
        return tuple(Fault.parse(line, i) for i, line in enumerate(text.splitlines()) if line.strip())

    @staticmethod
    def parse(text: str, env: Environment) -> "Faults":
        """This rank's share of the specifications."""
        faults = Faults.check(text)
        if faults and env.run_dir is None:
            raise ConfigError(
                "KEEPSTEP_FAULTS needs KEEPSTEP_RUN_DIR: a fault fires once, and that is where it is remembered"
            )
        return Faults(tuple(f for f in faults if (f.replica, f.rank) == (env.replica_id, env.rank)), env)

    def __bool__(self) -> bool:
        return bool(self._faults)

    def point(self, phase: Phase, *, step: int | None, role: str | None) -> None:
        """The rank has reached `phase` in `step`."""
        for fault in self._faults:
            wanted = (
                fault.phase is phase
                and _fits(fault, step)
                and fault.life in (None, self._env.life)
                and (fault.role == "any" or fault.role == role)
            )
            if wanted and next(self._times[fault.index]) == fault.count and self._claim(fault):
                self._note(fault, step, role)
                self._fire(fault)

    def _claim(self, fault: Fault) -> bool:
        """True for exactly one caller in the whole run."""
        run_dir = self._env.run_dir
        assert run_dir is not None
        try:
            (run_dir / f".fault-{fault.index}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _note(self, fault: Fault, step: int | None, role: str | None) -> None:
        record = {
            "action": fault.action,
            "replica": fault.replica,
            "rank": fault.rank,
            "phase": fault.phase.value,
            "step": step,
            "role": role,
            "incarnation": self._env.incarnation,
            "pid": os.getpid(),
            "t": time.time(),
            "mono": time.monotonic(),
        }
        run_dir = self._env.run_dir
        assert isinstance(run_dir, Path)
        fd = os.open(run_dir / "faults.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, json.dumps(record).encode() + b"\n")  # one write: lines of two processes do not mix
        finally:
            os.close(fd)

    def _fire(self, fault: Fault) -> None:
        if fault.action in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.action])
        elif fault.action == "raise":
            raise InjectedFault(f"injected at {fault.phase.value}")
        elif fault.action == "exit":
            os._exit(int(fault.argument))
        else:
            time.sleep(fault.argument)


def _fits(fault: Fault, step: int | None) -> bool:
    if fault.step is None or fault.step == step:
        return True
    return fault.onwards and step is not None and step > fault.step
