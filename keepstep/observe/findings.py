"""Everything that can be computed from a run's records, once: its history, its incidents, where its time went."""

from dataclasses import dataclass

from keepstep.observe.goodput import Goodput, account
from keepstep.observe.history import History
from keepstep.observe.incidents import Incident, incidents
from keepstep.observe.records import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a run came to so far."""

    history: History
    incidents: tuple[Incident, ...]
    goodput: Goodput

    @staticmethod
    def of(run: Run, *, until: float | None = None) -> "Findings":
        """`until`: the run goes on, and it is so late now (monotonic seconds)."""
        history = History(run)
        found = tuple(incidents(history))
        return Findings(history=history, incidents=found, goodput=account(history, found, until=until))
