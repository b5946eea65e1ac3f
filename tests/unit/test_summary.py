"""The summary of hand-made records: three replicas, one killed, one decision revoked."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.observe.picture import draw
from keepstep.observe.records import Run, read_run
from keepstep.observe.summary import (
    chain,
    losses_by_step,
    step_times,
    summarize,
    units,
)

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


@pytest.fixture
def killed() -> Recorder:
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


def test_a_clean_run() -> None:
    r = Recorder()
    r.steps(0, 4, mono=0.0, unit=0)
    r.final(4.1, committed=12, total=12)
    summary = summarize(r.run())
    assert summary["steps"] == 4
    assert (summary["loss_first"], summary["loss_last"]) == (5.0, pytest.approx(4.7))
    assert summary["units_committed"] == summary["units_total"] == 12
    assert (summary["units_lost"], summary["units_duplicated"]) == (0, 0)
    assert summary["digests_equal"]
    assert summary["state_digest"] == {"0": "d", "1": "d", "2": "d"}
    assert summary["ledgers_agree"]
    assert summary["step_time_median_s"] == 1.0
    assert summary["kills"] == []
    assert summary["wall_s"] == pytest.approx(4.1)


def test_a_kill_and_the_return(killed: Recorder) -> None:
    (kill,) = summarize(killed.run())["kills"]
    assert kill["step"] == 4
    assert kill["phase"] == "in_exchange"
    assert (kill["replica"], kill["rank"]) == (1, 1)
    assert kill["detected_s"] == pytest.approx(0.01)
    assert kill["stall_s"] == pytest.approx(0.7)  # step 4 came 1.7 s after step 3
    assert kill["rejoined_at_step"] == 6
    assert kill["rejoin_stall_s"] == pytest.approx(0.2)  # step 5 took 1.2 s


def test_detected_by_a_survivor_first(killed: Recorder) -> None:
    for event in killed.events:
        if event["event"] == "exit":
            event["mono"] = 4.9
    assert summarize(killed.run())["kills"][0]["detected_s"] == pytest.approx(0.1)


def test_a_killed_step_counts_each_unit_once(killed: Recorder) -> None:
    run = killed.run()
    summary = summarize(run)
    assert units(chain(run)) == [*range(12), 12, 14, 13, 15, 16, 17, 18]
    assert (summary["units_lost"], summary["units_duplicated"], summary["steps"]) == (0, 0, 7)
    assert summary["retries"] == 1


def test_never_rejoined() -> None:
    r = Recorder()
    r.steps(0, 3, mono=0.0, unit=0)
    shot = {"action": "kill", "replica": 2, "rank": 0, "step": 2, "phase": "forward", "incarnation": "c0"}
    r.faults.append({**shot, "mono": 2.5})
    (kill,) = summarize(r.run())["kills"]
    assert kill["rejoined_at_step"] is kill["rejoin_stall_s"] is kill["detected_s"] is None


def test_a_revoked_decision_is_not_counted() -> None:
    r = Recorder()
    r.steps(0, 3, mono=0.0, unit=0)
    r.decide(4, 3, 3, 3.0, r0=[9], r1=[10], r2=[11])
    r.commit(4, 3, 4.0, 2, loss=0.1)  # only replica 2, which was then cut off
    r.decide(5, 3, 3, 9.0, r0=[9], r1=[10])
    r.commit(5, 3, 10.0, 0, 1, loss=4.0)
    r.decide(6, 4, 5, 10.0, r0=[11], r1=[12], r2=[])
    r.commit(6, 4, 11.0, 0, 1, loss=3.0)
    r.final(11.5, committed=13)
    run = r.run()
    assert [d["seq"] for d in chain(run)] == [1, 2, 3, 5, 6]
    assert losses_by_step(run, chain(run))[3] == 4.0
    assert step_times(run, chain(run))[3] == 10.0
    summary = summarize(run)
    assert (summary["units_committed"], summary["units_duplicated"], summary["units_lost"]) == (13, 0, 0)
    assert summary["decisions_revoked"] == 1


def test_a_revoked_decision_at_the_very_end() -> None:
    r = Recorder()
    r.steps(0, 3, mono=0.0, unit=0)
    r.decide(4, 3, 3, 3.0, r0=[9], r1=[10], r2=[11])
    r.commit(4, 3, 4.0, 2)
    r.decide(5, 3, 3, 9.0, r0=[9], r1=[10])  # revokes 4; nobody had committed it yet when the records end
    assert [d["seq"] for d in chain(r.run())] == [1, 2, 3]


def test_duplicates_and_losses_are_seen(killed: Recorder) -> None:
    for event in killed.events:
        if event["event"] == "decision" and event["seq"] == 7:
            event["members"][0]["units"] = [12]  # 12 a second time, and 13 never
    summary = summarize(killed.run())
    assert (summary["units_duplicated"], summary["units_lost"]) == (1, 1)
    assert not summary["ledgers_agree"]


def test_a_complete_job_must_have_every_unit() -> None:
    r = Recorder()
    r.steps(0, 4, mono=0.0, unit=0)
    r.final(4.1, committed=13, total=13)
    assert summarize(r.run())["units_lost"] == 1


def test_units_given_back_in_the_last_step_are_not_lost() -> None:
    r = Recorder()
    r.steps(0, 3, mono=0.0, unit=0)
    r.decide(4, 3, 3, 3.0, r0=[9], r1=[10], r2=[11])
    r.decide(5, 3, 3, 3.5, r0=[9], r2=[11])
    r.commit(5, 3, 4.5, 0, 2)
    r.final(5.0, 11, 100)
    assert summarize(r.run())["units_lost"] == 0


@pytest.mark.parametrize("change", ["other digest", "no digest"])
def test_unequal_digests_are_seen(killed: Recorder, change: str) -> None:
    last = next(e for e in killed.events if e["event"] == "final" and e["replica"] == 1)
    if change == "other digest":
        last["digest"] = "e"
    else:
        killed.events.remove(last)
    assert not summarize(killed.run())["digests_equal"]


def test_nothing_recorded() -> None:
    summary = summarize(Run(events=()))
    assert summary["steps"] == 0
    assert summary["loss_first"] is summary["wall_s"] is summary["step_time_median_s"] is None
    assert not summary["digests_equal"]


def test_reads_a_run_with_a_torn_line(killed: Recorder, tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    for e in killed.events:
        with (tmp_path / "events" / f"replica{e['replica']}-rank{e['rank']}-{e['incarnation']}.jsonl").open("a") as f:
            f.write(json.dumps(e) + "\n")
    with (tmp_path / "events" / "replica1-rank0-b0.jsonl").open("a") as f:
        f.write('{"event": "commit", "mono": 4.')
    (tmp_path / "faults.jsonl").write_text("".join(json.dumps(f) + "\n" for f in killed.faults))
    assert summarize(read_run(tmp_path)) == summarize(killed.run())


def test_draws_a_picture(killed: Recorder, tmp_path: Path) -> None:
    draw(killed.run(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
