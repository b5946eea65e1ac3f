"""What a shadow run is found guilty of, from records made up for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.observe.records import Record, Run
from keepstep.protocol.errors import ConfigError
from keepstep.shadow.run import step_of
from keepstep.shadow.verify import judge


def records(digests: tuple[str, str] = ("a", "a"), trained: tuple[list[int], ...] = ([0, 1], [2, 3])) -> list[Record]:
    """Two replicas of one rank train `trained`: one unit each in each step."""
    rows: list[Record] = []

    def add(event: str, **fields: Any) -> None:
        rows.append({"event": event, "mono": float(len(rows)), **fields})

    for step, units in enumerate(trained):
        members = [{"replica": r, "incarnation": f"life{r}", "units": [unit]} for r, unit in enumerate(units)]
        add("decision", seq=step + 1, base=max(step, 0), step=step, kind="train", quorum_id=1, members=members)
        for r, unit in enumerate(units):
            who = {"replica": r, "rank": 0, "incarnation": f"life{r}"}
            add("batch", **who, units=[unit], epoch=[0], digest=f"data of {unit}")
            add("commit", **who, seq=step + 1, step=step, quorum_id=1)
    total = sum(len(units) for units in trained)
    for r, digest in enumerate(digests):
        who = {"replica": r, "rank": 0, "incarnation": f"life{r}"}
        add("final", **who, digest=digest, units_total=None, units_committed=total)
    return rows


def problems(rows: list[Record]) -> tuple[str, ...]:
    return judge(Run(events=tuple(rows))).problems


def test_a_run_that_is_what_it_must_be() -> None:
    assert problems(records()) == ()


def test_replicas_that_differ() -> None:
    (told,) = problems(records(digests=("a", "b")))
    assert told == "replicas ended with different states (replica 0: a, replica 1: b)"


def test_a_unit_trained_twice() -> None:
    assert "1 units were trained twice" in problems(records(trained=([0, 1], [1, 2])))


def test_a_unit_that_nobody_read() -> None:
    rows = [r for r in records() if not (r["event"] == "batch" and r["units"] == [2])]
    assert problems(rows) == ("units were trained that nobody had read: 2",)


def test_units_that_hold_the_same_data() -> None:
    rows = [{**r, "digest": "same"} if r["event"] == "batch" and r["units"] in ([1], [3]) else r for r in records()]
    assert problems(rows) == ("units 1, 3 hold the same data",)


def test_the_same_data_in_another_epoch_is_no_bug() -> None:
    rows = [{**r, "digest": "same"} if r["event"] == "batch" and r["units"] in ([1], [3]) else r for r in records()]
    rows = [{**r, "epoch": [1]} if r["event"] == "batch" and r["units"] == [3] else r for r in rows]
    assert problems(rows) == ()


def test_a_unit_that_is_read_again_and_holds_other_data() -> None:
    rows = records()
    again = next(r for r in rows if r["event"] == "batch" and r["units"] == [2])
    rows.append({**again, "digest": "other"})
    assert problems(rows) == ("read again, they held other data: units 2",)


def test_a_run_that_went_on_from_a_checkpoint_is_judged_by_what_it_did() -> None:
    rows = [
        {**r, "step": r["step"] + 5, "base": 40} if r["event"] == "decision" and r["step"] == 0 else r
        for r in records()
    ]
    rows = [{**r, "step": r["step"] + 5} if r["event"] != "decision" and "step" in r else r for r in rows]
    rows = [{**r, "step": 6} if r["event"] == "decision" and r["step"] == 1 else r for r in rows]
    rows = [{**r, "units_committed": 30} if r["event"] == "final" else r for r in rows]
    assert problems(rows) == ()


def test_a_step_may_take_as_long_as_it_took_in_a_real_run(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    with pytest.raises(ConfigError, match="holds no step of a run"):
        step_of(tmp_path)
    rows = records(trained=tuple([2 * i, 2 * i + 1] for i in range(4)))
    rows = [{**r, "mono": 0.25 * r["step"] if "step" in r else r["mono"]} for r in rows]
    (tmp_path / "events" / "all.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert step_of(tmp_path) == 0.25
