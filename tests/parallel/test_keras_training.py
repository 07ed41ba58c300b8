"""Keras trains on N ranks as one process does on all their data (B38, B41)."""

from __future__ import annotations

import importlib.util
import math
import os

import numpy as np
import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None or importlib.util.find_spec("keras") is None,
        reason="needs TensorFlow and Keras",
    ),
    pytest.mark.np(1, 2, 4),
    pytest.mark.limit(120),
]


@pytest.fixture
def hk(hvd):
    from . import keras_helpers  # noqa: F401  # sets TensorFlow up before anything else does

    return pytest.importorskip("hvdlite_tf.keras")


@pytest.mark.parametrize(
    "how",
    "fit executions eagerly train_on_batch custom_step tape apply jit".split(),
)
def test_a_step_is_that_of_one_process_on_all_data(hk, world, comm, how):
    from . import keras_helpers as h

    batches = 8 if how == "executions" else 1
    x, y = h.data(world.size, batches)
    mine_x, mine_y = h.flat(x[world.rank]), h.flat(y[world.rank])
    model = None
    if how == "custom_step":

        class Custom(h.keras.Model):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def call(self, x):
                return self.inner(x)

            def train_step(self, data):
                x, y = data
                with h.tf.GradientTape() as tape:
                    loss = self.compute_loss(y=y, y_pred=self(x, training=True))
                grads = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
                return {"loss": loss}

        model = Custom(h.make_model())
    options = {
        "executions": {"steps_per_execution": 4},
        "eagerly": {"run_eagerly": True},
        "jit": {"jit_compile": True},
    }
    optimizer = hk.DistributedOptimizer(h.keras.optimizers.SGD(0.1))
    model = h.compiled(optimizer, model, **options.get(how, {}))
    if how == "train_on_batch":
        model.train_on_batch(mine_x, mine_y)
    elif how in ("tape", "apply"):
        loss_of = h.keras.losses.MeanSquaredError()

        def step():
            with h.tf.GradientTape() as tape:
                loss = loss_of(mine_y, model(mine_x))
            grads = tape.gradient(loss, model.trainable_variables)
            pairs = list(zip(grads, model.trainable_variables, strict=True))
            # Some of the variables at a time, in two calls, is fine too.
            for part in [pairs] if how == "tape" else [pairs[2:], pairs[:2]]:
                optimizer.apply_gradients(part)

        if how == "apply":
            optimizer.build(model.trainable_variables)
        step() if how == "apply" else h.tf.function(step)()
    elif how == "jit" and world.size > 1:
        before = model.get_weights()
        with pytest.raises(Exception, match="jit_compile=False"):
            h.fit(model, mine_x, mine_y)
        for weight, old in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(weight, old)
        callbacks = [hk.callbacks.BroadcastGlobalVariablesCallback(0)]
        model = h.compiled(optimizer, model, jit_compile=True)
        with pytest.warns(UserWarning, match="jit_compile=True is switched off"):
            h.fit(model, mine_x, mine_y, callbacks=callbacks)
    else:
        h.fit(model, mine_x, mine_y)
    one = h.alone(h.keras.optimizers.SGD(0.1), x, y)
    h.assert_same_weights(model, one)
    h.assert_same_on_all_ranks(comm, model)


def _make(h, what):
    o = h.keras.optimizers
    return {
        "adam": lambda: o.Adam(0.01),
        "adamw": lambda: o.AdamW(0.01, weight_decay=0.1),
        "rmsprop": lambda: o.RMSprop(0.01, momentum=0.5),
        "adagrad": lambda: o.Adagrad(0.05),
        "momentum": lambda: o.SGD(0.05, momentum=0.9, nesterov=True),
        "schedule": lambda: o.SGD(o.schedules.ExponentialDecay(0.1, 1, 0.5)),
        "callable": lambda: o.SGD(lambda: 0.1),
        # Norms of ranks' own gradients are larger than that of their average.
        "clipnorm": lambda: o.SGD(0.5, clipnorm=0.02),
        "global_clipnorm": lambda: o.SGD(0.5, global_clipnorm=0.05),
        "clipvalue": lambda: o.SGD(0.5, clipvalue=0.01),
        "decay": lambda: o.SGD(0.1, weight_decay=0.3),
        "ema": lambda: o.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        "factor": lambda: o.SGD(0.1, loss_scale_factor=64.0),
        "loss_scale": lambda: o.LossScaleOptimizer(o.SGD(0.1, clipnorm=0.02), initial_scale=64.0),
    }[what]()


