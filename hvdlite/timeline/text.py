"""A report as sentences and tables."""

from __future__ import annotations

from ..tables import Table, human, print_tables
from .analysis import Report

__all__ = ["findings", "show", "tables"]


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.0f} %"


def tables(report: Report, top: int) -> list[Table]:
    """Return the tables of a report; `top` tensors are in it."""
    ranks = [
        Table(
            "Ranks (ms)",
            ("rank", "negotiating", "moving", "packing", "callers waiting", "hidden"),
            [
                [
                    f"rank {r.rank}",
                    *map(_ms, (r.negotiating_ms, r.moving_ms, r.packing_ms, r.waiting_ms)),
                    _share(r.hidden),
                ]
                for r in report.ranks
            ],
            "hidden: share of moving during which no caller was blocked",
        )
    ]
    known = [r for r in report.ranks if r.known]
    if known:
        worst = sorted(known, key=lambda r: -r.held_up_ms)
        ranks.append(
            Table(
                "Stragglers (ms)",
                ("rank", "times last", "of all", "later by", "at most", "held up"),
                [
                    [
                        f"rank {r.rank}",
                        f"{r.last}",
                        _share(r.last / r.known),
                        *map(_ms, (r.mean_late_ms, r.max_late_ms, r.held_up_ms)),
                    ]
                    for r in worst
                ],
                "later: than the last but one; held up: something waited for it alone",
            )
        )
    columns = ("tensor", "times", "bytes", "total", "straggling", "agreeing", "moving", "worst")
    slow = [
        [
            t.name,
            str(t.count),
            human(t.nbytes),
            *map(_ms, (t.total_ms, t.straggling_ms, t.agreeing_ms, t.moving_ms, t.slowest_ms)),
        ]
        for t in report.tensors[:top]
    ]
    note = "straggling: until the last rank had submitted it; agreeing: until all knew that"
    ranks.append(Table("Slowest tensors (means in ms)", columns, slow, note))
    return ranks


def findings(report: Report) -> list[str]:
    """Return what is worth knowing, one sentence each."""
    lines = []
    batches = report.batches
    lines.append(
        f"{report.size} rank{'s' * (report.size != 1)}, {report.duration_ms / 1e3:.2f} s, "
        f"{len(report.tensors)} tensors, {human(batches.nbytes)} moved in {batches.count} batches"
        + (
            f" of {batches.tensors / batches.count:.1f} tensors and "
            f"{human(batches.nbytes / batches.count)} on average "
            f"(at most {batches.most_tensors} and {human(batches.largest)})."
            if batches.count
            else "."
        )
    )
    if len(report.ranks) < report.size:
        who = ", ".join(str(rank.rank) for rank in report.ranks)
        lines.append(f"The file has rank {who} only, so nothing is known about who was late.")
    if report.lost_events:
        lines.append(
            f"{report.lost_events} events of the beginning are lost: the timeline ran too long."
        )
    hidden = [rank.hidden for rank in report.ranks if rank.hidden is not None]
    if hidden:
        lines.append(
            f"{_share(sum(hidden) / len(hidden))} of the communication was hidden behind "
            "computation."
        )
    worst = max(report.ranks, key=lambda rank: rank.held_up_ms, default=None)
    if worst is not None and worst.held_up_ms > 0.05 * report.duration_ms:
        lines.append(
            f"Tensors waited for rank {worst.rank} alone during "
            f"{_share(worst.held_up_ms / report.duration_ms)} of the time."
        )
    return lines


def show(report: Report, top: int) -> None:
    """Print a report."""
    for line in findings(report):
        print(line)
    print_tables(tables(report, top))
