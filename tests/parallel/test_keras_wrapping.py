"""A distributed Keras optimizer is still the user's: saving, loading, copying; what is refused."""

from __future__ import annotations

import copy
import importlib.util
import json
import pickle
import zipfile

import numpy as np
import pytest

from .jobs import run_job, run_python

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


def _train(h, model, world, seed=0):
    x, y = h.data(world.size, seed=seed)
    model.train_on_batch(x[world.rank, 0], y[world.rank, 0])


def _config(path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))["compile_config"]["optimizer"]
    config["config"].pop("name")
    return config


@pytest.mark.parametrize("scaled", [False, True])
def test_saved_as_the_plain_optimizer_and_loaded_as_either(hk, world, comm, tmp_path, scaled):
    from . import keras_helpers as h

    def make():
        adam = h.keras.optimizers.Adam(h.keras.optimizers.schedules.CosineDecay(0.1, 9))
        return h.keras.optimizers.LossScaleOptimizer(adam, name="x") if scaled else adam

    model = h.compiled(hk.DistributedOptimizer(make()), run_eagerly=True)
    _train(h, model, world)
    plain = h.compiled(make(), run_eagerly=True)
    model.save(tmp_path / "model.keras")
    plain.save(tmp_path / "plain.keras")
    mine, theirs = (_config(tmp_path / name) for name in ("model.keras", "plain.keras"))
    for config in (mine, theirs):
        config["config"].get("inner_optimizer", {"config": {}})["config"].pop("name", None)
        config.pop("build_config", None)
    assert mine == theirs
    loaded = hk.load_model(tmp_path / "model.keras", op=hk.Sum)
    assert loaded.optimizer._hvdlite_options.op is hk.Sum
    plainly = h.keras.saving.load_model(tmp_path / "model.keras")
    assert type(plainly.optimizer) is type(make())
    loaded = hk.load_model(tmp_path / "model.keras")
    for other in (loaded, plainly):
        assert len(other.optimizer.variables) == len(model.optimizer.variables)
        for one, two in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(one.value, two.value)
    # A resumed job goes on as the one that saved would have.
    _train(h, loaded, world, seed=1)
    _train(h, model, world, seed=1)
    h.assert_same_weights(loaded, model, 0)
    h.assert_same_on_all_ranks(comm, loaded)


def test_optimizers_of_the_users_own(hk, world, tmp_path):
    from . import keras_helpers as h

    @h.keras.saving.register_keras_serializable("tests", "Mine")
    class Own(h.keras.optimizers.SGD):
        pass

    class Unregistered(h.keras.optimizers.SGD):
        pass

    for cls, options in ((Own, {}), (Unregistered, {"custom_optimizers": [Unregistered]})):
        model = h.compiled(hk.DistributedOptimizer(cls(0.1)), run_eagerly=True)
        _train(h, model, world)
        path = tmp_path / f"{cls.__name__}.keras"
        model.save(path)
        loaded = hk.load_model(path, **options)
        assert isinstance(loaded.optimizer, cls)
        _train(h, loaded, world)
        _train(h, model, world)
        h.assert_same_weights(loaded, model, 0)
    assert h.keras.saving.get_registered_name(type(loaded.optimizer)) == "Unregistered"


def test_the_instance_stays_what_it_is(hk, world):
    from . import keras_helpers as h

    sgd = h.keras.optimizers.SGD(lambda: 0.5, momentum=0.9, name="mine")
    model = h.compiled(sgd, run_eagerly=True)
    x, y = h.data(world.size)
    model.train_on_batch(x[0, 0], y[0, 0])  # every rank alike: it is not distributed yet
    slots = [np.array(v.value) for v in sgd.variables]
    wrapped = hk.DistributedOptimizer(sgd)
    assert wrapped is sgd and isinstance(sgd, h.keras.optimizers.SGD)
    assert type(sgd).__name__ == "SGD" and "SGD" in repr(sgd)
    assert sgd.name == "mine" and float(sgd.learning_rate) == 0.5
    for variable, slot in zip(sgd.variables, slots, strict=True):
        np.testing.assert_array_equal(variable.value, slot)


