"""The communicator of a single process, where no MPI library is needed or installed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from .base import Pending
from .types import Array, DType, ReduceOp

__all__ = ["LocalCommunicator"]


class _Completed:
    """A communication that ended when it began."""

    def Test(self) -> bool:
        return True


_COMPLETED = _Completed()


class _Receive:
    """Takes its message as soon as this process has sent it to itself."""

    def __init__(self, data: Array, messages: deque[Array]) -> None:
        self._data: Array | None = data
        self._messages = messages

    def Test(self) -> bool:
        if self._data is not None:
            if not self._messages:
                return False
            message = self._messages.popleft()
            self._data.reshape(-1).view(np.uint8)[: len(message)] = message
            self._data = None
        return True


class LocalCommunicator:
    """A group of one. Collectives leave the data as they are; messages to itself are queued."""

    def __init__(self) -> None:
        self._messages: defaultdict[int, deque[Array]] = defaultdict(deque)

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def isend(self, data: Array, dest: int, tag: int) -> Pending:
        _only(dest)
        self._messages[tag].append(data.reshape(-1).view(np.uint8).copy())
        return _COMPLETED

    def irecv(self, data: Array, source: int, tag: int) -> Pending:
        _only(source)
        return _Receive(data, self._messages[tag])

    def probe(self, source: int, tag: int) -> int | None:
        """Return the bytes of the next message with `tag`, None while there is none."""
        _only(source)
        messages = self._messages.get(tag)
        return len(messages[0]) if messages else None

    def iband(self, words: Array) -> Pending:
        return _COMPLETED

    def iallreduce(self, data: Array, dtype: DType, op: ReduceOp) -> Pending:
        return _COMPLETED

    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        return True

    def iallgather(self, send: Array, recv: Array) -> Pending:
        recv.reshape(-1).view(np.uint8)[:] = send.reshape(-1).view(np.uint8)
        return _COMPLETED

    def ibcast(self, data: Array, root: int) -> Pending:
        _only(root)
        return _COMPLETED

    def ibarrier(self) -> Pending:
        return _COMPLETED

    def duplicate(self) -> LocalCommunicator:
        return LocalCommunicator()

    def subset(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        """Return a communicator of these ranks, None if that is none.

        Raises:
            ValueError: a rank is given twice or does not exist.
        """
        members = list(ranks)
        if members not in ([], [0]):
            raise ValueError(f"ranks {members} are not distinct ranks below 1")
        return LocalCommunicator() if members else None

    def free(self) -> None:
        self._messages.clear()


def _only(rank: int) -> None:
    if rank != 0:
        raise ValueError(f"there is no rank {rank}: this process is alone")
