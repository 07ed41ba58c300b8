"""Train a small convolutional network with Keras's `fit`, on one or many ranks.

    python examples/keras_digits.py
    mpirun -np 2 python examples/keras_digits.py

The data are the 1,797 scans of 8 x 8 pixels that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdlite_tf.keras as hvd


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits with hvdlite and Keras")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_data() -> list[np.ndarray]:
    """Return images and labels to train and to test with, split alike on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype("float32").reshape(-1, 8, 8, 1)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    return [train_x, train_y, test_x, test_y]


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(64, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.25),
            layers.Dense(10),
        ]
    )


def main() -> None:
    args = parse_args()
    hvd.init()
    # One rank per core: TensorFlow's own threads would only get in each other's way.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    keras.utils.set_random_seed(args.seed + hvd.rank())

    train_x, train_y, test_x, test_y = load_data()
    # Every rank trains on its part of the images. All parts have as many batches.
    per_rank = len(train_x) // hvd.size()
    mine = slice(hvd.rank() * per_rank, (hvd.rank() + 1) * per_rank)

    model = make_model()
    # Together the ranks take batches that are hvd.size() times as large, and longer steps.
    lr = args.lr * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(lr, momentum=0.9, weight_decay=1e-4))
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    warm_up = min(3, args.epochs)
    callbacks = [
        # All ranks begin with the state of the first one.
        hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(lr, warmup_epochs=warm_up),
        hvd.callbacks.LearningRateScheduleCallback(
            lr,
            lambda epoch: 0.02 + 0.98 * (args.epochs - epoch) / max(args.epochs - warm_up, 1),
            start_epoch=warm_up,
            staircase=False,
        ),
    ]
    start = time.perf_counter()
    model.fit(
        train_x[mine],
        train_y[mine],
        batch_size=args.batch_size,
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    seconds = time.perf_counter() - start

    # Every rank looks at its part of the test images.
    part = slice(hvd.rank(), None, hvd.size())
    correct = (model.predict(test_x[part], verbose=0).argmax(axis=1) == test_y[part]).sum()
    total = hvd.allreduce(float(correct), name="correct", op=hvd.Sum)
    if hvd.rank() == 0:
        images_seen = args.epochs * per_rank * hvd.size()
        print(f"{images_seen / seconds:.0f} images per second on {hvd.size()} rank(s)")
        print(f"accuracy: {100 * float(total) / len(test_y):.1f} %")


if __name__ == "__main__":
    main()
