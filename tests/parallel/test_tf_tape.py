"""Tapes, reducers and batch normalization train like one process on the whole batch (B38, B40)."""

from __future__ import annotations

import os

import numpy as np
import pytest

from .tf_helpers import assert_close, assert_same_on_all_ranks, tf

pytestmark = pytest.mark.np(1, 2, 4)


@pytest.fixture
def hvd(hvd):
    import hvdlite_tf

    return hvdlite_tf


def _random(seed, shape):
    return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


class Model:
    """A small network, as plain variables."""

    def __init__(self):
        shapes = [(6, 8), (8,), (8, 3), (3,)]
        self.variables = [tf.Variable(_random(10 + i, shape)) for i, shape in enumerate(shapes)]

    def loss(self, inputs, targets):
        w1, b1, w2, b2 = self.variables
        outputs = tf.matmul(tf.tanh(tf.matmul(inputs, w1) + b1), w2) + b2
        return tf.reduce_mean(tf.square(outputs - targets))

    def step(self, tape_of, inputs, targets, rate=0.1):
        with tf.GradientTape() as tape:
            loss = self.loss(inputs, targets)
        gradients = tape_of(tape).gradient(loss, self.variables)
        for variable, gradient in zip(self.variables, gradients, strict=True):
            variable.assign_sub(rate * gradient)
        return loss


def _batch(step, size=24):
    return _random(100 + step, (size, 6)), _random(200 + step, (size, 3))


def _alone(steps, scale=1.0):
    model = Model()
    for step in range(steps):
        model.step(lambda tape: tape, *_batch(step), rate=0.1 * scale)
    return [variable.numpy() for variable in model.variables]


# -- equality with one process (B38) --------------------------------------------------------


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_steps_equal_those_of_one_process(hvd, world, comm, how):
    model = Model()

    def step(inputs, targets):
        return model.step(hvd.DistributedGradientTape, inputs, targets)

    step = tf.function(step) if how == "graph" else step
    for number in range(3):
        step(*(part[world.rank :: world.size] for part in _batch(number)))
        for variable, value in zip(model.variables, _alone(number + 1), strict=True):
            assert_close(variable.read_value(), value, f"step {number}", 1e-6)
        assert_same_on_all_ranks(comm, model.variables)
    if how == "graph":
        assert step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(
    "options",
    [
        {"op": "Sum"},
        {"gradient_predivide_factor": 4.0},
        {"groups": 2},
        {"num_groups": 3},
        {"compression": "bf16"},
        {"compression": "fp16"},
    ],
    ids=str,
)
def test_options(hvd, world, options):
    options = dict(options)
    scale, tolerance = 1.0, 1e-6
    if "op" in options:
        options["op"] = hvd.Sum
        scale = float(world.size)
    if "compression" in options:
        tolerance = 0.0 if world.size == 1 else {"bf16": 2e-2, "fp16": 1e-3}[options["compression"]]
        tolerance = max(tolerance, 1e-6)
        options["compression"] = getattr(hvd.Compression, options["compression"])
    model = Model()
    step = tf.function(
        lambda x, y: model.step(lambda tape: hvd.DistributedGradientTape(tape, **options), x, y)
    )
    step(*(part[world.rank :: world.size] for part in _batch(0)))
    for variable, value in zip(model.variables, _alone(1, scale), strict=True):
        assert_close(variable.read_value(), value, "", tolerance)


def test_groups_of_variables(hvd, world):
    model = Model()
    groups = [model.variables[:2], [model.variables[3]]]
    model.step(
        lambda tape: hvd.DistributedGradientTape(tape, groups=groups),
        *(part[world.rank :: world.size] for part in _batch(0)),
    )
    for variable, value in zip(model.variables, _alone(1), strict=True):
        assert_close(variable.read_value(), value, "", 1e-6)
    for wrong, error in ((-1, ValueError), ("two", TypeError), ([[model], [model]], ValueError)):
        with pytest.raises(error, match="groups"):
            hvd.DistributedGradientTape(tf.GradientTape(), groups=wrong)