@pytest.mark.parametrize("how", ["from_config", "deepcopy", "pickle"])
def test_copies_are_distributed(hk, world, comm, how):
    from . import keras_helpers as h

    optimizer = hk.DistributedOptimizer(h.keras.optimizers.SGD(0.1), op=hk.Sum)
    if how == "from_config":
        twin = type(optimizer).from_config(optimizer.get_config())
    else:
        twin = copy.deepcopy(optimizer) if how == "deepcopy" else None
        twin = twin or pickle.loads(pickle.dumps(optimizer))
    assert twin is not optimizer
    first, second = (h.compiled(o, run_eagerly=True) for o in (optimizer, twin))
    for model in (first, second):
        _train(h, model, world)
    h.assert_same_weights(first, second, 0)
    h.assert_same_on_all_ranks(comm, second)


def test_what_is_refused(hk, hvd, world):
    import hvdlite
    import hvdlite_tf

    from . import keras_helpers as h

    o = h.keras.optimizers
    wrap = hk.DistributedOptimizer
    for dispatch in (hvdlite.DistributedOptimizer, hvdlite_tf.DistributedOptimizer):
        optimizer = dispatch(o.SGD(0.1), op=hk.Sum)
        assert optimizer._hvdlite_options.op is hk.Sum
    with pytest.raises(TypeError, match="takes an optimizer of Keras 3"):
        wrap("sgd")
    for again in (optimizer, o.LossScaleOptimizer(optimizer)):
        with pytest.raises(ValueError, match="distributed one already"):
            wrap(again)
    with pytest.raises(ValueError, match="at least 1"):
        wrap(o.SGD(), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="leave out backward_passes_per_step"):
        wrap(o.SGD(gradient_accumulation_steps=2), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="Average or Sum"):
        wrap(o.SGD(), op=hk.Max)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        wrap(o.SGD(), op=hk.Sum, gradient_predivide_factor=2.0)
    plain = o.SGD()
    with pytest.raises(NotImplementedError, match="Adasum"):
        wrap(plain, op=hk.Adasum)
    assert type(plain) is o.SGD  # what is refused is left as it was
    strategy = h.tf.distribute.MirroredStrategy(["CPU:0"])
    assert strategy.num_replicas_in_sync == 1  # one replica is no strategy worth refusing
    variable, stranger = h.keras.Variable([1.0]), h.keras.Variable([1.0])
    optimizer.build([variable])
    with pytest.raises(ValueError, match="not built for these variables"):
        optimizer.apply([h.tf.ones([1])], [stranger])


def test_arguments_in_the_order_of_tensorflow(hk, world):
    import hvdlite_tf

    from . import keras_helpers as h

    sgd = h.keras.optimizers.SGD(0.1)
    half = hvdlite_tf.Compression.fp16
    given = [sgd, "name", True, "/cpu:0", "/cpu:0", half, True, 3, hk.Average, 2.0, True, 4]
    assert hvdlite_tf.DistributedOptimizer(*given) is sgd
    options = sgd._hvdlite_options
    assert (options.compression, options.sparse_as_dense, options.passes) == (half, True, 3)
    assert (options.op, options.gradient_predivide_factor) == (hk.Average, 2.0)
    assert (options.average_passes, options.number_of_groups) == (True, 4)
    summing = hvdlite_tf.DistributedOptimizer(h.keras.optimizers.SGD(0.1), op=hk.Sum)
    assert summing._hvdlite_options.op is hk.Sum
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvdlite_tf.broadcast_global_variables(0)


