"""TensorFlow for the ranks alone, and what collectives must make of known tensors.

Importing TensorFlow takes seconds, which the side outside MPI can do without.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from . import expected
from .conftest import INNER

__all__ = ["DTYPES", "assert_close", "assert_same_on_all_ranks", "tensor", "tf", "wanted"]

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow", allow_module_level=True)

tf: Any = None
if INNER:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    import tensorflow as tf  # type: ignore[no-redef]

    tf.config.threading.set_intra_op_parallelism_threads(1)
    # The worst case: an op that blocks keeps all others from running.
    tf.config.threading.set_inter_op_parallelism_threads(1)

DTYPES = expected.DTYPES
_TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "complex64": 1e-6}


def tensor(rank: int, shape: Any, dtype: str = "float32", seed: int = 0) -> Any:
    """Return one rank's input: small integers, which all types hold exactly."""
    return tf.constant(expected.known(rank, shape, expected.dtype_of(dtype), seed))


def wanted(inputs: Sequence[Any], op: str) -> Any:
    """Return the reduction of all ranks' inputs as an array."""
    return expected.reduced([np.asarray(item) for item in inputs], op)


def assert_close(result: Any, wanted: Any, what: str = "", tolerance: float | None = None) -> None:
    """Check type, shape and values: exact for integers, to rounding for the rest."""
    assert tf.is_tensor(result), f"{what}: {type(result)}"
    wanted = np.asarray(wanted)
    assert result.dtype.name == wanted.dtype.name, f"{what}: {result.dtype}, {wanted.dtype}"
    assert tuple(result.shape) == wanted.shape, f"{what}: {result.shape}, {wanted.shape}"
    if wanted.dtype.kind in "biu":
        np.testing.assert_array_equal(result.numpy(), wanted, err_msg=what)
        return
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    if tolerance is None:
        tolerance = _TOLERANCE.get(wanted.dtype.name, 1e-13)
    np.testing.assert_allclose(
        result.numpy().astype(wide),
        wanted.astype(wide),
        rtol=tolerance,
        atol=tolerance,
        err_msg=what,
    )


def assert_same_on_all_ranks(comm: Any, tensors: Iterable[Any]) -> None:
    """Check that all ranks hold the same bits."""
    summary = hashlib.sha256()
    for item in tensors:
        array = np.asarray(item)
        summary.update(f"{array.dtype}{array.shape}".encode())
        summary.update(array.tobytes())
    digests = comm.allgather(summary.hexdigest())
    assert len(set(digests)) == 1, f"the ranks differ: {digests}"