def test_many_large_gradients_in_buckets(hvd, world):
    # 12 MB in 10 variables: several buckets, some of which hold several variables.
    variables = [tf.Variable(tf.zeros((n, 1000))) for n in (5, 900, 7, 300, 1, 600, 600, 2, 580, 5)]
    reducer = _reducer("large")

    def run():
        grads = [tf.fill(v.shape, float(world.rank + i)) for i, v in enumerate(variables)]
        return reducer(grads, variables)

    mean = sum(world.ranks) / world.size
    function = tf.function(run)
    for _ in range(3):
        for results in (run(), function()):
            for i, (result, variable) in enumerate(zip(results, variables, strict=True)):
                assert_close(result, np.full(variable.shape, mean + i, np.float32))


def _reducer(name, **options):
    from hvdlite_tf.reduction import GradientReducer

    return GradientReducer(name=name, **options)


# -- what a tape gives back (B40) -----------------------------------------------------------


def _both_ways(function):
    return function(), tf.function(function)()


def test_structures_and_missing_gradients(hvd, world):
    used, unused, scalar = tf.Variable(tf.ones(2)), tf.Variable(tf.ones(3)), tf.Variable(3.0)
    mean = 1 + sum(world.ranks) / world.size

    def run():
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(used) * scalar * (world.rank + 1.0)
        tape = hvd.DistributedGradientTape(tape)
        return (
            tape.gradient(loss, {"a": used, "b": [unused, (scalar,)]}),
            tape.gradient(loss, scalar),
            tape.gradient(loss, [unused, used]),
            tape.gradient(loss, [unused], unconnected_gradients="zero"),
            tape.gradient(loss, used, output_gradients=tf.constant(2.0)),
            tape.gradient(loss, (used, used)),
        )

    for nested, one, pair, zero, scaled, twice in _both_ways(run):
        assert sorted(nested) == ["a", "b"] and isinstance(nested["b"][1], tuple)
        assert nested["b"][0] is None
        assert_close(nested["a"], np.full(2, 3 * mean, np.float32))
        assert_close(nested["b"][1][0], np.float32(2 * mean))
        assert_close(one, np.float32(2 * mean))
        assert pair[0] is None
        assert_close(pair[1], np.full(2, 3 * mean, np.float32))
        assert_close(zero[0], np.zeros(3, np.float32))
        assert_close(scaled, np.full(2, 6 * mean, np.float32))
        assert isinstance(twice, tuple) and len(twice) == 2
        assert_close(twice[1], np.full(2, 3 * mean, np.float32))


def test_a_gradient_that_only_some_ranks_have(hvd, world):
    first, second, never = (tf.Variable(tf.zeros(n)) for n in (2, 3, 4))
    table = tf.Variable(tf.zeros((5, 2)))
    mine = first if world.rank == 0 else second

    def run(**options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(mine) * 6.0
            if world.rank == 0:
                loss += tf.reduce_sum(tf.gather(table, [1, 1]))
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, [first, second, never, table], **options)

    others = world.size - 1
    results = run()
    assert_close(results[0], np.full(2, 6 / world.size, np.float32))
    if others:
        assert_close(results[1], np.full(3, 6 * others / world.size, np.float32))
    assert results[2] is None
    wanted = np.zeros((5, 2), np.float32)
    wanted[1] = 2 / world.size
    assert_close(tf.convert_to_tensor(results[3]), wanted)
    if others:
        with pytest.raises(tf.errors.OpError, match="(?s)MismatchError.*unconnected_gradients"):
            tf.function(lambda: [g for g in run() if g is not None])()
    # The next step works.
    assert run()[2] is None


def test_indexed_slices(hvd, world):
    table, dense = tf.Variable(tf.ones((6, 2))), tf.Variable(tf.ones(2))
    indices = [[rank, 3, 3, 4][: 4 if rank else 2] for rank in world.ranks]
    wanted = np.zeros((6, 2), np.float32)
    for rank in world.ranks:
        for index in indices[rank]:
            wanted[index] += (rank + 1) / world.size

    def run(**options):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, indices[world.rank])
            loss = tf.reduce_sum(rows * dense) * (world.rank + 1.0)
        tape = hvd.DistributedGradientTape(tape, **options)
        return tape.gradient(loss, [table, dense])

    for options in ({}, {"compression": hvd.Compression.bf16}):
        for slices, _ in _both_ways(lambda options=options: run(**options)):
            assert isinstance(slices, tf.IndexedSlices)
            if world.size > 1:
                assert len(np.unique(slices.indices)) == len(slices.indices)
            tolerance = 2e-2 if options else 1e-6
            assert_close(tf.convert_to_tensor(slices), wanted, "", tolerance)
    for result, _ in _both_ways(lambda: run(sparse_as_dense=True)):
        if world.size > 1:
            assert tf.is_tensor(result)
        assert_close(tf.convert_to_tensor(result), wanted, "", 1e-6)


