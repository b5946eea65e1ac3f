"""Hand-made records: three replicas whose steps take one second; one is killed."""

from typing import Any

from keepstep.observe.records import Run

Record = dict[str, Any]
LIVES = {0: "a0", 1: "b0", 2: "c0"}


class Recorder:
    """Writes the records of a job whose steps take one second."""

    def __init__(self, replicas: int = 3) -> None:
        self.events: list[Record] = []
        self.faults: list[Record] = []
        self.life = dict(LIVES)
        for r in range(replicas):
            self.add("spawn", 0.0, r)

    def add(self, event: str, mono: float, replica: int, **fields: Any) -> None:
        row = {"event": event, "t": mono + 1000, "mono": mono, "replica": replica, "rank": 0}
        self.events.append({**row, "incarnation": self.life[replica], **fields})

    def decide(self, seq: int, step: int, base: int, mono: float, kind: str = "train", **workers: list[int]) -> None:
        """`r0=[5]`: replica 0 trains unit 5; `r1=[]`: replica 1 catches up."""
        members = [
            {
                "replica": int(r[1:]),
                "incarnation": self.life[int(r[1:])],
                "role": "worker" if given else "catching_up",
                "units": given,
            }
            for r, given in workers.items()
        ]
        for m in members:
            self.add(
                "decision",
                mono,
                m["replica"],
                seq=seq,
                step=step,
                base=base,
                kind=kind,
                quorum_id=seq,
                members=members,
                reason="",
            )

    def commit(
        self, seq: int, step: int, mono: float, *replicas: int, role: str = "worker", loss: float | None = 1.0
    ) -> None:
        for r in replicas:
            fields = {"seq": seq, "step": step, "loss": loss, "samples": 8, "members": 3, "workers": 3}
            self.add("commit", mono, r, role=role, step_time_s=1.0, **fields)

    def steps(self, first: int, last: int, *, mono: float, unit: int) -> None:
        """Ordinary steps of all three: seq = step + 1."""
        for i, step in enumerate(range(first, last)):
            u = unit + 3 * i
            self.decide(step + 1, step, max(step, 1), mono + i, r0=[u], r1=[u + 1], r2=[u + 2])
            self.commit(step + 1, step, mono + i + 1, 0, 1, 2, loss=5.0 - 0.1 * step)

    def final(self, mono: float, committed: int, total: int | None = None, digest: str = "d", *replicas: int) -> None:
        for r in replicas or (0, 1, 2):
            self.add("final", mono, r, digest=digest, step=9, units_committed=committed, units_total=total)

    def run(self) -> Run:
        key = lambda e: e["mono"]  # noqa: E731
        return Run(events=tuple(sorted(self.events, key=key)), faults=tuple(self.faults))


def killed_run() -> Recorder:
    """Steps 0-3 by all; replica 1 dies in step 4, which is retried without it; back in step 5, WORKER from step 6."""
    r = Recorder()
    r.steps(0, 4, mono=0.0, unit=0)
    r.decide(5, 4, 4, 4.0, r0=[12], r1=[13], r2=[14])
    shot = {"action": "kill", "replica": 1, "rank": 1, "step": 4, "phase": "in_exchange", "incarnation": "b0"}
    r.faults.append({**shot, "t": 1004.5, "mono": 4.5})
    r.add("exit", 4.51, 1, signal=9)
    r.events[-1]["rank"] = 1
    r.add("retry", 4.6, 0, seq=5, reason="peer lost")
    r.decide(6, 4, 4, 4.8, r0=[12], r2=[14])
    r.commit(6, 4, 5.7, 0, 2)
    r.life[1] = "b1"
    r.decide(7, 5, 6, 5.7, r0=[13], r1=[], r2=[15])
    r.commit(7, 5, 6.9, 0, 2)
    r.commit(7, 5, 6.95, 1, role="catching_up")
    r.decide(8, 6, 7, 6.9, r0=[16], r1=[17], r2=[18])
    r.commit(8, 6, 7.9, 0, 1, 2, loss=2.5)
    r.decide(9, 7, 8, 7.9, kind="end", r0=[19], r1=[20], r2=[21])  # never committed: its units do not count
    r.final(8.0, committed=19)
    return r
