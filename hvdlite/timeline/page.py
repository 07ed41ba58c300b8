"""A report as one page of HTML that needs nothing but itself: plots are SVG inside it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ..tables import Table, human
from .analysis import Report, TensorTimes
from .intervals import Intervals
from .text import findings, tables

__all__ = ["page"]

_WIDTH = 900
_LABELS = 220
_ROW = 22
_STEPS = 1500
"""Bars of a row at most: what is narrower than a pixel is joined with what is beside it."""

_STYLE = """
:root { --text: #1d2433; --back: #fff; --line: #d5dae3; --move: #2f6fde; --wait: #e08a1e;
  --agree: #8a63c9; --late: #d24b4b; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8f0; --back: #161a22; --line: #3a4252; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; } svg { width: 100%; min-width: 40rem; height: auto; }
svg text { fill: var(--text); font-size: 12px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .5rem; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child { text-align: left; overflow-wrap: anywhere; }
.move { fill: var(--move); } .wait { fill: var(--wait); } .agree { fill: var(--agree); }
.late { fill: var(--late); } .axis { stroke: var(--line); }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
"""

_LONGEST_NAME = 30


def page(report: Report, title: str, top: int) -> str:
    """Return the page; it is well-formed XML, too.

    Args:
        report: what it shows.
        title: usually the name of the file.
        top: slow tensors shown.
    """
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width"/>',
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Timeline {_text(title)}</h1>",
        "<ul>",
        *(f"<li>{_text(line)}</li>" for line in findings(report)),
        "</ul>",
        "<h2>What the ranks did</h2>",
        _legend(("move", "moving"), ("wait", "callers waiting")),
        _activity(report),
        "<h2>Slowest tensors</h2>",
        _legend(("late", "straggling"), ("agree", "agreeing"), ("move", "moving")),
        _slow_tensors(report.tensors[:top]),
        "<h2>Held up by each rank</h2>",
        _bars([(f"rank {r.rank}", [("late", r.held_up_ms)]) for r in report.ranks], "ms"),
        "<h2>Sizes of batches</h2>",
        _batch_sizes(report),
        *map(_table, tables(report, top)),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _text(text: str) -> str:
    # XML has no way to say control characters, nor UTF-8 one for half a character.
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return html.escape(shown)


def _legend(*entries: tuple[str, str]) -> str:
    keys = (
        f'<span class="key" style="background: var(--{colour})"></span>{_text(name)}'
        for colour, name in entries
    )
    return f"<p>{''.join(keys)}</p>"


def _svg(rows: int, content: Iterable[str], label: str) -> str:
    height = max(rows, 1) * _ROW + 24
    return (
        f'<div class="wide"><svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{_text(label)}">{"".join(content)}</svg></div>'
    )


def _label(row: int, text: str) -> str:
    short = text if len(text) <= _LONGEST_NAME else "…" + text[1 - _LONGEST_NAME :]
    return (
        f'<text x="{_LABELS - 8}" y="{row * _ROW + 15}" text-anchor="end">{_text(short)}'
        f"<title>{_text(text)}</title></text>"
    )


def _rect(row: float, colour: str, x: float, width: float, height: float, title: str) -> str:
    return (
        f'<rect class="{colour}" x="{x:.2f}" y="{row * _ROW + 3:.1f}" width="{width:.2f}" '
        f'height="{height:g}"><title>{_text(title)}</title></rect>'
    )


def _axis(rows: int, most: float, unit: str) -> str:
    y = rows * _ROW + 2
    space = _WIDTH - _LABELS
    anchors = "start", "middle", "middle", "middle", "end"
    line = f'<line class="axis" x1="{_LABELS}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>'
    ticks = (
        f'<text x="{_LABELS + space * share:.0f}" y="{y + 16}" '
        f'text-anchor="{anchor}">{most * share:.4g} {unit}</text>'
        for share, anchor in zip((0, 0.25, 0.5, 0.75, 1), anchors, strict=True)
    )
    return line + "".join(ticks)


def _coarse(intervals: Intervals, step: float) -> Intervals:
    """Join intervals across gaps that are shorter than a step."""
    joined: Intervals = []
    for begin, end in intervals:
        if joined and begin - joined[-1][1] < step:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def _activity(report: Report) -> str:
    whole = max(report.duration_ms * 1e3, 1e-9)
    scale = (_WIDTH - _LABELS) / whole
    content = []
    for row, rank in enumerate(report.ranks):
        content.append(_label(row, f"rank {rank.rank}"))
        for colour, intervals, at in (("move", rank.moving, 0.0), ("wait", rank.waiting, 0.4)):
            for begin, end in _coarse(intervals, whole / _STEPS):
                width = max((end - begin) * scale, 0.3)
                title = f"{begin / 1e3:.2f} to {end / 1e3:.2f} ms"
                content.append(_rect(row + at, colour, _LABELS + begin * scale, width, 8, title))
    rows = len(report.ranks)
    content.append(_axis(rows, report.duration_ms, "ms"))
    return _svg(rows, content, "when each rank moved data, and when callers waited")


def _bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> str:
    most = max((sum(value for _, value in parts) for _, parts in rows), default=0.0) or 1.0
    content = []
    for row, (name, parts) in enumerate(rows):
        content.append(_label(row, name))
        at = float(_LABELS)
        for colour, value in parts:
            width = value / most * (_WIDTH - _LABELS)
            content.append(_rect(row, colour, at, width, _ROW - 6, f"{value:.2f} {unit}"))
            at += width
    content.append(_axis(len(rows), most, unit))
    return _svg(len(rows), content, "bars")


def _slow_tensors(tensors: Sequence[TensorTimes]) -> str:
    return _bars(
        [
            (
                tensor.name,
                [
                    ("late", tensor.straggling_ms),
                    ("agree", tensor.agreeing_ms),
                    ("move", tensor.moving_ms),
                ],
            )
            for tensor in tensors
        ],
        "ms",
    )


def _batch_sizes(report: Report) -> str:
    """Count batches by the power of two that their bytes reach."""
    counts: dict[int, int] = {}
    for _, nbytes, _ in report.batches.sizes:
        counts[nbytes.bit_length()] = counts.get(nbytes.bit_length(), 0) + 1
    rows = [
        (f"under {human(2**bits)}", [("move", float(count))])
        for bits, count in sorted(counts.items())
    ]
    return _bars(rows, "batches")


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    return (
        f'<h2>{_text(table.title)}</h2><div class="wide"><table>'
        f"<thead>{row(table.columns, 'th')}</thead><tbody>{body}</tbody></table></div>"
        f"<p>{_text(table.note)}</p>"
    )