def test_three_input_shapes_trace_three_times(hvd, world):
    model = Model()
    step = tf.function(lambda x, y: model.step(hvd.DistributedGradientTape, x, y))
    # Rank 0 sees the shapes in another order, so that ranks trace at different times.
    sizes = [4, 4, 8, 12, 4] if world.rank else [4, 8, 4, 12, 12]
    for number, size in enumerate(sizes):
        step(*_batch(number, size))
    assert step.experimental_get_tracing_count() == 3


def test_wrapping(hvd, world):
    variable = tf.Variable(2.0)

    class Doubling(tf.GradientTape):
        def gradient(self, *args, **kwargs):
            return 2 * super().gradient(*args, **kwargs)

    wrapped = hvd.DistributedGradientTape(Doubling())
    assert isinstance(wrapped, Doubling)
    with wrapped as tape:
        loss = variable * variable * (world.rank + 1.0)
    assert tape.watched_variables()[0] is variable
    mean = 1 + sum(world.ranks) / world.size
    assert_close(tape.gradient(loss, variable), np.float32(8 * mean))
    with pytest.raises(RuntimeError, match="non-persistent"):
        tape.gradient(loss, variable)
    # Wrapped inside the block that the original leaves; the original stays what it was.
    with tf.GradientTape(persistent=True) as original:
        loss = variable * variable * (world.rank + 1.0)
        tape = hvd.DistributedGradientTape(original)
    assert_close(tape.gradient(loss, variable), np.float32(4 * mean))
    assert_close(original.gradient(loss, variable), np.float32(4 * (world.rank + 1)))
    assert_close(tape.jacobian(loss, variable), np.float32(4 * (world.rank + 1)))
    for wrong in (tape, variable):
        with pytest.raises(TypeError, match="(?i)tape"):
            hvd.DistributedGradientTape(wrong)
    for options, error in (
        ({"op": hvd.Max}, ValueError),
        ({"op": hvd.Adasum}, NotImplementedError),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, ValueError),
    ):
        with pytest.raises(error):
            hvd.DistributedGradientTape(tf.GradientTape(), **options)


def test_local_sources(hvd, world):
    shared, local = tf.Variable(1.0), tf.Variable(1.0)
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build((None, 1))
    mean = 1 + sum(world.ranks) / world.size
    mine = world.rank + 1.0
    for scale in (True, False):

        def run(scale=scale):
            with tf.GradientTape() as tape:
                loss = (shared + local) * mine + tf.reduce_sum(layer(tf.fill((1, 1), mine)))
            tape = hvd.PartialDistributedGradientTape(
                tape, local_layers=layer, scale_local_gradients=scale
            )
            tape.register_local_source(local)
            return tape.gradient(loss, [shared, local, *layer.trainable_variables])

        divisor = world.size if scale else 1
        for first, second, third in _both_ways(run):
            assert_close(first, np.float32(mean))
            assert_close(second, np.float32(mine / divisor))
            assert_close(third, np.full((1, 1), mine / divisor, np.float32))


def test_process_set_of_one_part(hvd, world):
    if world.size != 4:
        pytest.skip("needs four ranks")
    pair = hvd.add_process_set([1, 3])
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = variable * float(world.rank)
    result = hvd.DistributedGradientTape(tape, process_set=pair).gradient(loss, variable)
    assert_close(result, np.float32(2 if world.rank in (1, 3) else world.rank))
    hvd.remove_process_set(pair)


def test_different_variables_are_an_error_on_all_ranks(hvd, world):
    if world.size == 1:
        pytest.skip("needs two ranks")
    for shapes in ([(2 + world.rank,)], [(2,)] * (1 + world.rank)):
        variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]

        def run(variables=variables):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(variable) for variable in variables])
            return hvd.DistributedGradientTape(tape).gradient(loss, variables)

        with pytest.raises(hvd.MismatchError, match="Mismatched gradients: .*rank 1"):
            run()
        with pytest.raises(tf.errors.OpError, match="(?s)MismatchError.*(rank|Rank)"):
            tf.function(run)()
    assert_close(hvd.allreduce(tf.ones(1), op=hvd.Sum), np.full(1, world.size, np.float32))


