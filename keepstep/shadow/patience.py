"""Longer waits, for hundreds of ranks on a few processors. What settings and the environment do not reach is set here.

A rank that is frozen or silent is found so many times later than in a real run; one that is dead is found as soon as ever.
"""

from types import ModuleType

from keepstep.runtime import (
    etcd,
    etcd_lease,
    gate,
    rank,
    state_connection,
    state_fetcher,
    state_server,
    tree,
    tree_joining,
)

WAITS: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (tree, ("TICK_S",)),
    (tree_joining, ("GREET_S",)),
    (etcd, ("CALL_S", "QUIET_S", "ANSWER_S")),
    (etcd_lease, ("CALL_S",)),
    (rank, ("FIRST_LOOK_S", "CLOSE_S", "FATAL_GRACE_S")),
    (gate, ("PROVE_S",)),
    (state_connection, ("SILENT_S", "AGAIN_FOR_S")),
    (state_server, ("STOP_S",)),
    (state_fetcher, ("STOP_S",)),
)


def be_patient(times: float) -> None:
    """In a process that has to do with no other run."""
    for module, names in WAITS:
        for name in names:
            setattr(module, name, getattr(module, name) * times)
