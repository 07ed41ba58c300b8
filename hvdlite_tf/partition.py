"""How gradients are spread over buckets, each of which is submitted when it is complete."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

__all__ = ["check_groups", "identity", "partition"]

_BUCKETS = 12
"""About how many: each costs an op that runs Python, each is a chance to overlap."""
_SMALLEST = 1 << 20
"""Bytes below which more buckets cost more than they hide."""


def check_groups(groups: Any) -> None:
    """Raise unless `groups` is None, a number that is not negative, or lists of variables.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if groups is None:
        return
    if isinstance(groups, bool) or not isinstance(groups, (int, list, tuple)):
        raise TypeError(
            f"groups must be None, a number or a list of lists of variables, not {groups!r}."
        )
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must not be negative, but is {groups}.")
        return
    for group in groups:
        if not isinstance(group, (list, tuple)):
            raise TypeError(
                "groups must be a list of lists of variables; one of its items is "
                f"a {type(group).__name__}."
            )
    members = [identity(variable) for group in groups for variable in group]
    if len(set(members)) != len(members):
        raise ValueError("groups: a variable is in several groups, or twice in one.")


def identity(variable: Any) -> int:
    """Return what tells a variable from others, the same for Keras's wrapper of it."""
    inner = getattr(variable, "value", None)
    return id(variable if inner is None or callable(inner) else inner)


def partition(
    sizes: Sequence[int], groups: Any = None, variables: Sequence[Any] | None = None
) -> list[list[int]]:
    """Spread gradients over buckets; backward passes produce the last ones first.

    Args:
        sizes: bytes of each gradient.
        groups: None, a number of groups, or lists of variables.
        variables: what the gradients are for.

    Returns:
        Indices of gradients, in the order in which to submit them.

    Raises:
        ValueError: there are lists of groups, but no variables are given.
    """
    backwards = list(range(len(sizes)))[::-1]
    if isinstance(groups, int) and groups > 0:
        count = min(groups, len(backwards))
        bounds = [len(backwards) * k // count for k in range(count + 1)] if count else []
        return [backwards[a:b] for a, b in itertools.pairwise(bounds)]
    grouped: list[list[int]] = []
    if groups:
        if variables is None:
            raise ValueError("groups of variables were given, so variables must be passed too.")
        places = {identity(variable): index for index, variable in enumerate(variables)}
        for group in groups:
            members = [places[key] for key in map(identity, group) if key in places]
            if members:
                grouped.append(sorted(members, reverse=True))
        taken = {index for group in grouped for index in group}
        backwards = [index for index in backwards if index not in taken]
    limit = max(_SMALLEST, -(-sum(sizes[index] for index in backwards) // _BUCKETS))
    buckets: list[list[int]] = []
    filled = limit
    for index in backwards:
        if filled >= limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    # A bucket is complete when its first variable's gradient is, which comes last.
    return sorted(buckets + grouped, key=lambda bucket: -bucket[-1])
