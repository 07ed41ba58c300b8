"""What the kernel says of a process's memory. Jobs get the source of this: they may not find it."""

from __future__ import annotations


def asks_for_huge_pages(address: int) -> bool:
    """Return whether the mapping at an address of this process has asked for huge pages."""
    from pathlib import Path

    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span, _, rest = line.partition(" ")
        if "-" in span and ":" not in span:
            first, last = (int(end, 16) for end in span.split("-"))
            inside = first <= address < last
        elif inside and span == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError("no such mapping")