@pytest.mark.np(2)
@pytest.mark.parametrize(
    "what",
    "adam adamw rmsprop adagrad momentum schedule callable clipnorm global_clipnorm clipvalue "
    "decay ema factor loss_scale".split(),
)
def test_optimizers(hk, world, comm, what):
    from . import keras_helpers as h

    x, y = h.data(world.size, 4)
    model = h.compiled(hk.DistributedOptimizer(_make(h, what)))
    h.fit(model, h.flat(x[world.rank]), h.flat(y[world.rank]))
    one = h.alone(_make(h, what), x, y)
    # Quotients like Adam's magnify the last digit of a small gradient.
    h.assert_same_weights(model, one, 1e-6 if what not in ("adam", "adamw", "rmsprop") else 1e-5)
    h.assert_same_on_all_ranks(comm, model)
    assert int(model.optimizer.iterations) == 4


@pytest.mark.np(2)
@pytest.mark.parametrize("by", ["keras", "passes", "summed", "scaled"])
def test_accumulation(hk, world, comm, by):
    from . import keras_helpers as h

    x, y = h.data(world.size, 4)
    o = h.keras.optimizers
    clip = {"global_clipnorm": 0.05}
    if by == "keras":
        optimizer = hk.DistributedOptimizer(o.SGD(0.5, gradient_accumulation_steps=2, **clip))
    elif by == "scaled":
        inner = o.SGD(0.5, gradient_accumulation_steps=2, **clip)
        optimizer = hk.DistributedOptimizer(o.LossScaleOptimizer(inner, initial_scale=8.0))
    else:
        optimizer = hk.DistributedOptimizer(
            o.SGD(0.5, **clip) if by == "passes" else o.SGD(0.05),
            backward_passes_per_step=2,
            average_aggregated_gradients=by == "passes",
        )
    model = h.compiled(optimizer)
    h.fit(model, h.flat(x[world.rank]), h.flat(y[world.rank]))
    # Two batches make one step: as if they were one batch, their gradients being averaged.
    plain = o.SGD(0.1) if by == "summed" else o.SGD(0.5, **clip)
    one = h.alone(plain, x, y, rows=2 * world.size * h.ROWS)
    h.assert_same_weights(model, one)
    h.assert_same_on_all_ranks(comm, model)
    assert int(optimizer.iterations) == 2


@pytest.mark.np(2, 4)
def test_sum_and_average_differ_by_size(hk, world):
    from . import keras_helpers as h

    x, y = h.data(world.size)
    steps = {}
    for op in (hk.Sum, hk.Average):
        model = h.compiled(hk.DistributedOptimizer(h.keras.optimizers.SGD(0.1), op=op))
        before = model.get_weights()
        h.fit(model, x[world.rank, 0], y[world.rank, 0])
        steps[op] = [new - old for new, old in zip(model.get_weights(), before, strict=True)]
    for by_sum, by_average in zip(steps[hk.Sum], steps[hk.Average], strict=True):
        np.testing.assert_allclose(by_sum, world.size * by_average, atol=1e-6)


@pytest.mark.np(2)
@pytest.mark.parametrize("options", ["fp16", "predivide", "groups", "num_groups", "named"])
def test_options(hk, world, comm, options):
    from . import keras_helpers as h

    x, y = h.data(world.size, 2)
    model = h.make_model()
    chosen = {
        "fp16": {"compression": hk.Compression.fp16},
        "predivide": {"gradient_predivide_factor": 2.0},
        "groups": {"groups": [model.trainable_variables[:1], model.trainable_variables[2:]]},
        "num_groups": {"num_groups": 2},
        "named": {"name": "mine"},
    }[options]
    model = h.compiled(hk.DistributedOptimizer(h.keras.optimizers.SGD(0.1), **chosen), model)
    h.fit(model, h.flat(x[world.rank]), h.flat(y[world.rank]))
    one = h.alone(h.keras.optimizers.SGD(0.1), x, y)
    h.assert_same_weights(model, one, 1e-3 if options == "fp16" else 1e-6)
    h.assert_same_on_all_ranks(comm, model)


