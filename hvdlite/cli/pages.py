"""Huge pages for all memory of the ranks."""

from __future__ import annotations

from collections.abc import Mapping

from ..knobs import BOOL

__all__ = ["ask_for_huge_pages"]


def ask_for_huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what makes the C library ask for huge pages, unless the user has decided on that.

    Large arrays that are made anew in each step, as gradients are, cost a page fault for every
    page; and one rank looks up every page of another's memory that it reaches.
    """
    tunables, name = environ.get("GLIBC_TUNABLES", ""), "glibc.malloc.hugetlb"
    if name in tunables or not _wants_them(environ):
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, f"{name}=1"]))}


def _wants_them(environ: Mapping[str, str]) -> bool:
    text = environ.get("HVDLITE_HUGE_PAGES", "").strip()
    try:
        return not text or bool(BOOL.read(text))
    except ValueError:
        return True  # the ranks will say what is wrong with it
