"""The communicator over mpi4py. Imported only where an MPI library has been found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from .base import Pending
from .types import Array, DType, ReduceOp

__all__ = ["MPICommunicator"]

_LARGEST = 2**31 - 1
"""What fits the int in which MPI counts elements."""

_CHUNK = 2**20

_MPI_TYPES: dict[DType, MPI.Datatype] = {
    DType.BOOL: MPI.C_BOOL,
    DType.UINT8: MPI.UINT8_T,
    DType.INT8: MPI.INT8_T,
    DType.UINT16: MPI.UINT16_T,
    DType.INT16: MPI.INT16_T,
    DType.UINT32: MPI.UINT32_T,
    DType.INT32: MPI.INT32_T,
    DType.UINT64: MPI.UINT64_T,
    DType.INT64: MPI.INT64_T,
    DType.FLOAT32: MPI.FLOAT,
    DType.FLOAT64: MPI.DOUBLE,
    DType.COMPLEX64: MPI.C_FLOAT_COMPLEX,
    DType.COMPLEX128: MPI.C_DOUBLE_COMPLEX,
}
_SUM_AND_PRODUCT = {ReduceOp.SUM: MPI.SUM, ReduceOp.PRODUCT: MPI.PROD}
_NUMERIC = {**_SUM_AND_PRODUCT, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX}
_LOGICAL = {
    ReduceOp.SUM: MPI.LOR,
    ReduceOp.MAX: MPI.LOR,
    ReduceOp.PRODUCT: MPI.LAND,
    ReduceOp.MIN: MPI.LAND,
}


def _operation(dtype: DType, op: ReduceOp) -> MPI.Op | None:
    """Return MPI's counterpart of a reduction that means the same thing, None without one."""
    if dtype is DType.BOOL:
        return _LOGICAL.get(op)
    if dtype.is_integer:
        return _NUMERIC.get(op)
    if dtype in _MPI_TYPES:
        # MPI's MIN and MAX lose a NaN when it stands on the wrong side of the comparison.
        return _SUM_AND_PRODUCT.get(op)
    return None


def _message(data: Array) -> tuple[Array, int, MPI.Datatype]:
    """Describe an array as plain bytes, whatever its size."""
    nbytes = data.nbytes
    if nbytes <= _LARGEST:
        return data, nbytes, MPI.BYTE
    chunks, rest = divmod(nbytes, _CHUNK)
    chunk = MPI.BYTE.Create_contiguous(_CHUNK)
    whole = MPI.Datatype.Create_struct([chunks, rest], [0, chunks * _CHUNK], [chunk, MPI.BYTE])
    chunk.Free()
    return data, 1, whole.Commit()


def _release(message: tuple[Array, int, MPI.Datatype]) -> None:
    """Free a datatype made for one message; MPI keeps it alive until that has completed."""
    if message[2] is not MPI.BYTE:
        message[2].Free()


