"""The page of `hvdlite timeline FILE --html OUT`, as a browser shows it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hvdlite.timeline.trace import RankEvents, write_trace

from .browser import Page, find_browser

pytest.importorskip("click")
pytestmark = [
    pytest.mark.skipif(find_browser() is None, reason="no Chromium or Chrome in PATH"),
    pytest.mark.timeout(180),
]

RANKS = 4
STEPS = 20
HOSTILE = '<img src="http://hvdlite.invalid/x" onerror="console.error(1)">'
NAMES = ["short", f"DistributedOptimizer.0.{'a.very.deep.model.' * 5}weight", HOSTILE]


def _events(rank):
    """One rank of a job of 20 steps of 10 ms: it moves data for 4 of them, and waits for 5."""
    for step in range(STEPS):
        begin = 0.01 * step
        for name in NAMES:
            late = begin + 1e-3 * (rank == 2)
            yield ("negotiate", name, late, begin + 2e-3, step, 0, "allreduce", 4000)
        yield ("move", tuple(NAMES), begin + 2e-3, begin + 6e-3, step, 0, 0, 3, 12_000)
        yield ("wait", NAMES[0], begin + 2e-3, begin + 7e-3, 7)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    trace, out = folder / "job.json", folder / "job.html"
    write_trace(str(trace), [RankEvents(r, 0.0, list(_events(r)), 0) for r in range(RANKS)], RANKS)
    command = [sys.executable, "-m", "hvdlite", "timeline", str(trace), "--html", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    page = Page(find_browser(), folder / "profile")
    try:
        page.address = out.as_uri()
        yield page
    finally:
        page.close()


@pytest.fixture(params=[(1280, 800), (360, 640)], ids=["desk", "telephone"])
def shown(page, request):
    """Show the page in a window of a desk, and on a telephone."""
    width, height = request.param
    page.do(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=1,
        mobile=False,
    )
    page.open(page.address)
    return page


def test_nothing_is_loaded_and_nothing_complained_about(shown):
    assert shown.requests == [shown.address]
    assert shown.complaints == []
    assert shown.evaluate("document.compatMode") == "CSS1Compat"
    assert shown.evaluate("document.characterSet") == "UTF-8"
    assert shown.evaluate("document.images.length + document.scripts.length") == 0
    # The check itself sees what a page does.
    shown.evaluate("console.error('seen')")
    assert "seen" in shown.complaints.pop()


def test_plots_are_drawn_to_scale(shown):
    plots = shown.evaluate("""
        [...document.querySelectorAll('svg')].map(svg => {
            const box = e => { const b = e.getBoundingClientRect();
                               return [b.left, b.top, b.right, b.bottom]; };
            return {box: box(svg), bars: [...svg.querySelectorAll('rect')].map(r =>
                [...box(r), r.className.baseVal, getComputedStyle(r).fill]),
                texts: [...svg.querySelectorAll('text')].map(t => [...box(t), t.textContent])};
        })""")
    assert len(plots) == 4
    for plot in plots:
        left, top, right, bottom = plot["box"]
        assert right - left > 250
        assert bottom - top > 10
        assert plot["bars"]
        for x1, y1, x2, y2, *_ in [*plot["bars"], *plot["texts"]]:
            assert left - 1 <= x1 <= x2 <= right + 1, "drawn outside"
            assert top - 1 <= y1 <= y2 <= bottom + 1, "drawn outside"
    activity = plots[0]
    left, _, right, _ = activity["box"]
    scale = (right - left) / 900 * 680 / (STEPS * 10 - 3)  # pixels in a millisecond
    for kind, milliseconds in (("move", 4), ("wait", 5)):
        bars = [bar for bar in activity["bars"] if bar[4] == kind]
        assert len(bars) == RANKS * STEPS
        for x1, y1, x2, y2, *_ in bars:
            assert x2 - x1 == pytest.approx(milliseconds * scale, rel=0.02)
            assert y2 - y1 > 1
    assert len({bar[5] for bar in activity["bars"]}) == 2, "two kinds, two colours"
    shown_names = [text[4] for text in plots[1]["texts"]]
    assert any(HOSTILE in text for text in shown_names)


def test_the_window_need_not_be_moved_sideways(shown):
    wide, window = shown.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= window


def test_pointing_at_a_bar_says_how_long_it_was(shown):
    title = shown.evaluate("""
        (() => { const bar = document.querySelector('rect.move');
                 bar.scrollIntoView();
                 const b = bar.getBoundingClientRect();
                 const x = (b.left + b.right) / 2, y = (b.top + b.bottom) / 2;
                 return document.elementFromPoint(x, y).querySelector('title').textContent; })()
        """)
    assert title == "2.00 to 6.00 ms"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_colour_schemes(page, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.do("Emulation.setEmulatedMedia", features=features)
    page.open(page.address)
    colours = page.evaluate("""
        (() => { const body = getComputedStyle(document.body);
                 const text = getComputedStyle(document.querySelector('svg text'));
                 return [body.backgroundColor, body.color, text.fill]; })()""")
    back, *texts = [_luminance(colour) for colour in colours]
    assert (back > 0.5) == (scheme == "light")
    for text in texts:
        # WCAG 2.2, success criterion 1.4.3.
        assert (max(text, back) + 0.05) / (min(text, back) + 0.05) >= 4.5


def _luminance(colour):
    """Return the relative luminance of rgb(r, g, b), as WCAG defines it."""
    values = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