def test_values(hk, world):
    from . import keras_helpers as h

    n, rank = world.size, world.rank
    assert hk.allreduce(float(rank), name="a") == (n - 1) / 2
    assert hk.allreduce(rank, op=hk.Sum) == n * (n - 1) // 2
    narrow = hk.allreduce(h.tf.constant([rank + 0.5]), compression=hk.Compression.fp16)
    assert narrow.dtype == np.float32 and narrow.tolist() == [n / 2]
    assert hk.allgather(h.tf.fill([rank + 1], rank)).tolist() == [
        r for r in range(n) for _ in range(r + 1)
    ]
    assert hk.broadcast(h.keras.Variable([rank + 1.0]), 1).tolist() == [2.0]
    assert hk.reducescatter(np.arange(n, dtype="float32"), op=hk.Sum).tolist() == [n * rank]


_PLAIN_LOAD = """
import sys
sys.modules["hvdlite"] = sys.modules["hvdlite_tf"] = None  # as if they were not installed
import keras
model = keras.saving.load_model(sys.argv[1])
assert type(model.optimizer) is keras.optimizers.AdamW, type(model.optimizer)
assert int(model.optimizer.iterations) == 1 and len(model.optimizer.variables) > 2
print("loaded")
"""

_SAVE = """
import sys
import keras, numpy as np
import hvdlite_tf.keras as hvd
hvd.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.AdamW()), loss="mse", run_eagerly=True)
model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
model.save(sys.argv[1])
"""


@pytest.mark.whole_job
def test_loaded_where_hvdlite_is_not_installed(tmp_path):
    path = str(tmp_path / "model.keras")
    env = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    for script in (_SAVE, _PLAIN_LOAD):
        result = run_python(script, timeout=100, env=env, arguments=[path])
        assert result.returncode == 0, result
    assert "loaded" in result.stdout


_TORCH = """
import sys
import numpy as np
import keras
import hvdlite_tf.keras as hvd
from jobtools import say

assert "hvdlite_tf.reduction" not in sys.modules
hvd.init()
n, r = hvd.size(), hvd.rank()
rng = np.random.default_rng(0)
x = rng.normal(size=(n, 2, 4, 5)).astype("float32")
y = rng.normal(size=(n, 2, 4, 3)).astype("float32")

def train(optimizer, x, y, rows, seed=3, callbacks=()):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile(optimizer, loss="mse")
    flat = [a.reshape(-1, a.shape[-1]) for a in (x, y)]
    model.fit(*flat, batch_size=rows, shuffle=False, verbose=0, callbacks=list(callbacks))
    return np.concatenate([w.ravel() for w in model.get_weights()])

o = keras.optimizers
whole = [np.swapaxes(a, 0, 1) for a in (x, y)]
for name, make, options in (
    ("sgd", lambda: o.SGD(0.1, momentum=0.9, global_clipnorm=0.1), {}),
    ("adam", lambda: o.AdamW(0.01, use_ema=True), {"compression": hvd.Compression.none}),
    ("scaled", lambda: o.LossScaleOptimizer(o.SGD(0.1), initial_scale=4.0), {}),
):
    mine = train(hvd.DistributedOptimizer(make(), **options), x[r], y[r], 4)
    assert abs(mine - train(make(), *whole, 4 * n)).max() < 1e-5, name
for options, keras_steps in (({}, 2), ({"backward_passes_per_step": 2,
                                       "average_aggregated_gradients": True}, None)):
    sgd = o.SGD(0.1, gradient_accumulation_steps=keras_steps)
    mine = train(hvd.DistributedOptimizer(sgd, **options), x[r], y[r], 4)
    assert abs(mine - train(o.SGD(0.1), *whole, 8 * n)).max() < 1e-6, options
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0),
             hvd.callbacks.MetricAverageCallback(),
             hvd.callbacks.LearningRateWarmupCallback(0.1)]
mine = train(hvd.DistributedOptimizer(o.SGD(0.1)), x[r], y[r], 4, seed=r, callbacks=callbacks)
everyone = hvd.allgather(mine[None])
assert (everyone == everyone[0]).all()
say(r, backend=keras.backend.backend())
"""


@pytest.mark.whole_job
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_keras_on_torch():
    result = run_job(2, _TORCH, timeout=110, env={"KERAS_BACKEND": "torch"})
    assert result.returncode == 0, result
    assert result.said == {rank: [{"backend": "torch"}] for rank in range(2)}, result
