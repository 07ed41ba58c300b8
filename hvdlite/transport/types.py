"""Element types and reduce operations: the vocabulary shared by every layer."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "DType", "ReduceOp"]

Array = npt.NDArray[np.generic]
"""Any NumPy array; bfloat16 data travels as its uint16 bit pattern, tagged by `DType`."""


class ReduceOp(enum.IntEnum):
    """How the contributions of the ranks are combined."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    # Enum's own is in Python, and these are in the keys of every tensor.
    __hash__ = int.__hash__

    def __str__(self) -> str:
        return self.name.capitalize()


class DType(enum.IntEnum):
    """Element type of a tensor on the wire, independent of the framework it came from."""

    BOOL = 0
    UINT8 = 1
    INT8 = 2
    UINT16 = 3
    INT16 = 4
    UINT32 = 5
    INT32 = 6
    UINT64 = 7
    INT64 = 8
    FLOAT16 = 9
    BFLOAT16 = 10
    FLOAT32 = 11
    FLOAT64 = 12
    COMPLEX64 = 13
    COMPLEX128 = 14

    __hash__ = int.__hash__

    def __str__(self) -> str:
        return self.name.lower()

    @property
    def storage(self) -> np.dtype[np.generic]:
        """NumPy dtype of the buffers that hold such elements (uint16 for bfloat16)."""
        return _STORAGE[self]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _STORAGE[self].itemsize

    @property
    def is_floating(self) -> bool:
        """Whether the elements are real floating-point numbers."""
        return DType.FLOAT16 <= self <= DType.FLOAT64

    @property
    def is_complex(self) -> bool:
        """Whether the elements are complex numbers."""
        return self >= DType.COMPLEX64

    @property
    def is_integer(self) -> bool:
        """Whether the elements are integers (bool is not)."""
        return DType.UINT8 <= self <= DType.INT64

    @classmethod
    def of(cls, array: Array) -> DType:
        """Return the element type of a NumPy array.

        Raises:
            TypeError: the array's dtype has no counterpart here (object, strings, dates,
                structured or byte-swapped types, long double).
        """
        found = BY_NUMPY.get(array.dtype)
        if found is None:
            if array.dtype.name == "bfloat16":  # ml_dtypes; TensorFlow's NumPy bfloat16
                return cls.BFLOAT16
            raise TypeError(
                f"hvdlite cannot communicate elements of type {array.dtype!r}; "
                f"supported are {', '.join(str(member) for member in cls)}"
            )
        return found


_STORAGE: dict[DType, np.dtype[np.generic]] = {
    member: np.dtype("uint16" if member.name == "BFLOAT16" else member.name.lower())
    for member in DType
}
BY_NUMPY: dict[np.dtype[np.generic], DType] = {
    storage: member for member, storage in _STORAGE.items() if member is not DType.BFLOAT16
}
"""The element types that NumPy has, too."""