@pytest.mark.np(2, 4)
def test_mixed_bfloat16(hk, world, comm):
    from . import keras_helpers as h

    x, y = h.data(world.size)
    optimizer = hk.DistributedOptimizer(h.keras.optimizers.SGD(0.1))
    model = h.compiled(optimizer, h.make_model("mixed_bfloat16"))
    h.fit(model, x[world.rank, 0], y[world.rank, 0])
    # bfloat16 sums depend on how many rows they have: average the ranks' own gradients here.
    one = h.compiled(h.keras.optimizers.SGD(0.1), h.make_model("mixed_bfloat16"))

    @h.tf.function
    def grads_of(x, y):
        with h.tf.GradientTape() as tape:
            loss = one.compute_loss(x, y, one(x, training=True))
        return tape.gradient(loss, one.trainable_variables)

    grads = [[g.numpy() for g in grads_of(x[rank, 0], y[rank, 0])] for rank in world.ranks]
    for variable, *parts in zip(one.trainable_variables, *grads, strict=True):
        variable.assign_sub(0.1 * np.mean(parts, axis=0))
    h.assert_same_weights(model, one)
    h.assert_same_on_all_ranks(comm, model)


@pytest.mark.np(2)
@pytest.mark.parametrize("nesting", ["by keras", "inside", "outside"])
def test_one_rank_alone_overflows(hk, world, comm, nesting):
    from . import keras_helpers as h

    o = h.keras.optimizers
    x, y = h.data(world.size, 3)
    x[world.size - 1, 1, 0, 0] = np.inf
    if nesting == "outside":
        optimizer = hk.DistributedOptimizer(o.LossScaleOptimizer(o.SGD(0.1), initial_scale=16.0))
    else:
        optimizer = hk.DistributedOptimizer(o.SGD(0.1))
        if nesting == "inside":
            optimizer = o.LossScaleOptimizer(optimizer, initial_scale=16.0)
    policy = h.keras.DTypePolicy("mixed_float16")
    model = h.make_model(policy)
    # Keras looks at the model's own policy when it decides whether to scale the loss.
    model.dtype_policy = policy
    h.compiled(optimizer, model)
    assert isinstance(model.optimizer, o.LossScaleOptimizer)
    before = float(model.optimizer.initial_scale)
    h.fit(model, h.flat(x[world.rank]), h.flat(y[world.rank]))
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert int(model.optimizer.iterations) == 2  # the second of three batches is left out
    assert float(model.optimizer.dynamic_scale.value) == before / 2
    h.assert_same_on_all_ranks(comm, model)


@pytest.mark.np(2)
def test_two_optimizers(hk, world, comm):
    from . import keras_helpers as h

    x, y = h.data(world.size)

    class Pair(h.keras.Model):
        def __init__(self, wrap):
            super().__init__()
            self.first, self.second = h.make_model(seed=1), h.make_model(seed=2)
            self.first_optimizer = wrap(h.keras.optimizers.SGD(0.1))
            self.second_optimizer = wrap(h.keras.optimizers.Adam(0.01))
            self.loss_of = h.keras.losses.MeanSquaredError()

        def call(self, x):
            return self.first(x) + self.second(x)

        def train_step(self, data):
            x, y = data
            for part, optimizer in (
                (self.second, self.second_optimizer),
                (self.first, self.first_optimizer),
            ):
                with h.tf.GradientTape() as tape:
                    loss = self.loss_of(y, self(x, training=True))
                weights = part.trainable_variables
                grads = tape.gradient(loss, weights)
                optimizer.apply_gradients(zip(grads, weights, strict=True))
            return {"loss": loss}

    pair, one = Pair(hk.DistributedOptimizer), Pair(lambda optimizer: optimizer)
    for model in (pair, one):
        model.compile()
    h.fit(pair, x[world.rank, 0], y[world.rank, 0], epochs=3)
    h.fit(one, h.whole(x), h.whole(y), world.size * h.ROWS, epochs=3)
    h.assert_same_weights(pair, one, 1e-5)
    h.assert_same_on_all_ranks(comm, pair)


