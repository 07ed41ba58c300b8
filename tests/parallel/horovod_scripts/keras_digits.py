"""Keras's `fit` as people write it for Horovod, of which they import one or the other module."""

import argparse
import os

import horovod.keras
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from horovod.keras.callbacks import MetricAverageCallback

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()


def stripes(n, seed):
    """Images of 8 x 8 whose class is where the bright rows or columns are."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=n)
    images = 0.3 * rng.standard_normal((n, 8, 8, 1))
    for image, label in zip(images, labels, strict=True):
        if label < 5:
            image[label : label + 2] += 1
        else:
            image[:, label - 5 : label - 3] += 1
    return images.astype("float32"), labels.astype("int64")


hvd.init()
tf.keras.utils.set_random_seed(42 + hvd.rank())
dataset = (
    tf.data.Dataset.from_tensor_slices(stripes(1024, 1))
    .repeat()
    .shuffle(512)
    .batch(args.batch_size)
)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
        tf.keras.layers.MaxPooling2D(2),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
scaled_lr = 0.005 * hvd.size()
opt = horovod.keras.DistributedOptimizer(
    tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(loss="sparse_categorical_crossentropy", optimizer=opt, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=scaled_lr, warmup_epochs=2, verbose=1, steps_per_epoch=64 // hvd.size()
    ),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))

history = model.fit(
    dataset,
    steps_per_epoch=64 // hvd.size(),
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
)
score = model.evaluate(*stripes(256, 2), verbose=0)
right = hvd.allreduce(score[1], name="accuracy")
losses = hvd.allgather(np.array([history.history["loss"][-1]]))
loaded = None
if hvd.rank() == 0:
    loaded = type(hvd.load_model(f"checkpoint-{args.epochs}.keras").optimizer).__name__
if hvd.rank() == 0:
    print(f"accuracy {100 * float(right):.1f} % on {hvd.size()} rank(s)")
    print(f"same losses: {bool((losses == losses[0]).all())}")
    print("saved", sorted(f for f in os.listdir() if f.startswith("checkpoint-")), loaded)