class _Together:
    """Several requests that are waited for as one."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    def Test(self) -> bool:
        while self._requests:
            if not self._requests[-1].Test():
                return False
            self._requests.pop()
        return True


class MPICommunicator:
    """A private group of ranks that talk through an MPI library.

    Args:
        comm: the communicator to use. Nobody else may communicate on it; `free` frees it
            if it was made by `duplicate` or `subset`, and leaves it alone otherwise.
    """

    def __init__(self, comm: MPI.Intracomm, *, owned: bool = False) -> None:
        self.comm = comm
        self._owned = owned
        self._rank = comm.Get_rank()
        self._size = comm.Get_size()
        self._status = MPI.Status()

    def __repr__(self) -> str:
        return f"MPICommunicator(rank={self._rank}, size={self._size})"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    # -- point to point -----------------------------------------------------------------

    def isend(self, data: Array, dest: int, tag: int) -> Pending:
        message = _message(data)
        request = self.comm.Isend(message, dest, tag)
        _release(message)
        return request

    def irecv(self, data: Array, source: int, tag: int) -> Pending:
        message = _message(data)
        request = self.comm.Irecv(message, source, tag)
        _release(message)
        return request

    def probe(self, source: int, tag: int) -> int | None:
        """Return the bytes of the next message from `source` with `tag`, None without one."""
        if self.comm.Iprobe(source, tag, self._status):
            return self._status.Get_count(MPI.BYTE)
        return None

    # -- collectives --------------------------------------------------------------------

    def iband(self, words: Array) -> Pending:
        """Combine uint64 words of all ranks by bitwise AND, in place."""
        return self.comm.Iallreduce(MPI.IN_PLACE, (words, words.size, MPI.UINT64_T), op=MPI.BAND)

    def iallreduce(self, data: Array, dtype: DType, op: ReduceOp) -> Pending:
        """Reduce in place with the library's own collective; only where `reduces` says so.

        Raises:
            TypeError: MPI has no reduction with this meaning.
        """
        operation = _operation(dtype, op)
        if operation is None:
            raise TypeError(f"MPI cannot reduce {dtype} by {op}")
        flat = data.reshape(-1)
        datatype = _MPI_TYPES[dtype]
        requests = [
            self.comm.Iallreduce(MPI.IN_PLACE, (part, part.size, datatype), op=operation)
            for part in (
                flat[start : start + _LARGEST] for start in range(0, max(1, flat.size), _LARGEST)
            )
        ]
        return requests[0] if len(requests) == 1 else _Together(requests)

    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        """Whether `iallreduce` can reduce these elements."""
        return _operation(dtype, op) is not None

    def iallgather(self, send: Array, recv: Array) -> Pending:
        """Gather equally many bytes from every rank: recv holds size x send.

        Raises:
            ValueError: `recv` has another size.
        """
        if recv.nbytes != send.nbytes * self._size:
            raise ValueError(
                f"gathering {send.nbytes} bytes from each of {self._size} ranks "
                f"does not fill {recv.nbytes} bytes"
            )
        _, count, datatype = message = _message(send)
        # mpi4py takes a given count for that of each rank.
        request = self.comm.Iallgather(message, (recv, count, datatype))
        _release(message)
        return request

    def ibcast(self, data: Array, root: int) -> Pending:
        message = _message(data)
        request = self.comm.Ibcast(message, root)
        _release(message)
        return request

    def ibarrier(self) -> Pending:
        return self.comm.Ibarrier()

    # -- groups -------------------------------------------------------------------------

    def duplicate(self) -> MPICommunicator:
        """Return a communicator of the same ranks with traffic of its own.

        Collective and blocking: every rank calls it, in the same order as other collectives.
        """
        return MPICommunicator(self.comm.Dup(), owned=True)

    def subset(self, ranks: Sequence[int]) -> MPICommunicator | None:
        """Return a communicator of these ranks in this order, None on the others.

        Every rank of this communicator calls it, with the same ranks and in the same order
        as other collectives. Only the members wait for each other.

        Raises:
            ValueError: a rank is given twice or does not exist.
        """
        members = list(ranks)
        if len(set(members)) != len(members) or not all(0 <= r < self._size for r in members):
            raise ValueError(f"ranks {members} are not distinct ranks below {self._size}")
        if self._rank not in members:
            return None
        everybody = self.comm.Get_group()
        group = everybody.Incl(members)
        try:
            return MPICommunicator(self.comm.Create_group(group), owned=True)
        finally:
            group.Free()
            everybody.Free()

    def free(self) -> None:
        """Free the communicator if it was made here (collective). Idempotent."""
        if self._owned:
            self._owned = False
            self.comm.Free()


def _check_layout() -> None:
    # MPI's bool is the C compiler's; NumPy's is one byte.
    if MPI.C_BOOL.Get_size() != np.dtype(np.bool_).itemsize:
        del _MPI_TYPES[DType.BOOL]
        _LOGICAL.clear()


_check_layout()
