"""PyTorch tensors as the NumPy views that the engine works on, and back, without copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from hvdlite.transport.types import Array, DType

from .arguments import whereabouts

__all__ = [
    "Target",
    "array_of",
    "check_tensor",
    "check_tensors",
    "dtype_of",
    "dtype_of_type",
    "is_dense",
    "is_lendable",
    "lend",
    "shares_memory",
    "source_of",
    "tensor_of",
]

_DTYPES: dict[torch.dtype, DType] = {
    torch.bool: DType.BOOL,
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.complex64: DType.COMPLEX64,
    torch.complex128: DType.COMPLEX128,
}
for _name in ("uint16", "uint32", "uint64"):  # since PyTorch 2.3
    if hasattr(torch, _name):
        _DTYPES[getattr(torch, _name)] = DType[_name.upper()]


def check_tensor(value: Any, operation: str, argument: str = "tensor") -> torch.Tensor:
    """Return `value` if it is a tensor that can be communicated.

    Raises:
        TypeError: it is not a tensor, is sparse, or has elements that don't travel.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{operation}: argument '{argument}' must be a torch.Tensor, "
            f"not {type(value).__name__} ({whereabouts()})."
        )
    if value.layout is not torch.strided:
        hint = "; use sparse_allreduce_async" if "allreduce" in operation else ""
        raise TypeError(
            f"{operation}: argument '{argument}' has the layout {value.layout} and not "
            f"torch.strided ({whereabouts()}); densify it with to_dense() first{hint}."
        )
    if value.dtype not in _DTYPES:
        raise TypeError(
            f"{operation}: argument '{argument}' has elements of type {value.dtype}, which "
            f"cannot be communicated ({whereabouts()})."
        )
    return value


def check_tensors(values: Any, operation: str) -> list[torch.Tensor]:
    """Return a sequence of tensors as a list, each checked like `check_tensor` does.

    Raises:
        TypeError: it is no sequence of tensors that can be communicated.
    """
    if isinstance(values, torch.Tensor) or not hasattr(values, "__iter__"):
        raise TypeError(
            f"{operation}: argument 'tensors' must be a sequence of tensors, "
            f"not {type(values).__name__} ({whereabouts()})."
        )
    return [check_tensor(value, operation, f"tensors[{i}]") for i, value in enumerate(values)]


def dtype_of(tensor: torch.Tensor) -> DType:
    """Return the element type of a tensor that `check_tensor` has passed."""
    return _DTYPES[tensor.dtype]


def dtype_of_type(dtype: torch.dtype) -> DType:
    """Return torch's element type as the engine knows it."""
    return _DTYPES[dtype]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory; never False for one where they do."""
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
    return False


def array_of(tensor: torch.Tensor) -> Array:
    """Return a view of the memory of a strided tensor in host memory (bfloat16 as uint16)."""
    plain = tensor.detach()
    if plain.dtype is torch.bfloat16:
        return plain.view(torch.int16).numpy().view(np.uint16)
    array: Array = plain.numpy()
    return array


def is_lendable(gradient: torch.Tensor, like: torch.Tensor) -> bool:
    """Return whether a gradient's own memory may be overwritten, and is laid out like another.

    Args:
        gradient: a strided tensor in host memory, which is the gradient of a parameter.
        like: a dense one of the same shape.
    """
    storage = gradient.untyped_storage()
    return (
        _uses is not None
        and gradient.stride() == like.stride()
        and not gradient.requires_grad
        and not gradient.is_complex()  # which may be conjugate
        and not gradient.is_neg()
        and gradient.numel() > 0
        # One tensor may be the gradient of two parameters, or two be views of one memory. One use
        # is the parameter's, or the tensor's, and the other one is Python's.
        and _uses_of(gradient) == _uses(storage._cdata) == 2
        # Memory that is not torch's own, but NumPy's, say: its owner may count on what is there.
        and storage.resizable()
    )


def shares_memory(gradient: torch.Tensor) -> bool:
    """Return whether other tensors use the memory of a strided gradient, as far as torch tells."""
    # One use is the gradient's, and the other one is Python's.
    return _uses is not None and _uses(gradient.untyped_storage()._cdata) > 2


_uses_of: Any = getattr(torch.Tensor, "_use_count", lambda tensor: 0)


_uses: Any = getattr(torch._C, "_storage_Use_Count", None)


class _Memory:
    """Makes NumPy see a tensor's memory, and keeps it."""

    def __init__(self, tensor: torch.Tensor, typestr: str) -> None:
        # Not the tensor, which `tensor.data = ...` can give another memory.
        self.storage = tensor.untyped_storage()
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel(),),
            "typestr": typestr,
            "version": 3,
        }


def lend(gradient: torch.Tensor) -> Array:
    """Return the memory of a dense gradient as one flat array, in the order of its addresses.

    From then on the memory belongs to that array, and the tensor refers to it: whoever resizes
    the tensor gets an error, and whoever moves it, as `share_memory_()` does, leaves the memory
    where others may still write to it.
    """
    memory: Array = np.asarray(_Memory(gradient, dtype_of(gradient).storage.str))
    flat = tensor_of(memory, gradient.dtype)
    gradient.data = flat.as_strided(gradient.shape, gradient.stride())
    return memory


def tensor_of(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that shares the memory of an array made for elements of `dtype`."""
    if not array.flags.writeable:
        array = array.copy()
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def source_of(tensor: torch.Tensor) -> Array:
    """Return the tensor's own memory to read from, or a copy where that is not plain numbers."""
    return array_of(_plain(tensor))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # The conjugate and negative bits say that the memory holds other numbers than the tensor.
    return tensor.detach().resolve_conj().resolve_neg().cpu()


@dataclass(slots=True)
class Target:
    """Where the engine puts a result: a tensor's memory, or a stand-in to be copied to it."""

    tensor: torch.Tensor
    array: Array
    stage: torch.Tensor | None = None

    @classmethod
    def fresh(cls, like: torch.Tensor) -> Target:
        """Return a new tensor of the same shape, type, device and (where dense) strides."""
        result = torch.empty_like(like, requires_grad=False).detach()
        if result.is_conj() or result.is_neg():
            result = result.clone()
        return cls._on(result)

    @classmethod
    def in_place(cls, tensor: torch.Tensor, operation: str) -> Target:
        """Return the tensor itself as the target; the stand-in holds its values.

        Raises:
            ValueError: several of the tensor's elements share memory.
        """
        shared = any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
        if shared and tensor.numel():  # what is empty may have any strides
            raise ValueError(
                f"{operation}: cannot work in place on an expanded tensor, several elements of "
                f"which share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}; "
                f"{whereabouts()}); clone() it first."
            )
        return cls._on(tensor)

    @classmethod
    def _on(cls, tensor: torch.Tensor) -> Target:
        direct = tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())
        if direct and not _may_overlap(tensor):
            return cls(tensor, array_of(tensor))
        stage = _plain(tensor).clone(memory_format=torch.contiguous_format)
        return cls(tensor, array_of(stage), stage)

    def finish(self) -> torch.Tensor:
        """Return the tensor, with the result in it."""
        if self.stage is not None:
            with torch.no_grad():
                self.tensor.copy_(self.stage)
        else:
            # Autograd does not see writes through NumPy; it has to refuse a backward pass
            # through values that are gone.
            increment_version(self.tensor)
        return self.tensor
