"""How a knob is declared, and how the text of its environment variables is read."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .exceptions import SettingsError

__all__ = [
    "BOOL",
    "CORES",
    "FILE",
    "FRACTION",
    "NAME",
    "OURS",
    "PORT",
    "THEIRS",
    "Kind",
    "Knob",
    "Spelling",
    "choice",
    "duration",
    "integer",
    "knob",
    "show_bytes",
]

OURS = "HVDLITE_"
THEIRS = "HOROVOD_"


@dataclass(frozen=True)
class Kind:
    """How a knob's text is read: `read` raises ValueError for what `accepts` does not cover."""

    accepts: str
    read: Callable[[str], object]
    show: Callable[[Any], str] = str


@dataclass(frozen=True)
class Spelling:
    """One of the environment variables that set a knob."""

    variable: str
    inverted: bool = False
    """Whether it says the opposite."""


@dataclass(frozen=True)
class Knob:
    """What there is to know about a knob beside its name, type and default."""

    kind: Kind
    doc: str
    spellings: tuple[Spelling, ...]
    """In order of precedence."""

    def read(self, spelling: Spelling, text: str) -> object:
        """Return the value that a variable's text stands for.

        Raises:
            SettingsError: the text is malformed.
        """
        try:
            value = self.kind.read(text)
        except ValueError:
            raise SettingsError(
                f"{spelling.variable} is {text!r}, but it must be {self.kind.accepts}"
            ) from None
        return not value if spelling.inverted else value


def _read_bool(text: str) -> bool:
    word = text.lower()
    if word in ("true", "yes", "on"):
        return True
    if word in ("false", "no", "off"):
        return False
    if re.fullmatch(r"[+-]?[0-9]{1,18}", word):
        return int(word) > 0
    raise ValueError


def _whole_number(text: str) -> int:
    # int() would also take 1_000, other scripts' digits and numbers no byte count can have.
    if not re.fullmatch(r"\+?[0-9]{1,18}", text):
        raise ValueError
    return int(text)


def show_bytes(count: int) -> str:
    """Return a number of bytes, and the same in a unit that divides it."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count and count % size == 0:
            return f"{count} ({count // size} {unit})"
    return str(count)


def integer(unit: str, minimum: int = 0, show: Callable[[Any], str] = str) -> Kind:
    """Return the kind of whole numbers of a unit from a minimum on."""

    def read(text: str) -> int:
        value = _whole_number(text)
        if value < minimum:
            raise ValueError
        return value

    return Kind(f"a whole number of {unit}, {minimum} or more", read, show)


def _read_port(text: str) -> int:
    value = _whole_number(text)
    if value > 65535:
        raise ValueError
    return value


def _read_number(text: str) -> float:
    # float() would also take nan, 1_000 and other scripts' digits.
    if not re.fullmatch(r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise ValueError
    return float(text)


def _read_fraction(text: str) -> float:
    value = _read_number(text)
    if value > 1:
        raise ValueError
    return value


def duration(unit: str, *, zero: bool) -> Kind:
    """Return the kind of finite times in a unit; `zero` says whether 0 is one."""

    def read(text: str) -> float:
        value = _read_number(text)
        if math.isinf(value) or (value == 0 and not zero):
            raise ValueError
        return value

    least = "0 or more" if zero else "more than 0"
    return Kind(f"a number of {unit}, {least}", read, lambda value: f"{value:g}")


def choice(*words: str) -> Kind:
    """Return the kind of one of some (lower-case) words, however it is capitalised."""

    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError
        return text.lower()

    return Kind(f"one of {', '.join(words)}", read)


def _read_cores(text: str) -> tuple[int, ...]:
    return tuple(_whole_number(part.strip()) for part in text.split(","))


def _read_file(text: str) -> str:
    if os.path.basename(text) in ("", ".", "..") or "\0" in text:
        raise ValueError
    return text


BOOL = Kind("1 or 0, true or false, yes or no, on or off", _read_bool, lambda on: str(int(on)))
FILE = Kind("the name of a file", _read_file, lambda _: "unset")
NAME = Kind("a name", str, lambda value: "unset" if value is None else str(value))
FRACTION = Kind("a number from 0 to 1", _read_fraction, lambda value: f"{value:g}")
PORT = Kind("a port number, 0 to 65535", _read_port)
CORES = Kind("core numbers separated by commas", _read_cores, lambda _: "unset")


def knob(
    default: object,
    kind: Kind,
    suffix: str,
    doc: str,
    *,
    horovod: bool = True,
    inverse: str | None = None,
) -> Any:
    """Declare a knob, as a field of a dataclass.

    Args:
        default: its value where nothing is set.
        kind: how its text is read and its default shown.
        suffix: of its variables, after `HVDLITE_` and `HOROVOD_`.
        doc: one sentence for the table.
        horovod: whether Horovod has it, too.
        inverse: the suffix of the variables that say the opposite; these are Horovod's then.
    """
    spellings = [Spelling(OURS + suffix)]
    if inverse is not None:
        spellings += [Spelling(prefix + inverse, inverted=True) for prefix in (OURS, THEIRS)]
    elif horovod:
        spellings.append(Spelling(THEIRS + suffix))
    knob = Knob(kind, doc, tuple(spellings))
    return dataclasses.field(default=default, metadata={"knob": knob})
