"""A loop with a tape as people write it for Horovod and TensorFlow 2."""

import argparse
import os

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--no-cuda", action="store_true")
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
gpus = [] if args.no_cuda else tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
tf.keras.utils.set_random_seed(42 + hvd.rank())

dataset = (
    tf.data.Dataset.from_tensor_slices(stripes(1024, 1))
    .shard(hvd.size(), hvd.rank())
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
loss_function = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.005 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss_function(labels, probs)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


for batch, (images, labels) in enumerate(dataset.take(args.steps)):
    loss_value = training_step(images, labels, batch == 0)
    if batch % 20 == 0 and hvd.local_rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")

test_images, test_labels = stripes(256, 2)
right = tf.reduce_mean(tf.cast(tf.argmax(model(test_images), 1) == test_labels, tf.float32))
right = hvd.allreduce(right, name="accuracy", op=hvd.Average)
weights = hvd.allgather_object([v.numpy().tobytes() for v in model.trainable_variables])
if hvd.rank() == 0:
    print(f"accuracy {100 * float(right):.1f} % on {hvd.size()} rank(s)")
    print(f"same weights: {all(w == weights[0] for w in weights)}")
    print("saved", os.path.basename(checkpoint.save(os.path.join("checkpoints", "model"))))
