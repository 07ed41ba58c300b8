"""Checks of what users pass: errors name the argument, its value and the rank."""

from __future__ import annotations

import operator
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.collectives import resolve_op
from hvdlite.engine.checks import factor_of
from hvdlite.transport.types import ReduceOp

from .compression import BF16Compressor, Compressor, FP16Compressor

__all__ = [
    "cast_type",
    "checked_compression",
    "checked_factor",
    "checked_integer",
    "checked_op",
    "checked_process_set",
    "whereabouts",
]


def whereabouts() -> str:
    """Return who we are, to put into errors: ranks may have been given different things."""
    return f"rank {hvdlite.rank()}" if hvdlite.is_initialized() else "before init()"


def checked_integer(value: Any, function: str, argument: str, minimum: int) -> int:
    """Return a whole number that is not too small.

    Raises:
        TypeError: it is not a whole number; True and 2.0 are none.
        ValueError: it is too small.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{function}: {argument} must be a whole number, not {value!r} ({whereabouts()})."
        ) from None
    if number < minimum:
        raise ValueError(
            f"{function}: {argument} must be at least {minimum}, not {number} ({whereabouts()})."
        )
    return number


def checked_factor(value: Any, function: str, argument: str, positive: bool = False) -> float:
    """Return a factor as a finite float.

    Raises:
        TypeError: it is not a real number.
        ValueError: it is not finite, or not positive where it has to be.
    """
    try:
        number = factor_of(value, argument)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{function}: {error}") from None
    if positive and number <= 0:
        raise ValueError(
            f"{function}: rank {hvdlite.rank()}: {argument} must be positive, not {number}."
        )
    return number


def checked_op(value: Any, function: str) -> ReduceOp:
    """Return a reduce operation.

    Raises:
        TypeError: it is a bool, as the old argument `average` was.
        ValueError: there is no such operation.
    """
    if isinstance(value, bool):
        raise TypeError(
            f"{function}: op must be an operation such as Sum, not {value} ({whereabouts()}); "
            "average=True is another argument."
        )
    return resolve_op(None, value)


def checked_compression(value: Any, function: str) -> Any:
    """Return a compressor, which is a class or an object with its two methods.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, type) and issubclass(value, Compressor):
        return value
    if all(callable(getattr(value, method, None)) for method in ("compress", "decompress")):
        return value
    raise TypeError(
        f"{function}: compression must be a compressor such as Compression.fp16, "
        f"not {value!r} ({whereabouts()})."
    )


def checked_process_set(value: Any, function: str) -> ProcessSet:
    """Return a process set.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, ProcessSet):
        raise TypeError(
            f"{function}: process_set must be a ProcessSet, such as global_process_set, "
            f"not {value!r} ({whereabouts()})."
        )
    return value


def cast_type(compression: object, dtype: torch.dtype) -> torch.dtype | None:
    """Return the type to which the engine can cast elements while it moves others.

    Returns:
        None where there is nothing to cast, or where `compression` does more than that.
    """
    if dtype not in (torch.float32, torch.float64):
        return None
    if compression is BF16Compressor:
        return torch.bfloat16
    return torch.float16 if compression is FP16Compressor else None