@pytest.mark.np(2)
def test_embeddings(hk, world, comm):
    from . import keras_helpers as h

    def make(optimizer):
        h.keras.utils.set_random_seed(3)
        layers = h.keras.layers
        inputs = h.keras.Input((4,), dtype="int32")
        outputs = layers.Dense(1)(layers.Flatten()(layers.Embedding(10, 3)(inputs)))
        model = h.keras.Model(inputs, outputs)
        return h.compiled(optimizer, model)

    rng = np.random.default_rng(5)
    x = rng.integers(0, 6, size=(world.size, 2 * h.ROWS, 4))
    y = rng.normal(size=(world.size, 2 * h.ROWS, 1)).astype("float32")
    everyone = [a.reshape(world.size, 2, h.ROWS, -1) for a in (x, y)]
    # Keras's Adam and others are wrong about indices that occur twice, SGD is not.
    one = make(h.keras.optimizers.SGD(0.1))
    h.fit(one, *map(h.whole, everyone), world.size * h.ROWS)
    for dense in (False, True):
        optimizer = h.keras.optimizers.SGD(0.1)
        model = make(hk.DistributedOptimizer(optimizer, sparse_as_dense=dense))
        h.fit(model, x[world.rank], y[world.rank])
        h.assert_same_weights(model, one, 1e-5)
        h.assert_same_on_all_ranks(comm, model)


@pytest.mark.np(2)
def test_local_layers(hk, world):
    from . import keras_helpers as h

    x, y = h.data(world.size)
    model = h.make_model()
    optimizer = hk.PartialDistributedOptimizer(
        h.keras.optimizers.SGD(0.1), local_layers=model.layers[-1]
    )
    h.compiled(optimizer, model)
    before = model.get_weights()
    h.fit(model, x[world.rank, 0], y[world.rank, 0])
    one = h.alone(h.keras.optimizers.SGD(0.1), x, y)
    own = h.compiled(h.keras.optimizers.SGD(0.1 / world.size))
    h.fit(own, x[world.rank, 0], y[world.rank, 0])
    wanted = one.get_weights()[:2] + own.get_weights()[2:]
    for weight, right, old in zip(model.get_weights(), wanted, before, strict=True):
        np.testing.assert_allclose(weight, right, atol=1e-6)
        assert not np.array_equal(weight, old)


@pytest.mark.np(2)
@pytest.mark.limit(200)
def test_500_steps_leak_nothing_and_trace_once(hk, world):
    from . import keras_helpers as h

    x, y = h.data(1, 10)
    data = h.tf.data.Dataset.from_tensor_slices((h.flat(x), h.flat(y))).batch(h.ROWS).repeat()
    model = h.make_model()
    traces = []
    seen = {}

    class Counted(h.keras.Sequential):
        def train_step(self, data):
            traces.append(None)
            return super().train_step(data)

    class Watch(h.keras.callbacks.Callback):
        step = 0

        def on_train_batch_end(self, batch, logs=None):
            self.step += 1
            if self.step in (1, 50, 500):
                with open("/proc/self/statm") as file:
                    seen[self.step] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                seen[f"traces {self.step}"] = len(traces)

    counted = Counted(model.layers)
    optimizer = hk.DistributedOptimizer(h.keras.optimizers.Adam(0.001))
    h.compiled(optimizer, counted)
    counted.fit(data, epochs=5, steps_per_epoch=100, verbose=0, callbacks=[Watch()])
    assert seen["traces 500"] == seen["traces 1"]
    assert math.isfinite(counted.get_weights()[0].sum())
    assert seen[500] - seen[50] < 5 << 20, (seen[500] - seen[50]) / (1 << 20)
