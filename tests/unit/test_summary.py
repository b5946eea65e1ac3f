"""The summary of hand-made records: three replicas, one killed, one decision revoked."""

import json
from pathlib import Path

import pytest
from recorder import Recorder, killed_run

from keepstep.observe.history import History, units
from keepstep.observe.picture import draw
from keepstep.observe.records import Run, read_run
from keepstep.observe.summary import summarize


@pytest.fixture
def killed() -> Recorder:
    return killed_run()


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
    assert units(History(run).chain) == [*range(12), 12, 14, 13, 15, 16, 17, 18]
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
    assert [d["seq"] for d in History(run).chain] == [1, 2, 3, 5, 6]
    assert History(run).losses[3] == 4.0
    assert History(run).step_times[3] == 10.0
    summary = summarize(run)
    assert (summary["units_committed"], summary["units_duplicated"], summary["units_lost"]) == (13, 0, 0)
    assert summary["decisions_revoked"] == 1


def test_a_revoked_decision_at_the_very_end() -> None:
    r = Recorder()
    r.steps(0, 3, mono=0.0, unit=0)
    r.decide(4, 3, 3, 3.0, r0=[9], r1=[10], r2=[11])
    r.commit(4, 3, 4.0, 2)
    r.decide(5, 3, 3, 9.0, r0=[9], r1=[10])  # revokes 4; nobody had committed it yet when the records end
    assert [d["seq"] for d in History(r.run()).chain] == [1, 2, 3]


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
