"""Callbacks of hvdlite_tf.keras (B39)."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None or importlib.util.find_spec("keras") is None,
        reason="needs TensorFlow and Keras",
    ),
    pytest.mark.np(2),
    pytest.mark.limit(120),
]


@pytest.fixture
def hk(hvd):
    from . import keras_helpers  # noqa: F401  # sets TensorFlow up before anything else does

    return pytest.importorskip("hvdlite_tf.keras")


def _fit(h, model, world, batches=2, **options):
    x, y = h.data(world.size, batches)
    return h.fit(model, h.flat(x[world.rank]), h.flat(y[world.rank]), **options)


def _eager(h, optimizer, seed=7):
    return h.compiled(optimizer, h.make_model(seed=seed), run_eagerly=True)


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_of_weights_and_slots(hk, world, comm, root):
    from . import keras_helpers as h

    def trained(rank):
        """A model that differs from rank to rank, in all that an optimizer has."""
        optimizer = h.keras.optimizers.Adam(0.01 * (rank + 1))
        model = _eager(h, optimizer, seed=rank)
        if rank == root:  # as if resumed on one rank only; the others have built nothing yet
            x, y = h.data(1, seed=rank)
            for _ in range(rank + 2):
                model.train_on_batch(x[0, 0], y[0, 0])
        return model

    wanted = trained(root)
    optimizer = (wanted if world.rank == root else trained(world.rank)).optimizer
    model = wanted if world.rank == root else _eager(h, optimizer, seed=world.rank)
    right = comm.bcast(
        [np.array(v.value) for v in model.weights + optimizer.variables]
        if world.rank == root
        else None,
        root=root,
    )
    seen = []

    class See(h.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append([np.array(v.value) for v in model.weights + optimizer.variables])

    hk.DistributedOptimizer(optimizer)
    _fit(h, model, world, callbacks=[hk.callbacks.BroadcastGlobalVariablesCallback(root), See()])
    for array, wanted_array in zip(seen[0], right, strict=True):
        np.testing.assert_array_equal(array, wanted_array)
    assert int(optimizer.iterations) == root + 4
    h.assert_same_on_all_ranks(comm, model)


def test_broadcast_leaves_local_variables(hk, world):
    from . import keras_helpers as h

    model = _eager(h, h.keras.optimizers.SGD(0.0), seed=world.rank)
    before = model.get_weights()
    callback = hk.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=model.weights[:1])
    callback.register_local_var(model.weights[2])
    _fit(h, model, world, callbacks=[callback])
    after = model.get_weights()
    same = [np.array_equal(old, new) for old, new in zip(before, after, strict=True)]
    # The kernels are local; biases are zero everywhere anyway.
    assert same == [True] * 4
    other = h.make_model(seed=1 - world.rank).get_weights()
    assert not np.array_equal(after[0], other[0])


def test_broadcast_after_the_first_batch_where_variables_come_late(hk, world, comm):
    from . import keras_helpers as h

    class Late(h.keras.Model):
        """Two optimizers of its own, which nobody builds before the first batch."""

        def __init__(self, seed):
            super().__init__()
            self.inner = h.make_model(seed=seed)
            self.own = hk.DistributedOptimizer(h.keras.optimizers.SGD(0.1, momentum=0.9))

        def call(self, x):
            return self.inner(x)

        def train_step(self, data):
            x, y = data
            with h.tf.GradientTape() as tape:
                loss = h.tf.reduce_mean((self(x) - y) ** 2)
            grads = tape.gradient(loss, self.trainable_variables)
            self.own.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Late(world.rank)
    model.compile(run_eagerly=True)
    _fit(h, model, world, callbacks=[hk.callbacks.BroadcastGlobalVariablesCallback(0)])
    h.assert_same_on_all_ranks(comm, model)
    slots = [np.array(v.value).tobytes() for v in model.own.variables]
    assert all(other == slots for other in comm.allgather(slots))


def test_broadcast_of_models_that_differ(hk, world):
    from . import keras_helpers as h

    model = h.keras.Sequential([h.keras.Input((5,)), h.keras.layers.Dense(3 + world.rank)])
    model.build()
    with pytest.raises(hk.MismatchError, match=r"rank 1 differ: variable 0 is .*\(5, 3\) there"):
        hk.broadcast_weights(model.weights, 0)
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hk.broadcast_global_variables(0)


def test_metrics_are_averaged_before_others_see_them(hk, world, comm):
    from . import keras_helpers as h

    logs_of = {}

    class Own(h.keras.callbacks.Callback):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def on_epoch_end(self, epoch, logs=None):
            logs_of[self.name] = dict(logs)
            if self.name == "before":
                logs["mine"] = float(world.rank)
                logs["word"] = "a"
                if world.rank == 0:
                    logs["rank 0 only"] = 5.0

    model = _eager(h, h.keras.optimizers.SGD(0.0))
    callbacks = [Own("before"), hk.callbacks.MetricAverageCallback(), Own("after")]
    x, y = h.data(world.size)
    with pytest.warns(UserWarning, match="rank 0 only"):
        history = h.fit(
            model,
            x[world.rank, 0],
            y[world.rank, 0],
            validation_data=(x[world.rank, 0], 2 * y[world.rank, 0]),
            callbacks=callbacks,
        )
    for key in ("loss", "val_loss"):
        mean = np.mean(comm.allgather(logs_of["before"][key]))
        assert logs_of["before"][key] != pytest.approx(mean, rel=1e-6)
        assert logs_of["after"][key] == pytest.approx(mean, rel=1e-12)
        assert history.history[key] == [logs_of["after"][key]]
    assert logs_of["after"]["mine"] == (world.size - 1) / 2
    assert logs_of["after"]["word"] == "a"
    assert logs_of["after"].get("rank 0 only") == (5.0 if world.rank == 0 else None)


class _Rates:
    """Makes a callback that notes the learning rate of every batch."""

    def __new__(cls, h, rates):
        class Rates(h.keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                rate = self.model.optimizer._learning_rate.value
                rates.append(float(rate))

        return Rates()


@pytest.mark.parametrize("initial_epoch", [0, 1, 3])
def test_warm_up(hk, world, capfd, initial_epoch):
    from . import keras_helpers as h

    rates, lr, n = [], 0.4, world.size
    model = _eager(h, hk.DistributedOptimizer(h.keras.optimizers.SGD(lr, momentum=0.9)))
    warm_up = hk.callbacks.LearningRateWarmupCallback(lr, warmup_epochs=3, verbose=1)
    history = _fit(
        h,
        model,
        world,
        epochs=4,
        initial_epoch=initial_epoch,
        callbacks=[warm_up, _Rates(h, rates)],
    )
    # A batch b of 6 in the warm-up has lr/n + (lr - lr/n) * (b + 1) / 6.
    wanted = [lr / n + (lr - lr / n) * min(b + 1, 6) / 6 for b in range(8)][2 * initial_epoch :]
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)
    assert history.history["lr"][-1] == pytest.approx(lr)
    said = "warm-up is over" in capfd.readouterr().out
    assert said == (world.rank == 0 and initial_epoch < 3)


def test_warm_up_ends_at_the_full_rate_with_several_steps_per_execution(hk, world):
    from . import keras_helpers as h

    optimizer = hk.DistributedOptimizer(h.keras.optimizers.SGD(0.4))
    model = h.compiled(optimizer, steps_per_execution=4)
    callbacks = [hk.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=1)]
    _fit(h, model, world, batches=4, callbacks=callbacks)
    assert float(h.keras.ops.convert_to_numpy(optimizer._learning_rate.value)) == pytest.approx(0.4)


@pytest.mark.parametrize("initial_epoch", [0, 3])
def test_schedule(hk, world, initial_epoch):
    from . import keras_helpers as h

    rates = []
    make = hk.callbacks.LearningRateScheduleCallback
    callbacks = [
        make(0.8, lambda epoch: 0.5**epoch, end_epoch=2),
        make(0.8, 0.1, start_epoch=2, end_epoch=4),
        make(0.8, lambda epoch: 1 / epoch, start_epoch=4, staircase=False),
    ]
    model = _eager(h, hk.DistributedOptimizer(h.keras.optimizers.SGD(0.8)))
    options = {"epochs": 5, "initial_epoch": initial_epoch}
    _fit(h, model, world, callbacks=[*callbacks, _Rates(h, rates)], **options)
    wanted = [0.8, 0.8, 0.4, 0.4, *[0.08] * 4, 0.8 / 4, 0.8 / 4.5][2 * initial_epoch :]
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)


def test_momentum_is_corrected_when_the_rate_changes(hk, world):
    from . import keras_helpers as h

    x, y = h.data(world.size, 1)
    results = {}
    for correct in (True, False):
        model = _eager(h, hk.DistributedOptimizer(h.keras.optimizers.SGD(0.1, momentum=0.9)))
        schedule = hk.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 2.0**epoch, momentum_correction=correct
        )
        h.fit(model, x[world.rank, 0], y[world.rank, 0], epochs=2, callbacks=[schedule])
        results[correct] = model.get_weights()
    one = h.make_model()
    variables = one.trainable_variables
    velocity = [np.zeros(v.shape, "float32") for v in variables]
    for factor, rate in ((1, 0.1), (2, 0.2)):  # Goyal et al. 2017, equation 10
        with h.tf.GradientTape() as tape:
            loss = h.tf.reduce_mean((one(h.whole(x)) - h.whole(y)) ** 2)
        grads = tape.gradient(loss, variables)
        for i, (variable, grad) in enumerate(zip(variables, grads, strict=True)):
            velocity[i] = 0.9 * factor * velocity[i] - rate * grad.numpy()
            variable.assign_add(velocity[i])
    for weight, plain, wanted in zip(results[True], results[False], one.get_weights(), strict=True):
        np.testing.assert_allclose(weight, wanted, atol=1e-6)
        assert not np.allclose(plain, wanted, atol=1e-6)


@pytest.mark.parametrize("kind", ["schedule", "function", "loss scaling"])
def test_rates_that_cannot_be_set(hk, world, kind):
    from . import keras_helpers as h

    o = h.keras.optimizers
    schedule = o.schedules.ExponentialDecay(0.1, 10, 0.9)
    optimizer = o.SGD((lambda: 0.1) if kind == "function" else schedule)
    if kind == "loss scaling":
        optimizer = o.LossScaleOptimizer(optimizer)
    model = _eager(h, hk.DistributedOptimizer(optimizer))
    for callback in (
        hk.callbacks.LearningRateWarmupCallback(0.1),
        hk.callbacks.LearningRateScheduleCallback(0.1, 0.5),
    ):
        with pytest.raises(ValueError, match="follows a LearningRateSchedule or a function"):
            _fit(h, model, world, callbacks=[callback])
    with pytest.raises(ValueError, match="initial_lr is required"):
        hk.callbacks.LearningRateScheduleCallback(None, 0.5)


def test_unknown_number_of_steps(hk, world):
    from . import keras_helpers as h

    x, y = h.data(world.size)
    batches = ((x[world.rank, 0], y[world.rank, 0]) for _ in range(2))
    model = _eager(h, hk.DistributedOptimizer(h.keras.optimizers.SGD(0.1)))
    callbacks = [hk.callbacks.LearningRateWarmupCallback(0.1)]
    with pytest.raises(ValueError, match="pass steps_per_epoch"):
        model.fit(batches, verbose=0, callbacks=callbacks)


def test_best_model_is_saved_by_rank_0(hk, world, comm, tmp_path):
    from . import keras_helpers as h

    path = tmp_path / "best.keras"  # a folder of each rank's own
    model = _eager(h, hk.DistributedOptimizer(h.keras.optimizers.SGD(0.1)))
    best = hk.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="pass filepath="):
        _fit(h, model, world, callbacks=[best])
    best.filepath = path
    callbacks = [hk.callbacks.MetricAverageCallback(), best]
    _fit(h, model, world, epochs=2, callbacks=callbacks)
    comm.Barrier()
    assert path.exists() == (world.rank == 0)
    if path.exists():
        h.assert_same_weights(h.keras.saving.load_model(path), model, 0)
