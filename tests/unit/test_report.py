"""The report of hand-made records: what it says, and that it needs nothing and lets nothing in."""

import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from recorder import Recorder, killed_run

from keepstep.observe.goodput import Segment, State
from keepstep.observe.plots import SHAPES_MAX, every, thin
from keepstep.observe.report import duration, render, write_report
from keepstep.protocol.errors import ConfigError

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Reads a page strictly enough: every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_says_what_the_run_came_to() -> None:
    page = Page(render(killed_run().run(), "my-job"))
    for words in ("my-job", "86.7 %", "98.8 %", "replica 1", "1, rank 1", "in exchange", "0.70 s", "discarded"):
        assert words in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 4


def test_it_needs_nothing_from_elsewhere() -> None:
    page = Page(render(killed_run().run(), "my-job"))
    assert not {"script", "link", "img", "iframe", "object", "image"} & {tag for tag, _ in page.tags}
    outside = [
        (tag, name, value)
        for tag, attributes in page.tags
        for name, value in attributes.items()
        if "://" in (value or "") and not name.startswith("xmlns")
    ]
    assert outside == []


@pytest.mark.parametrize(
    "evil", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "&lt;b&gt;", "</style>"]
)
def test_what_processes_said_is_only_text(evil: str) -> None:
    r = killed_run()
    r.faults[0]["action"] = r.faults[0]["phase"] = evil
    r.events = [e for e in r.events if e.get("incarnation") != "b1"]
    r.add("gave_up", 5.0, 1, reason=evil)
    r.events[-1]["incarnation"] = None
    page = Page(render(r.run(), evil))
    assert page.text.count(evil) >= 2
    assert not {"script", "img"} & {tag for tag, _ in page.tags}


def test_a_run_of_which_hardly_anything_is_known() -> None:
    r = Recorder(replicas=1)
    assert "goes on" in Page(render(r.run(), "my-job")).text


def test_it_is_written_into_the_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no events"):
        write_report(tmp_path)
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "launcher.jsonl").write_text("".join(json.dumps(e) + "\n" for e in killed_run().events))
    (tmp_path / "run.json").write_text('{"job": "named"}')
    assert "<title>named</title>" in write_report(tmp_path).read_text()


def test_a_long_time_line_is_drawn_in_few_shapes_and_as_long() -> None:
    states = (State.PRODUCTIVE, State.DATA_WAIT)
    segments = [Segment(3 * i, 3 * i + 2 + i % 2, states[i % 2]) for i in range(100_000)]
    segments = [Segment(a.start, b.start, a.state) for a, b in pairwise(segments)]
    drawn = thin(segments, segments[-1].end // SHAPES_MAX)
    assert len(drawn) <= 2 * SHAPES_MAX
    assert (drawn[0].start, drawn[-1].end) == (0, segments[-1].end)
    assert all(a.end == b.start for a, b in pairwise(drawn))
    assert all(a.state is not b.state for a, b in pairwise(drawn))
    long = Segment(segments[-1].end, segments[-1].end * 2, State.STALL)
    assert thin([*segments, long], segments[-1].end // SHAPES_MAX)[-1] == long


def test_few_points_of_many() -> None:
    assert every([1, 2, 3]) == [1, 2, 3]
    assert every([]) == []
    few = every(list(range(10_001)), 100)
    assert len(few) <= 101
    assert (few[0], few[-1]) == (0, 10_000)


@pytest.mark.parametrize(("seconds", "words"), [(4.21, "4.2 s"), (200, "3 min 20 s"), (18_600, "5 h 10 min")])
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
