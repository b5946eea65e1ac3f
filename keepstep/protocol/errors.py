"""Every error that keepstep raises, and which of them a rank survives.

    KeepstepError
    ├── ConfigError            the user's mistake: one sentence on what is wrong and what to do
    │   └── JobMismatch        this process and the running job disagree (model, data, token, version, ...)
    ├── LocalProtocolError     we broke the rules: a bug of ours, the state is unchanged
    ├── RemoteProtocolError    they did: refuse the peer, go on
    │   ├── StaleQuorum        bytes of another ring, job or incarnation
    │   └── Unauthorized       the peer does not hold the job token
    ├── ExchangeError          an exchange did not complete; names the suspect. Recoverable: the step is retried
    ├── TransferError          state could not be fetched from anyone. Recoverable: start over as a fresh process
    ├── CheckpointCorrupt      a checkpoint is not what its manifest says. Recoverable: an older one is tried
    ├── StoreError             the store is unreachable or refused us
    ├── JobOver                the job has ended while this process was away; nothing is left to do
    │   └── Left               this replica has left the job, or the whole job has stopped, because somebody asked for it
    ├── ReplicaLost            another rank of this replica is gone
    ├── NoStateLeft            no living replica holds a state of the job and there is no checkpoint
    └── InvariantViolation     the impossible happened: crash this replica loudly, restart is well tested

A lost peer is an *event* inside the machines; it becomes an `ExchangeError` only where a caller must be told.
Fatal for the rank (it exits non-zero and its replica is rebuilt): everything that is not `recoverable`. The exit code tells the
launcher what to make of it; every other code asks for a restart.
"""

from keepstep.protocol.ids import ReplicaId

EX_REPLICA_LOST = 75  # only a consequence: the rank that is gone has the cause
EX_CONFIG = 78  # the user's mistake, which a restart would only repeat
EX_NO_RESTART = 93  # nothing that a restart could bring back


class KeepstepError(Exception):
    """Base of all our errors. `recoverable` says whether the rank lives on."""

    recoverable = False


class ConfigError(KeepstepError):
    """The user's configuration cannot work. The message says what is wrong and what to do."""


class JobMismatch(ConfigError):
    """This process does not fit the job that already runs under this name."""


class LocalProtocolError(KeepstepError):
    """Our own code did something the protocol does not allow here. The machine's state is unchanged."""


class RemoteProtocolError(KeepstepError):
    """A peer did something the protocol does not allow. Refuse it and go on."""

    recoverable = True


class StaleQuorum(RemoteProtocolError):
    """Bytes stamped with another quorum_id, job or incarnation."""


class Unauthorized(RemoteProtocolError):
    """The peer could not prove that it holds the job token."""


class ExchangeError(KeepstepError):
    """An exchange failed in a way that a new ring can repair.

    `suspect` is the replica that most likely caused it, `phase` what was being done to it
    ("connect", "reduce-scatter", "all-gather", "idle").
    """

    recoverable = True

    def __init__(self, message: str, *, suspect: ReplicaId | None = None, phase: str = "") -> None:
        super().__init__(message)
        self.suspect = suspect
        self.phase = phase


class TransferError(KeepstepError):
    """No source is left that can serve the state (or the bytes failed their checksum everywhere)."""

    recoverable = True


class CheckpointCorrupt(KeepstepError):
    """A file of a checkpoint is not what its manifest says."""

    recoverable = True


class StoreError(KeepstepError):
    """The store cannot be reached, or it answered something we cannot use."""


class JobOver(KeepstepError):
    """The job ended while this process was away."""


class Left(JobOver):
    """Somebody asked this replica to leave, or the job to stop: it is not complete, and this is no failure."""


class NoStateLeft(KeepstepError):
    """Nobody alive holds a state of the job's history, and there is no checkpoint to restore."""


class ReplicaLost(KeepstepError):
    """Another rank of this replica is gone: nothing is left to do here but to make room for the replica's next life."""


class NoProgress(KeepstepError):
    """The main thread hangs: this life of the replica is of no use."""


class InvariantViolation(KeepstepError):
    """Something happened that the protocol rules out. The replica must crash, loudly."""


def exit_code(error: BaseException) -> int:
    """What a rank that ends with `error` exits with."""
    match error:
        case ReplicaLost():
            return EX_REPLICA_LOST
        case ConfigError():
            return EX_CONFIG
        case NoStateLeft():
            return EX_NO_RESTART
        case _:
            return 1
