"""Small Keras models, data of all ranks, and what one process makes of both."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)

ROWS = 8
"""Per rank."""


def data(size: int, batches: int = 1, seed: int = 0) -> tuple[Any, Any]:
    """Return inputs and targets of all ranks: (rank, batch, row, feature)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, batches, ROWS, 5)).astype("float32")
    y = rng.normal(size=(size, batches, ROWS, 3)).astype("float32")
    return x, y


def flat(array: Any) -> Any:
    """Return one rank's batches, one after the other."""
    return array.reshape(-1, array.shape[-1])


def whole(array: Any) -> Any:
    """Return what one process gets: each of its batches is that of all ranks together."""
    return flat(np.swapaxes(array, 0, 1))


def make_model(policy: Any = None, seed: int = 7) -> Any:
    """Return a model with the same weights wherever it is made."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, activation="tanh", dtype=policy),
            keras.layers.Dense(3, dtype=policy),
        ]
    )


def compiled(optimizer: Any, model: Any = None, **options: Any) -> Any:
    """Return a model that is ready for `fit`."""
    model = make_model() if model is None else model
    model.compile(optimizer, loss="mse", **options)
    return model


def fit(model: Any, x: Any, y: Any, rows: int = ROWS, **options: Any) -> Any:
    """Train one epoch in order."""
    options = {"batch_size": rows, "epochs": 1, "verbose": 0, "shuffle": False} | options
    return model.fit(x, y, **options)


def alone(optimizer: Any, x: Any, y: Any, model: Any = None, rows: int | None = None) -> Any:
    """Return a model that one process has trained on the batches of all ranks."""
    model = compiled(optimizer, model, run_eagerly=True)  # tracing takes longer than few steps
    fit(model, whole(x), whole(y), len(x) * ROWS if rows is None else rows)
    return model


def assert_same_weights(model: Any, other: Any, tolerance: float = 1e-6) -> None:
    """Compare two models' weights."""
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


def assert_same_on_all_ranks(comm: Any, model: Any) -> None:
    """Compare a model's weights over the ranks, bit for bit."""
    everyone = comm.allgather([weight.tobytes() for weight in model.get_weights()])
    assert all(theirs == everyone[0] for theirs in everyone)
