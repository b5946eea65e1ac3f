"""The line of the log that says how training goes, in torchtitan's manner.

    step:  120  loss:  3.2102  step_time: 0.31s  tps: 12,345  replicas: 4/4  quorum_id: 7  ettr: 99.2%

Exactly one replica writes it: of the WORKERs, the one that has been WORKER for longest without a break, and of those the first
by replica_id. Each leader finds that out from the decisions it has seen: a newcomer saw all others before itself. So the line
goes on when the writer dies, and what it says of the past is of the longest past that somebody remembers.

`ettr` is what this replica knows since it began to train: productive replica-seconds over all replica-seconds, where a step
counts for its WORKERs, without what it waited for data or beyond the usual. `keepstep report` has the whole job's. Pure; main
thread only.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from keepstep.protocol.ids import Incarnation, ReplicaId, Seq
from keepstep.protocol.messages import Decision, Role
from keepstep.runtime.phases import DATA_WAIT, DISCARDED, WAIT

USUAL_OF = 31  # steps

Phase = tuple[str, float, float]


class Progress:
    """One leader's view. `on_commit` returns a line every `every` steps, if it is this replica's to write."""

    def __init__(self, incarnation: Incarnation, *, every: int, tokens_per_sample: int | None) -> None:
        self._me, self._every, self._tokens = incarnation, every, tokens_per_sample
        self._workers: dict[Incarnation, tuple[Seq, ReplicaId]] = {}  # since which decision
        self._waits: deque[float] = deque(maxlen=USUAL_OF)
        self._productive = self._elapsed = 0.0  # replica-seconds
        self._steps, self._seconds, self._samples = 0, 0.0, 0.0  # since the last line
        self._values: dict[str, float] = {}

    def note(self, values: Mapping[str, float]) -> None:
        """Numbers for the next line."""
        self._values.update(values)

    def on_commit(
        self, decision: Decision, *, loss: float | None, samples: float, took_s: float, phases: Sequence[Phase]
    ) -> str | None:
        """A step that took `took_s` seconds from the commit before is committed here."""
        known = self._workers
        self._workers = {
            m.incarnation: known.get(m.incarnation, (decision.seq, m.replica_id)) for m in decision.workers
        }
        mine = decision.workers and any(m.incarnation == self._me for m in decision.workers)
        if not mine:
            return None
        self._count(decision, took_s, phases)
        self._steps, self._seconds, self._samples = self._steps + 1, self._seconds + took_s, self._samples + samples
        if not self._every or (decision.step + 1) % self._every:
            return None
        line = self._line(decision, loss)
        self._steps, self._seconds, self._samples, self._values = 0, 0.0, 0.0, {}
        return line if min(self._workers, key=self._workers.__getitem__) == self._me else None

    def _count(self, decision: Decision, took_s: float, phases: Sequence[Phase]) -> None:
        spent = {name: sum(b - a for n, a, b in phases if n == name) for name in (WAIT, DATA_WAIT, DISCARDED)}
        usual = median(self._waits) if self._waits else spent[WAIT]
        self._waits.append(spent[WAIT])
        lost = spent[DATA_WAIT] + spent[DISCARDED] + max(0.0, spent[WAIT] - usual)
        self._productive += max(0.0, took_s - lost) * len(decision.workers)
        self._elapsed += took_s * decision.num_replicas

    def _line(self, decision: Decision, loss: float | None) -> str:
        rate, name = self._samples / self._seconds if self._seconds > 0 else 0.0, "sps"
        if self._tokens is not None:
            rate, name = rate * self._tokens, "tps"
        working = sum(m.role is Role.WORKER for m in decision.members)
        parts = [
            f"step: {decision.step + 1:4d}",
            f"loss: {'-' if loss is None else f'{loss:7.4f}'}",
            *(f"{key}: {value:.4g}" for key, value in self._values.items()),
            f"step_time: {self._seconds / self._steps:.2f}s",
            f"{name}: {rate:,.0f}",
            f"replicas: {working}/{decision.num_replicas}",
            f"quorum_id: {decision.quorum_id}",
            f"ettr: {100 * self._productive / self._elapsed if self._elapsed else 100.0:.1f}%",
        ]
        return "  ".join(parts)
