"""Records of several hosts on one clock: how far apart their clocks are, how exactly that is known, and one report over all."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from recorder import Record, Recorder, killed_run

from keepstep.observe.findings import Findings
from keepstep.observe.hosts import run_directories, together
from keepstep.observe.records import Run
from keepstep.observe.report import write_report
from keepstep.protocol.errors import ConfigError

AWAY = -5000.25  # how far the other host's clock is behind


def on(run: Run, *replicas: int, clock: Callable[[float], float] = lambda mono: mono) -> Run:
    """What the host of these replicas has recorded, by its own clock."""

    def own(record: Record) -> Record:
        phases = record.get("phases")
        moved = {} if phases is None else {"phases": [[name, clock(a), clock(b)] for name, a, b in phases]}
        return {**record, "mono": clock(record["mono"]), **moved}

    mine = [own(e) for e in run.events if e["replica"] in replicas]
    return Run(events=tuple(mine), faults=tuple(own(f) for f in run.faults if f["replica"] in replicas))


def long_run(steps: int = 200) -> Run:
    r = Recorder()
    r.steps(0, steps, mono=0.0, unit=0)
    return r.run()


def test_one_story_of_two_hosts() -> None:
    r = killed_run()
    for e in r.events:
        if e["event"] == "commit" and e["seq"] == 6:
            e["phases"] = [["wait", 4.4, 5.7], ["data_wait", 4.0, 4.25]]
    here, there = on(r.run(), 0, 1), on(r.run(), 2, clock=lambda mono: mono + AWAY)
    run, (first, other) = together({"h0-1": here, "h1-1": there})
    assert (first.names, first.shift_s, first.words) == (("h0-1",), 0.0, "the clock of this report")
    assert (other.against, other.shift_s, other.decisions) == ("h0-1", pytest.approx(-AWAY), 9)
    found, known = Findings.of(run), Findings.of(r.run())
    assert found.goodput.as_json()["seconds"] == pytest.approx(known.goodput.as_json()["seconds"])
    assert [i.as_json() for i in found.incidents] == [i.as_json() for i in known.incidents]


def test_how_exact_it_is() -> None:
    rng = random.Random(1)
    whole = long_run()
    there = on(whole, 2, clock=lambda mono: mono + AWAY + rng.uniform(0.0, 0.01))
    _, (_, other) = together({"a": on(whole, 0, 1), "b": there})
    off = abs(other.shift_s + AWAY)
    assert other.likely_s is not None
    assert other.certain_s is not None
    assert off < 0.01
    assert 0.003 < other.likely_s < 0.01, "they differ by 10 ms among themselves"
    assert off < other.certain_s <= 1.02, "a decision was seen, and its step committed, within a second on either side"
    assert other.words.startswith("4.")
    assert "ms by 200 decisions that a saw too; certainly " in other.words


def test_what_a_step_that_both_have_made_shows_to_be_impossible_is_corrected() -> None:
    """A leader was told most decisions 0.7 s late, but some steps were committed in 0.1 s: the clocks are no further apart."""
    r = Recorder()
    for step in range(40):
        at, quick = 2.0 * step, step % 4 == 0
        r.decide(step + 1, step, max(step, 1), at, r0=[0], r1=[1], r2=[2])
        r.events[-1]["mono"] = at + (0.0 if quick else 0.7)
        r.commit(step + 1, step, at + (0.1 if quick else 1.0), 0, 1, 2)
    whole = r.run()
    _, (_, other) = together({"a": on(whole, 0, 1), "b": on(whole, 2)})
    assert (other.shift_s, other.certain_s) == (pytest.approx(-0.1), pytest.approx(0.2))


def test_one_kernel_has_one_clock() -> None:
    whole = long_run(3)
    start = {"event": "start", "mono": 0.0, "t": 0.0, "boot": "b00t"}
    parts = {name: on(whole, n) for n, name in enumerate(("h0-1", "h1-1", "h1-2"))}
    parts = {name: Run(events=({**start, "replica": None}, *run.events)) for name, run in parts.items()}
    _, (clock,) = together(parts)
    assert clock.names == ("h0-1", "h1-1", "h1-2")


def test_hosts_that_never_trained_together_are_set_by_a_third_or_by_the_wall_clock() -> None:
    whole = long_run(20)
    early = Run(events=tuple(e for e in on(whole, 0).events if e["mono"] < 9))
    late = Run(events=tuple(e for e in on(whole, 1, clock=lambda m: m + 77).events if e["mono"] > 88))
    all_along = on(whole, 2, clock=lambda mono: mono + AWAY)
    run, clocks = together({"early": early, "late": late, "all": all_along})
    assert [(c.names, c.against) for c in clocks] == [(("all",), ""), (("early",), "all"), (("late",), "all")]
    assert {name: round(c.shift_s, 6) for c in clocks for name in c.names} == {
        "all": 0,
        "early": AWAY,
        "late": AWAY - 77,
    }
    assert [e["mono"] for e in run.events] == sorted(e["mono"] for e in run.events)
    _, (_, other) = together({"early": early, "late": late})
    assert (other.shift_s, other.decisions) == (pytest.approx(-77), 0), "the recorder's wall clocks are right"
    assert other.words == "set by the wall clocks of this host and of early, and as wrong as they are"


def test_clocks_that_drift_are_named() -> None:
    whole = long_run(1000)
    _, (_, other) = together({"a": on(whole, 0, 1), "b": on(whole, 2, clock=lambda mono: mono * 1.01)})
    assert other.certain_s is None
    assert "the two clocks have drifted by " in other.words


def test_which_directories_hold_records(tmp_path: Path) -> None:
    for name in ("h0-1", "h0-2", "h1-1"):
        (tmp_path / name / "events").mkdir(parents=True)
    (tmp_path / "else").mkdir()
    every = [tmp_path / name for name in ("h0-1", "h0-2", "h1-1")]
    assert run_directories([tmp_path]) == every
    assert run_directories([every[2], tmp_path]) == [every[2], *every[:2]], "each once"
    with pytest.raises(ConfigError, match="holds no events of a run"):
        run_directories([tmp_path, tmp_path / "else"])


def written(folder: Path, run: Run, job: str = "mine") -> Path:
    (folder / "events").mkdir(parents=True)
    (folder / "events" / "launcher.jsonl").write_text("".join(json.dumps(e) + "\n" for e in run.events))
    (folder / "run.json").write_text(json.dumps({"job": job}))
    return folder


def test_one_report_over_all_hosts(tmp_path: Path) -> None:
    whole = killed_run().run()
    written(tmp_path / "h0-1", on(whole, 0))
    written(tmp_path / "h1-1", on(whole, 1, 2, clock=lambda mono: mono + AWAY))
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = path.read_text()
    for words in ("<title>mine</title>", "h1-1", "added", "the clock of this report", "5,000.250 s", "decisions that"):
        assert words in page
    assert "h0-1" not in write_report(tmp_path / "h0-1").read_text(), "one host alone has nothing to be compared with"
    written(tmp_path / "h2-1", on(whole, 2), job="another")
    with pytest.raises(ConfigError, match="several jobs, another, mine: name those of one"):
        write_report(tmp_path)


def test_an_agent_that_was_ended_is_not_the_end_of_the_job(tmp_path: Path) -> None:
    whole = long_run(5)
    start, end = ({"event": name, "mono": at, "t": at + 1000} for name, at in (("start", 0.0), ("end", 6.0)))
    written(tmp_path / "h0-1", Run(events=(start, *on(whole, 0, 1).events)))
    spare = written(tmp_path / "h1-1", Run(events=(start, *on(whole, 2).events, {**end, "code": 143})))
    assert "it goes on, or its launcher was killed" in write_report(tmp_path).read_text()
    (spare / "events" / "launcher.jsonl").write_text("".join(json.dumps(e) + "\n" for e in (start, {**end, "code": 0})))
    assert "The job is complete" in write_report(tmp_path).read_text()
