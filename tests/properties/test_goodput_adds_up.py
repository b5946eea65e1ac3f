"""Whatever was recorded, and whatever is left of it: every nanosecond of every slot is in exactly one state."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from recorder import killed_run

from keepstep.observe.findings import Findings
from keepstep.observe.goodput import Goodput, State, flatten
from keepstep.observe.hosts import together
from keepstep.observe.records import Run, whole_lines

SMALL = st.integers(0, 4)
TIMES = st.floats(0, 20)
LIVES = st.sampled_from(["a", "b", "c"])
ROLES = st.sampled_from(["worker", "catching_up", "king"])
MEMBERS = st.lists(
    st.fixed_dictionaries({"replica": SMALL, "incarnation": LIVES, "role": ROLES, "units": st.lists(SMALL)}), max_size=4
)
PHASES = st.lists(
    st.tuples(st.sampled_from(["wait", "data_wait", "ckpt_blocking", "discarded", "?"]), TIMES, TIMES), max_size=4
)
KINDS = (
    "spawn", "exit", "decision", "commit", "retry", "ring", "fetch", "materialized", "reported", "final", "over", "gave_up",
    "replica_done",
)  # fmt: skip
EVENTS = st.lists(
    st.fixed_dictionaries(
        {
            "event": st.sampled_from(KINDS),
            "mono": TIMES, "replica": SMALL, "rank": st.sampled_from([0, 0, 1]), "incarnation": LIVES, "seq": SMALL,
            "base": SMALL, "step": SMALL, "quorum_id": SMALL, "members": MEMBERS, "role": ROLES, "phases": PHASES,
            "code": st.sampled_from([0, 1, -9, None]), "digest": st.just("d"), "units_total": st.none(),
            "units_committed": SMALL, "num_replicas": st.one_of(st.none(), SMALL), "stopping": st.booleans(),
        }
    ),
    max_size=40,
)  # fmt: skip
FAULTS = st.lists(
    st.fixed_dictionaries(
        {
            "action": st.sampled_from(["kill", "stop"]), "mono": TIMES, "replica": SMALL, "rank": SMALL,
            "incarnation": LIVES,
        }
    ),
    max_size=3,
)  # fmt: skip


def check(goodput: Goodput) -> None:
    for slot, segments in goodput.slots.items():
        assert sum(goodput.totals(slot).values()) == goodput.elapsed
        assert all(s.start < s.end for s in segments)
        assert all(a.end == b.start and a.state is not b.state for a, b in pairwise(segments))
        if goodput.elapsed:
            assert (segments[0].start, segments[-1].end) == (goodput.start, goodput.end)
    assert sum(goodput.totals().values()) == goodput.elapsed * len(goodput.slots)
    if goodput.ettr_replica is not None and goodput.ettr_wall is not None:
        assert 0 <= goodput.ettr_replica <= goodput.ettr_wall <= 1


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def read(events: str, faults: str) -> Findings:
    rows = sorted(whole_lines(events.splitlines()), key=lambda e: float(e["mono"]))
    return Findings.of(Run(events=tuple(rows), faults=tuple(whole_lines(faults.splitlines()))))


@given(EVENTS, FAULTS)
def test_whatever_was_recorded(events: list[dict[str, Any]], faults: list[dict[str, Any]]) -> None:
    found = read(lines(events), lines(faults))
    check(found.goodput)
    json.dumps([found.goodput.as_json(), *(i.as_json() for i in found.incidents)])


@given(st.randoms(use_true_random=False), st.floats(0, 1), st.integers(0, 20_000))
def test_whatever_is_left_of_a_run(random: Any, kept: float, cut: int) -> None:
    r = killed_run()
    events = [e if random.random() < 0.9 else {**e, "mono": random.uniform(0, 9)} for e in r.events]
    check(read(lines([e for e in events if random.random() < kept])[: -cut or None], lines(r.faults)).goodput)


@given(st.randoms(use_true_random=False), st.floats(0, 1), st.lists(st.floats(-1e7, 1e7), min_size=3, max_size=3))
def test_whatever_is_left_of_the_records_of_several_hosts(random: Any, kept: float, clocks: list[float]) -> None:
    r = killed_run()
    parts: dict[str, Run] = {}
    for host, clock in enumerate(clocks):
        own = [e for e in r.events if e["replica"] == host and random.random() < kept]
        rows = whole_lines(lines([{**e, "mono": e["mono"] + clock} for e in own]).splitlines())
        parts[f"h{host}-1"] = Run(events=tuple(rows))
    run, _ = together(parts)
    check(Findings.of(run).goodput)


@given(st.lists(st.tuples(st.integers(-3, 23), st.integers(-3, 23), st.sampled_from(State)), max_size=12))
def test_flatten_against_a_row_of_boxes(paints: list[tuple[int, int, State]]) -> None:
    boxes = [State.UNATTRIBUTED] * 20
    for start, end, state in paints:
        for i in range(max(start, 0), min(end, 20)):
            boxes[i] = state
    assert [s.state for s in flatten(0, 20, paints) for _ in range(s.end - s.start)] == boxes
