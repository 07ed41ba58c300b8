"""What ranks tell each other about collectives: requests, responses and their wire form."""

from __future__ import annotations

import enum
import hashlib
import pickle
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..transport.types import Array, DType, ReduceOp

__all__ = ["Key", "Kind", "News", "Reply", "Request", "Response", "decode", "display", "encode"]


class Kind(enum.IntEnum):
    """The collective that a request asks for."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    JOIN = 6
    ADD_PROCESS_SET = 7
    REMOVE_PROCESS_SET = 8

    def __str__(self) -> str:
        return self.name.lower()


Key: TypeAlias = "str | int"
"""Identifies a request across ranks: its name, or its position among the unnamed ones."""


class Request(NamedTuple):
    """One rank's wish, for one tensor or for a group that is reduced as a whole.

    A named tuple, because equality, hashing and pickling of these are on the path of every
    tensor of every step and are done in C for tuples.
    """

    kind: Kind
    dtypes: tuple[DType, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    """alltoall: rows for each rank; process sets: the ranks, or the number of the set."""
    resident: bool = False
    """Whether the tensor lies in memory that the transport has allocated."""

    def digest(self) -> int:
        """Return 64 bits that differ between ranks if, for all practical purposes, requests do."""
        # Not pickle: its bytes tell equal objects from identical ones.
        raw = repr(_plain(self)).encode()
        return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


class Response(NamedTuple):
    """What all ranks agreed to do under one key; the same on every rank."""

    key: Key
    request: Request
    rows: tuple[tuple[int, ...], ...] = ()
    """allgather: for each tensor, the rows of each rank; alltoall: for each rank, its splits."""
    error: str | None = None

    @classmethod
    def of_equal_requests(cls, key: Key, request: Request, size: int) -> Response:
        """Return the response to a request that is the same on all `size` ranks."""
        return cls(key, request, gathered_rows([request] * size))


def gathered_rows(requests: list[Request]) -> tuple[tuple[int, ...], ...]:
    """Return `Response.rows` for the requests of all ranks, in rank order."""
    first = requests[0]
    if first.kind is Kind.ALLGATHER:
        return tuple(
            tuple(request.shapes[i][0] for request in requests) for i in range(len(first.shapes))
        )
    if first.kind is Kind.ALLTOALL:
        return tuple(request.splits for request in requests)
    return ()


class News(NamedTuple):
    """What a rank sends to the coordinator: requests that no cache knows, and why it leaves."""

    requests: tuple[tuple[Key, Request], ...]
    leaving: str | None = None


class Reply(NamedTuple):
    """What the coordinator answers every rank."""

    responses: tuple[Response, ...]
    joined: tuple[int, ...] = ()
    """Ranks of the set that have joined, in the order in which they did."""
    left: tuple[tuple[int, str], ...] = ()
    """Ranks that leave, with their reasons: the set is closed."""


def display(key: Key, kind: Kind) -> str:
    """Return the name under which messages show a request."""
    return key if isinstance(key, str) else f"{kind}.noname.{key}"


def encode(message: News | Reply) -> Array:
    """Return the wire form of a message, as bytes in an array."""
    # Plain nested tuples of plain values: half the bytes of pickled classes and no imports
    # at the receiver.
    return np.frombuffer(pickle.dumps(_plain(message), protocol=4), dtype=np.uint8)


def decode(kind: type[News] | type[Reply], data: Array) -> Any:
    """Return the message whose wire form is `data`."""
    fields = pickle.loads(data.tobytes())
    if kind is News:
        requests, leaving = fields
        return News(tuple((key, _request(r)) for key, r in requests), leaving)
    responses, joined, left = fields
    return Reply(
        tuple(Response(key, _request(r), rows, error) for key, r, rows, error in responses),
        joined,
        left,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, enum.IntEnum):
        return int(value)
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value


def _request(fields: tuple[Any, ...]) -> Request:
    kind, dtypes, shapes, op, *rest = fields
    return Request(Kind(kind), tuple(map(DType, dtypes)), shapes, ReduceOp(op), *rest)
