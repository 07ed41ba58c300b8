"""Train a small convolutional network on handwritten digits, in a loop of one's own.

    python examples/tf_digits.py
    mpirun -np 2 python examples/tf_digits.py

The data are the 1,797 scans of 8 x 8 pixels that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import hvdlite_tf as hvd


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits with hvdlite and TensorFlow")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the training and the test set, split in the same way on every rank."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = split
    return (train_x, train_y), (test_x, test_y)


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Conv2D(64, 3, padding="same"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10),
        ]
    )


def batches(images: np.ndarray, labels: np.ndarray, batch_size: int, seed: int) -> tf.data.Dataset:
    """Return this rank's batches of one epoch; together the ranks see every image once."""
    order = np.random.default_rng(seed).permutation(len(images))
    # Every rank takes equally many steps.
    order = order[: len(order) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
    return tf.data.Dataset.from_tensor_slices((images[order], labels[order])).batch(
        batch_size, drop_remainder=True
    )


def accuracy(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of test images that are recognised; every rank looks at its part."""
    mine = slice(hvd.rank(), None, hvd.size())
    found = tf.argmax(model(images[mine], training=False), axis=1)
    correct = tf.reduce_sum(tf.cast(found == labels[mine], tf.float32))
    return float(hvd.allreduce(correct, name="correct", op=hvd.Sum)) / len(images)


def main() -> None:
    args = parse_args()
    hvd.init()
    # One core for each rank: more threads would only be in each other's way.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(args.seed + hvd.rank())

    (train_x, train_y), (test_x, test_y) = load_data()
    steps = len(train_x) // hvd.size() // args.batch_size
    model = make_model()
    # Together the ranks take batches that are hvd.size() times as large, and longer steps.
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, args.epochs * steps, warmup_target=args.lr * hvd.size(), warmup_steps=2 * steps
    )
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
    optimizer.build(model.trainable_variables)
    compute_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    # All ranks begin with the state of the first one.
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = compute_loss(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    start = time.perf_counter()
    with tqdm(
        total=args.epochs * steps, unit="step", mininterval=0.5, disable=hvd.rank() != 0
    ) as bar:
        for epoch in range(args.epochs):
            for images, labels in batches(train_x, train_y, args.batch_size, args.seed + epoch):
                loss = train_step(images, labels)
                bar.update()
            bar.set_postfix(epoch=epoch + 1, loss=f"{float(loss):.3f}")
    seconds = time.perf_counter() - start

    # Batch normalization's moving averages are of each rank's own batches.
    hvd.broadcast_variables(model.non_trainable_variables, root_rank=0)
    result = accuracy(model, test_x, test_y)
    if hvd.rank() == 0:
        images_seen = args.epochs * steps * args.batch_size * hvd.size()
        print(f"{images_seen / seconds:.0f} images per second on {hvd.size()} rank(s)")
        print(f"accuracy: {100 * result:.1f} %")


if __name__ == "__main__":
    main()
