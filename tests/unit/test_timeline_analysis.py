"""What is said about a timeline, against sums done by hand; and the page with its plots."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.tables import human, print_tables
from hvdlite.timeline.analysis import analyse, load, main
from hvdlite.timeline.intervals import length, subtract, union
from hvdlite.timeline.page import page
from hvdlite.timeline.text import tables
from hvdlite.timeline.trace import RankEvents, write_trace

INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: tuple(sorted(pair)))
)


def covered(intervals):
    return {at for begin, end in intervals for at in range(begin, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_behave_like_sets(one, other):
    assert covered(union(one)) == covered(one)
    assert length(union(one)) == len(covered(one))
    left = subtract(union(one), union(other))
    assert covered(left) == covered(one) - covered(other)
    assert length(left) == len(covered(left))


def negotiate(name, begin, end, round_, nbytes=1000):
    return ("negotiate", name, begin, end, round_, 0, "allreduce", nbytes)


def batch(what, names, begin, end, round_, count=None, nbytes=1000):
    return (what, names, begin, end, round_, 0, 0, count or len(names), nbytes)


def wait(begin, end):
    return ("wait", "w", begin, end, 7)


# Seconds. Rank 1 is the last for a (by 2) and for b (by 1, at the same time), rank 0 for c by 4.
RANK_0 = [
    negotiate("a", 0.0, 3.0, 1),
    negotiate("b", 1.0, 3.0, 1),
    batch("pack", (), 3.0, 3.5, 1, 2, 3000),
    batch("move", ("a", "b"), 4.0, 8.0, 1, 2, 3000),
    batch("unpack", (), 8.0, 8.5, 1, 2, 3000),
    wait(5.0, 6.0),
    wait(5.5, 7.0),
    negotiate("c", 14.0, 15.0, 2, 500),
    batch("move", ("c",), 16.0, 18.0, 2, 1, 500),
    wait(15.0, 20.0),
]
RANK_1 = [
    negotiate("a", 102.0, 103.5, 1),
    negotiate("b", 102.0, 103.0, 1),
    batch("move", ("a", "b"), 104.0, 109.0, 1, 2, 3000),
    negotiate("c", 110.0, 115.0, 2, 500),
    batch("move", ("c",), 115.0, 119.0, 2, 1, 500),
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "t.json"
    write_trace(str(path), [RankEvents(0, 0.0, RANK_0, 0), RankEvents(1, -100.0, RANK_1, 3)], 2)
    return path


def test_the_numbers_are_those_of_the_events(path):
    report = analyse(load(path))
    assert (report.size, report.lost_events) == (2, 3)
    assert report.duration_ms == pytest.approx(20_000)
    zero, one = report.ranks
    assert (zero.last, zero.known, one.last, one.known) == (1, 3, 2, 3)
    assert (zero.mean_late_ms, zero.max_late_ms, zero.held_up_ms) == (4000, 4000, 4000)
    assert (one.mean_late_ms, one.max_late_ms, one.held_up_ms) == (1500, 2000, 2000)
    assert zero.negotiating_ms == pytest.approx(3000 + 1000)
    assert zero.moving_ms == pytest.approx(4000 + 2000)
    assert zero.packing_ms == pytest.approx(1000)
    assert zero.waiting_ms == pytest.approx(2000 + 5000)
    # Of 4 s and 2 s of moving, callers waited during 2 s and 2 s.
    assert zero.hidden == pytest.approx(2 / 6)
    assert one.hidden == 1.0
    assert [tensor.name for tensor in report.tensors] == ["a", "c", "b"]
    a, c, b = report.tensors
    assert (a.straggling_ms, a.agreeing_ms, a.moving_ms, a.total_ms) == (2000, 1500, 5000, 9000)
    assert (c.straggling_ms, c.agreeing_ms, c.moving_ms, c.total_ms) == (4000, 1000, 4000, 9000)
    assert (b.count, b.kind, b.nbytes, b.total_ms) == (1, "allreduce", 1000, 8000)
    batches = report.batches
    assert (batches.count, batches.tensors, batches.nbytes) == (2, 3, 3500)
    assert (batches.most_tensors, batches.largest) == (2, 3000)


def test_repeated_and_unnamed_tensors_are_averaged(tmp_path):
    events = [negotiate("w", float(i), i + 0.5, i) for i in range(4)]
    events += [batch("move", ("w",), i + 0.5, i + 0.5 + 0.1 * i, i) for i in range(4)]
    events += [negotiate(f"barrier.noname.{i}", float(i), i + 0.25, i) for i in range(4)]
    events += [negotiate("layer.3", 0.0, 0.25, 9)]
    write_trace(str(tmp_path / "t.json"), [RankEvents(0, 0.0, events, 0)], 1)
    found = {t.name: t for t in analyse(load(tmp_path / "t.json")).tensors}
    assert set(found) == {"w", "barrier.noname", "layer.3"}
    assert found["w"].count == found["barrier.noname"].count == 4
    assert found["w"].total_ms == pytest.approx(500 + 150)
    assert found["w"].slowest_ms == pytest.approx(800)
    assert found["barrier.noname"].total_ms == pytest.approx(250)


def test_the_part_of_one_rank_says_nothing_of_stragglers(tmp_path, capsys):
    write_trace(str(tmp_path / "t.rank1.json"), [RankEvents(1, 0.0, RANK_1, 0)], 4)
    assert main([str(tmp_path / "t.rank1.json")]) == 0
    shown = capsys.readouterr().out
    assert "The file has rank 1 only" in shown and "Stragglers" not in shown


def test_a_timeline_without_events_is_no_trouble(tmp_path, capsys):
    write_trace(str(tmp_path / "t.json"), [RankEvents(r, 0.0, [], 0) for r in range(2)], 2)
    assert main([str(tmp_path / "t.json"), "--html", str(tmp_path / "t.html")]) == 0
    assert "0 tensors" in capsys.readouterr().out
    ET.fromstring((tmp_path / "t.html").read_text().split("\n", 1)[1])


@pytest.mark.parametrize("plain", [False, True])
def test_tables_name_what_matters(path, capsys, monkeypatch, plain):
    if plain:
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main([str(path), "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "Tensors waited for rank 0 alone during 20 % of the time." in shown
    assert "67 % of the communication was hidden" in shown  # of 33 % and 100 %
    assert "3 events of the beginning are lost" in shown
    lines = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()]
    assert ["rank 1", "2", "67 %", "1500", "2000", "2000"] in lines
    assert ["a", "1", "1000 B", "9000", "2000", "1500", "5000", "9000"] in lines
    assert not any(line[0] == "b" for line in lines)


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path, capsys):
    events = [negotiate("[bold]w[/nonsense]", 0.0, 1.0, 1)]
    write_trace(str(tmp_path / "t.json"), [RankEvents(0, 0.0, events, 0)], 1)
    print_tables(tables(analyse(load(tmp_path / "t.json")), 5))
    assert "[bold]w[/nonsense]" in capsys.readouterr().out


def test_json_has_the_same_numbers(path, capsys):
    assert main([str(path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ranks"][1]["last"] == 2 and values["tensors"][0]["name"] == "a"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "no timeline of hvdlite"),
        ('{"traceEvents": []}', "no timeline of hvdlite"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, content, text):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 1
    error = capsys.readouterr().err
    assert text in error and "t.json" in error and "Traceback" not in error


def test_runs_as_a_module(path):
    command = [sys.executable, "-m", "hvdlite.timeline", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Slowest tensors" in done.stdout, done


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (2**20, "1 MiB")])
def test_bytes_are_readable(nbytes, text):
    assert human(nbytes) == text


# -- the page ---------------------------------------------------------------------------

NASTY = '<script>alert("x")</script> & \x07 \ud800'


class References(HTMLParser):
    """Collects whatever would make a browser load something."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "link", "img", "iframe", "object", "embed"):
            self.found.append(tag)
        self.found += [name for name, _ in attrs if name in ("src", "href", "xlink:href", "data")]


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path):
    events = [*RANK_0, negotiate(NASTY, 0.0, 19.0, 3)]
    path = tmp_path / "t.json"
    write_trace(str(path), [RankEvents(0, 0.0, events, 0), RankEvents(1, -100.0, RANK_1, 0)], 2)
    assert main([str(path), "--html", str(tmp_path / "t.html")]) == 0
    text = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    root = ET.fromstring(text.split("\n", 1)[1])
    references = References()
    references.feed(text)
    assert references.found == []
    assert "url(" not in text and "@import" not in text
    assert "<script" not in text and "&lt;script&gt;" in text
    assert len(text) < 100_000
    svg = "{http://www.w3.org/2000/svg}"
    plots = root.findall(f".//{svg}svg")
    assert len(plots) == 4
    # Rank 0 moved from 4 to 8 of 20 s.
    width = 900 - 220
    first = next(r for r in plots[0].iter(f"{svg}rect") if r.get("class") == "move")
    assert float(first.get("x")) == pytest.approx(220 + width * 4 / 20, abs=0.01)
    assert float(first.get("width")) == pytest.approx(width * 4 / 20, abs=0.01)


def test_the_page_of_a_long_timeline_stays_light(tmp_path):
    events = [batch("move", ("w",), i * 1e-3, i * 1e-3 + 5e-4, i) for i in range(50_000)]
    write_trace(str(tmp_path / "t.json"), [RankEvents(0, 0.0, events, 0)], 1)
    assert len(page(analyse(load(tmp_path / "t.json")), "t", 10)) < 300_000
