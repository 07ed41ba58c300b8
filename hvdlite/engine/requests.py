"""What ranks tell each other about collectives: requests, responses and their wire form."""

from __future__ import annotations

import enum
import hashlib
import math
import pickle
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..transport.types import Array, DType, ReduceOp

__all__ = [
    "Announcement",
    "Key",
    "Kind",
    "News",
    "Piece",
    "Reply",
    "Request",
    "Response",
    "decode",
    "display",
    "encode",
    "wire_dtype",
]


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

    __hash__ = int.__hash__

    def __str__(self) -> str:
        return self.name.lower()


Key: TypeAlias = "str | int"
"""Identifies a request across ranks: its name, or its position among the unnamed ones."""


class _RequestFields(NamedTuple):
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
    """Whether the tensors share a batch with no others: they lie in memory that the transport has
    allocated, or are many that are reduced where they are."""


class Request(_RequestFields):
    """One rank's wish, for one tensor or for a group that is reduced as a whole.

    A named tuple, because equality, hashing and pickling of these are on the path of every
    tensor of every step and are done in C for tuples. What follows from a request is worked
    out once and kept with it.
    """

    @cached_property
    def digest(self) -> int:
        """64 bits that differ between ranks if, for all practical purposes, requests do."""
        # Not pickle: its bytes tell equal objects from identical ones.
        raw = repr(_plain(self)).encode()
        return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensors, where no rows of other ranks are needed to know them."""
        return tuple(Piece(self, index) for index in range(len(self.dtypes)))


class Piece:
    """One tensor of an agreed response, as every rank knows it."""

    __slots__ = (
        "alone",
        "dtype",
        "elements",
        "index",
        "kin",
        "nbytes",
        "request",
        "row_bytes",
        "rows",
        "shape",
        "splits",
        "wire",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        rows: tuple[int, ...] = (),
        splits: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        kind = request.kind
        self.request = request
        self.index = index
        self.rows = rows
        """allgather: of each rank."""
        self.splits = splits
        """alltoall: for each rank, the rows that it sends to each."""
        self.dtype = request.dtypes[index]
        self.shape = request.shapes[index]
        """Shape on the lowest rank; for allgather only the trailing dimensions are common."""
        self.elements = math.prod(self.shape)
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        """Bytes of everything under one index of the first dimension."""
        self.wire = wire_dtype(kind, self.dtype, request.op)
        self.nbytes = 0
        """Bytes on the wire."""
        if kind is Kind.ALLGATHER:
            self.nbytes = sum(rows) * self.row_bytes
        elif kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            self.nbytes = self.elements * self.wire.itemsize
        elif kind is Kind.BROADCAST:
            self.nbytes = self.elements * self.dtype.itemsize
        self.alone = kind is Kind.ALLTOALL
        """Whether nothing else may travel in its batch."""
        key = kind, self.wire, request.op, request.prescale, request.postscale, request.root
        self.kin = _kin.setdefault(key, len(_kin))
        """The same number for all tensors that may share a batch."""


_kin: dict[tuple[object, ...], int] = {}


def wire_dtype(kind: Kind, dtype: DType, op: ReduceOp) -> DType:
    """Return the element type in which a tensor travels.

    The average of integers is taken of their sum in 64 bits, since their own type may not hold
    it. That of 64-bit integers wraps around like any of their sums.
    """
    if kind in (Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL):
        return DType.UINT8
    if op is ReduceOp.AVERAGE and dtype.is_integer:
        return DType.UINT64 if dtype is DType.UINT64 else DType.INT64
    return dtype


class _ResponseFields(NamedTuple):
    key: Key
    request: Request
    rows: tuple[tuple[int, ...], ...] = ()
    """allgather: for each tensor, the rows of each rank; alltoall: for each rank, its splits."""
    error: str | None = None


class Response(_ResponseFields):
    """What all ranks agreed to do under one key; the same on every rank."""

    @classmethod
    def of_equal_requests(cls, key: Key, request: Request, size: int) -> Response:
        """Return the response to a request that is the same on all `size` ranks."""
        if request.kind in _ROWS_MATTER:
            return cls(key, request, gathered_rows([request] * size))
        return cls(key, request)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensors."""
        request = self.request
        if request.kind is Kind.ALLGATHER:
            return tuple(Piece(request, index, rows) for index, rows in enumerate(self.rows))
        if request.kind is Kind.ALLTOALL:
            return (Piece(request, 0, splits=self.rows),)
        return request.pieces


_ROWS_MATTER = (Kind.ALLGATHER, Kind.ALLTOALL)


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


Announcement: TypeAlias = "tuple[str | int | float | bool, ...]"
"""What one rank wants all ranks to do from one and the same round on."""


class News(NamedTuple):
    """What a rank sends to the coordinator: requests that no cache knows, and why it leaves."""

    requests: tuple[tuple[Key, Request], ...]
    leaving: str | None = None
    announcements: tuple[Announcement, ...] = ()


class Reply(NamedTuple):
    """What the coordinator answers every rank."""

    responses: tuple[Response, ...]
    joined: tuple[int, ...] = ()
    """Ranks of the set that have joined, in the order in which they did."""
    left: tuple[tuple[int, str], ...] = ()
    """Ranks that leave, with their reasons: the set is closed."""
    announcements: tuple[Announcement, ...] = ()
    """Of all ranks, in their order."""


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
        requests, leaving, announcements = fields
        return News(tuple((key, _request(r)) for key, r in requests), leaving, announcements)
    responses, joined, left, announcements = fields
    return Reply(
        tuple(Response(key, _request(r), rows, error) for key, r, rows, error in responses),
        joined,
        left,
        announcements,
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