# -- orders, memory -------------------------------------------------------------------------


def test_gradients_that_become_ready_in_different_orders(hvd, world):
    # One thread runs all ops of a graph, and on odd ranks the first variable's gradient comes
    # first. An op that blocked until a gradient is reduced would wait for ever.
    variables = [tf.Variable(tf.ones((300, 1000))) for _ in range(6)]
    order = range(6) if world.rank % 2 else range(5, -1, -1)
    reducer = _reducer("orders")

    @tf.function
    def run():
        grads = [None] * 6
        last = tf.constant(float(world.rank))
        for i in order:
            with tf.control_dependencies([last]):
                last = grads[i] = tf.fill((300, 1000), float(world.rank + i))
        return reducer(grads, variables)

    for _ in range(5):
        for i, result in enumerate(run()):
            assert float(result[7, 7]) == i + sum(world.ranks) / world.size


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.limit(120)
@pytest.mark.np(2)
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_memory_stays_where_it_is(hvd, world, how):
    # Half a megabyte of gradients, so that keeping those of ten steps would show.
    table = tf.Variable(tf.ones((4000, 32)))
    model = Model()
    variables = [*model.variables, table]

    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = model.loss(inputs, targets) + tf.reduce_mean(table * table)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)

    step = tf.function(step) if how == "graph" else step
    batch = _batch(0)
    for number in range(500):
        step(*batch)
        if number == 50:
            before = _resident()
    assert _resident() - before < 5e6
    if how == "graph":
        assert step.experimental_get_tracing_count() == 1


# -- batch normalization --------------------------------------------------------------------


@pytest.mark.limit(60)
@pytest.mark.parametrize("how", ["eager", "graph", "masked"])
def test_batch_normalization_sees_the_whole_batch(hvd, world, comm, how):
    keras = tf.keras
    whole = _random(5, (4 * world.size + 3, 3, 2)) * 2 + 50
    weights = _random(6, whole.shape)
    mask = tf.constant(np.random.default_rng(7).random(whole.shape[:2]) < 0.6)
    cuts = [4 * r + min(r, 3) for r in world.ranks] + [len(whole)]
    mine = slice(cuts[world.rank], cuts[world.rank + 1])

    def run(layer, given, weights, mask):
        options = {"mask": mask} if how == "masked" else {}
        with tf.GradientTape() as tape:
            tape.watch(given)
            outputs = layer(given, training=True, **options)
            loss = tf.reduce_sum(tf.square(outputs) * weights + outputs)
        return outputs, tape.gradient(loss, [given, *layer.trainable_variables])

    layers = []
    for cls in (hvd.SyncBatchNormalization, keras.layers.BatchNormalization):
        layer = cls(momentum=0.7)
        layer.build((None, 3, 2))
        layer.gamma.assign([1.5, -0.5])
        layers.append(layer)
    sync, plain = layers
    function = run if how == "eager" else tf.function(run)
    parts = (whole, weights, mask)
    for _ in range(2):
        outputs, (to_inputs, *to_weights) = function(sync, *(part[mine] for part in parts))
        wanted, (wanted_inputs, *wanted_weights) = run(plain, *parts)
        assert_close(outputs, wanted[mine], "outputs", 2e-4)
        assert_close(to_inputs, wanted_inputs[mine], "inputs", 2e-4)
        for a, b in zip(to_weights, wanted_weights, strict=True):
            total = hvd.allreduce(a, op=hvd.Sum)
            assert_close(total, b.numpy(), "weights", 2e-4 * float(tf.reduce_max(abs(b))) + 2e-4)
    for a, b in zip(sync.non_trainable_variables, plain.non_trainable_variables, strict=True):
        assert_close(tf.convert_to_tensor(a), b.numpy(), "moving", 1e-5)
    assert_same_on_all_ranks(comm, sync.non_trainable_variables)
    copy = keras.layers.deserialize(keras.layers.serialize(sync))
    assert type(copy) is hvd.SyncBatchNormalization and copy.momentum == 0.7
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
