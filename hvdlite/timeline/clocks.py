"""How far apart the clocks of two hosts are.

Cristian (1989): of several questions, the one answered fastest tells the time best; what it
says is off by at most half of the time that its answer took.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..transport.base import Communicator, Operation

__all__ = ["compare_clocks"]

_QUESTIONS = 8
_ASK_TAG, _ANSWER_TAG = 22, 23


def compare_clocks(comm: Communicator, clock: Callable[[], float]) -> Operation[float]:
    """Return the seconds to add to this rank's clock to get rank 0's.

    Every rank of the communicator runs this; one rank after the other asks rank 0. Clocks
    that the answers don't tell apart count as one, as those of one host are.
    """
    if comm.rank == 0:
        for source in range(1, comm.size):
            for _ in range(_QUESTIONS):
                yield comm.irecv(np.empty(1, np.uint8), source, _ASK_TAG)
                yield comm.isend(np.array([clock()]), source, _ANSWER_TAG)
        return 0.0
    best, offset = float("inf"), 0.0
    for _ in range(_QUESTIONS):
        answer = np.empty(1)
        asked = clock()
        yield comm.isend(np.zeros(1, np.uint8), 0, _ASK_TAG)
        yield comm.irecv(answer, 0, _ANSWER_TAG)
        now = clock()
        if now - asked < best:
            best = now - asked
            offset = float(answer[0]) - (asked + now) / 2
    # Clocks of two hosts count from when these were started: they agree by no accident.
    return 0.0 if abs(offset) <= best / 2 else offset
