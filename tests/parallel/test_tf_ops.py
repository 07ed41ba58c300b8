"""Collectives on TensorFlow tensors: values, types, gradients (B22, B37)."""

from __future__ import annotations

import numpy as np
import pytest

from .expected import OPS
from .tf_helpers import DTYPES, assert_close, tensor, tf, wanted

pytestmark = pytest.mark.np(2, 3)


@pytest.fixture
def hvd(hvd):
    import hvdlite_tf

    return hvdlite_tf


def _refused(name, op):
    return (name == "bool" and op == "Average") or (
        name.startswith("complex") and op in ("Min", "Max")
    )


def _both_ways(function, *arguments):
    """Return what a function gives eagerly and inside a `tf.function`."""
    return function(*arguments), tf.function(function)(*arguments)


# -- element types (B22) --------------------------------------------------------------------


@pytest.mark.limit(60)
@pytest.mark.parametrize("name", DTYPES)
def test_types_through_reductions(hvd, world, name):
    ops = [op for op in OPS if not _refused(name, op)]
    inputs = [tensor(rank, (5, 3), name) for rank in world.ranks]
    mine = inputs[world.rank]
    before = mine.numpy().copy()
    share, extra = divmod(5, world.size)
    start = share * world.rank + min(world.rank, extra)
    part = slice(start, start + share + (world.rank < extra))

    def reduce_all(value):
        whole = [hvd.allreduce(value, op=getattr(hvd, op)) for op in ops]
        return whole, [hvd.reducescatter(value, op=getattr(hvd, op)) for op in ops]

    for whole, scattered in _both_ways(reduce_all, mine):
        for op, result, piece in zip(ops, whole, scattered, strict=True):
            assert_close(result, wanted(inputs, op), op)
            assert_close(piece, wanted(inputs, op)[part], op)
    np.testing.assert_array_equal(mine.numpy(), before, err_msg="the input was changed")
    for op in set(OPS) - set(ops):
        for call in (hvd.allreduce, hvd.reducescatter):
            with pytest.raises(TypeError, match=f"(?i){op}"):
                call(mine, op=getattr(hvd, op))


@pytest.mark.limit(60)
@pytest.mark.parametrize("name", DTYPES)
def test_types_through_movements(hvd, world, name):
    uneven = [tensor(rank, (rank + 1, 3), name) for rank in world.ranks]
    squares = [tensor(rank, (world.size, 2), name) for rank in world.ranks]
    root = world.size - 1

    def move(first, second):
        group = hvd.grouped_allgather([first, second])
        sent = hvd.broadcast(second, root)
        return hvd.allgather(first), group, sent, hvd.alltoall(second)

    for gathered, group, sent, exchanged in _both_ways(
        move, uneven[world.rank], squares[world.rank]
    ):
        assert_close(gathered, np.concatenate(uneven))
        assert_close(group[0], np.concatenate(uneven))
        assert_close(group[1], np.concatenate(squares))
        assert_close(sent, squares[root].numpy())
        assert_close(exchanged, np.stack([square[world.rank].numpy() for square in squares]))


def test_types_that_do_not_travel_are_refused(hvd, world):
    for value in (tf.constant(["a"]), tf.ragged.constant([[1], [2, 3]]), object()):
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            with pytest.raises(TypeError, match=f"rank {world.rank}"):
                call(value)
    with pytest.raises(TypeError, match="sequence of tensors"):
        hvd.grouped_allreduce(tf.ones(3))


def test_shapes_without_elements_or_dimensions(hvd, world):
    def run(empty, scalar):
        return hvd.grouped_allreduce([empty, scalar], op=hvd.Sum), hvd.allgather(empty)

    for reduced, gathered in _both_ways(run, tf.zeros((0, 2)), tf.constant(2.0)):
        assert_close(reduced[0], np.zeros((0, 2), np.float32))
        assert_close(reduced[1], np.float32(2 * world.size))
        assert_close(gathered, np.zeros((0, 2), np.float32))
    with pytest.raises(ValueError, match="dimension"):
        hvd.allgather(tf.constant(1.0))


def test_options_of_allreduce(hvd, world):
    mine = tensor(world.rank, (4, 2))
    total = wanted([tensor(rank, (4, 2)) for rank in world.ranks], "Sum")

    def run(value):
        return (
            hvd.allreduce(value, average=False),
            hvd.allreduce(value, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0, name="x"),
            hvd.allreduce(value, op=hvd.Sum, compression=hvd.Compression.fp16),
            hvd.allreduce(value, op=hvd.Sum, compression=hvd.Compression.bf16),
        )

    for results in _both_ways(run, mine):
        for result, factor in zip(results, (1, 2, 1, 1), strict=True):
            assert_close(result, total * np.float32(factor))
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)


@pytest.mark.np(3)
def test_process_sets(hvd, world):
    pair = hvd.add_process_set([0, 1])
    try:
        if world.rank < 2:
            for result in _both_ways(
                lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=pair),
                tf.constant(world.rank + 1.0),
            ):
                assert_close(result, np.float32(3))
        else:
            with pytest.raises(ValueError, match="not in the process set"):
                hvd.allreduce(tf.ones(1), process_set=pair)
        included, size = tf.function(
            lambda: (
                hvd.process_set_included_op(pair.process_set_id),
                hvd.size_op(pair.process_set_id),
            )
        )()
        assert included.numpy() == (world.rank < 2) and size.numpy() == 2
    finally:
        hvd.remove_process_set(pair)


def test_indexed_slices(hvd, world):
    def mine(rank):
        indices = tf.constant([rank, 3, 3][: 3 if rank else 0], tf.int32)
        return tf.IndexedSlices(tensor(rank, (len(indices), 2)), indices, tf.constant([5, 2]))

    dense = [tf.convert_to_tensor(mine(rank)).numpy() for rank in world.ranks]

    def run(values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant([5, 2]))
        total = hvd.allreduce(slices, op=hvd.Sum, name="slices")
        mean, ones = hvd.grouped_allreduce([slices, tf.ones(2)])
        return total, mean, ones

    slices = mine(world.rank)
    for total, mean, ones in _both_ways(run, slices.values, slices.indices):
        assert total.indices.dtype == tf.int32
        assert len(np.unique(total.indices)) == len(total.indices)
        assert_close(tf.convert_to_tensor(total), wanted(dense, "Sum"))
        assert_close(tf.convert_to_tensor(mean), wanted(dense, "Average"))
        assert_close(ones, np.ones(2, np.float32))


def test_who_and_where(hvd, world):
    def ask():
        return hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()

    for answers in _both_ways(ask):
        assert [int(answer) for answer in answers] == [world.rank, world.size] * 2


def test_variables_and_objects(hvd, world):
    def variables():
        values = [tensor(world.rank, (3, 2)), tensor(world.rank, (), "bfloat16")]
        return [tf.Variable(value) for value in [*values, tensor(world.rank, 4, "bool")]]

    for root, call in ((0, hvd.broadcast_variables), (1, hvd.broadcast_)):
        theirs = [tensor(root, (3, 2)), tensor(root, (), "bfloat16"), tensor(root, 4, "bool")]
        for wrap in (lambda f: f, tf.function):
            mine = variables()
            wrap(lambda mine=mine, call=call, root=root: call(mine, root) and None)()
            for variable, value in zip(mine, theirs, strict=True):
                assert_close(variable.read_value(), value.numpy())
    assert hvd.broadcast_object_fn(1)({"rank": world.rank}) == {"rank": 1}
    assert hvd.allgather_object(world.rank) == list(world.ranks)
    with pytest.raises(hvd.MismatchError, match=r"number 0 is float32\[3, 2\] on rank 0"):
        hvd.broadcast_variables([tf.Variable(tf.zeros((3, 2 + world.rank)))], 0)
    with pytest.raises(TypeError, match="variables"):
        hvd.broadcast_variables([tf.ones(2)], 0)


def test_barrier_and_join(hvd, world):
    hvd.barrier()
    tf.function(lambda: hvd.barrier())()
    if world.rank == 0:
        assert_close(hvd.allreduce(tf.constant(6.0)), np.float32(6 / world.size))
    assert hvd.join() in world.ranks
    assert int(tf.function(lambda: hvd.join())()) in world.ranks


# -- errors ---------------------------------------------------------------------------------


def test_errors_cross_with_their_message(hvd, world):
    mine = tf.ones(2 + world.rank)
    with pytest.raises(hvd.MismatchError, match=r"(?i)mismatched shape.*rank 1"):
        hvd.allreduce(mine, name="unequal")
    with pytest.raises(tf.errors.OpError, match=r"(?is)MismatchError.*mismatched shape.*rank 1"):
        tf.function(lambda: hvd.allreduce(mine, name="unequal"))()
    with pytest.raises(tf.errors.OpError, match="(?s)split.*add up"):
        tf.function(lambda: hvd.alltoall(mine, splits=tf.fill([world.size], 7)))()
    assert_close(hvd.allreduce(tf.ones(1), op=hvd.Sum), np.full(1, world.size, np.float32))


def test_xla_is_refused_when_traced(hvd, world):
    inner = tf.function(lambda x: hvd.allreduce(x) + 1)
    for function in (hvd.allreduce, hvd.allgather, hvd.alltoall, inner):
        with pytest.raises(NotImplementedError, match="jit_compile"):
            tf.function(lambda x, f=function: f(x), jit_compile=True)(tf.ones(world.size))
    forward = tf.function(lambda x: x * 2, jit_compile=True)
    result = tf.function(lambda x: hvd.allreduce(forward(x)))(tf.ones(2))
    assert_close(result, np.full(2, 2.0, np.float32))


# -- gradients (B37) ------------------------------------------------------------------------


def _random(rank, shape, seed=0):
    return tf.constant(np.random.default_rng([seed, rank]).normal(size=shape))


def _check(world, shapes, collective, model):
    """Compare the gradient of a collective with that of its model in one process.

    Each rank's loss is a nonlinear function of its result with weights of its own; the model
    maps the list of all ranks' inputs to the list of all ranks' results.
    """
    inputs = [_random(rank, shape) for rank, shape in enumerate(shapes)]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        results = model(inputs)
        weights = [_random(rank, result.shape, seed=1) for rank, result in enumerate(results)]
        loss = tf.add_n([tf.reduce_sum(w * r * r) for w, r in zip(weights, results, strict=True)])
    gradients = tape.gradient(loss, inputs)

    def run(mine, weight):
        with tf.GradientTape() as tape:
            tape.watch(mine)
            result = collective(mine)
            loss = tf.reduce_sum(weight * result * result)
        return result, tape.gradient(loss, mine)

    for result, gradient in _both_ways(run, inputs[world.rank], weights[world.rank]):
        assert_close(result, results[world.rank], tolerance=1e-12)
        assert_close(gradient, tf.convert_to_tensor(gradients[world.rank]), tolerance=1e-12)


def test_gradients_of_reductions(hvd, world):
    shapes = [(3, 2)] * world.size

    def model(inputs, factor=1.0):
        return [tf.add_n(inputs) * factor] * world.size

    _check(world, shapes, lambda x: hvd.allreduce(x, op=hvd.Sum), model)
    _check(world, shapes, hvd.allreduce, lambda x: model(x, 1 / world.size))
    _check(
        world,
        shapes,
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5, name="n"),
        lambda x: model(x, 1.5),
    )

    def grouped(x):
        first, _, second = hvd.grouped_allreduce([x, tf.constant([1, 2]), x * x], op=hvd.Sum)
        return tf.concat([first, second], 0)

    def grouped_model(inputs):
        total = tf.concat([tf.add_n(inputs), tf.add_n([x * x for x in inputs])], 0)
        return [total] * world.size

    _check(world, shapes, grouped, grouped_model)
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with tf.GradientTape() as tape:
            mine = tf.ones(2)
            tape.watch(mine)
            result = hvd.allreduce(mine, op=op)
        with pytest.raises(NotImplementedError, match=str(op)):
            tape.gradient(result, mine)


def test_gradients_of_reducescatter(hvd, world):
    shapes = [(2 * world.size + 1, 2)] * world.size
    starts = [2 * r + min(r, 1) for r in [*world.ranks, world.size]]

    def model(inputs, factor=1.0):
        total = tf.add_n(inputs) * factor
        return [total[starts[r] : starts[r + 1]] for r in world.ranks]

    _check(world, shapes, lambda x: hvd.reducescatter(x, op=hvd.Sum), model)
    _check(
        world,
        shapes,
        lambda x: hvd.grouped_reducescatter([x, x], postscale_factor=4.0)[1],
        lambda x: model(x, 4 / world.size),
    )


def test_gradients_of_movements(hvd, world):
    uneven = [(rank, 3) for rank in world.ranks]  # rank 0 has no rows
    _check(world, uneven, hvd.allgather, lambda x: [tf.concat(x, 0)] * world.size)
    _check(
        world,
        uneven,
        lambda x: tf.concat(hvd.grouped_allgather([x, tf.tanh(x)], name="both"), 0),
        lambda x: [tf.concat([*x, *map(tf.tanh, x)], 0)] * world.size,
    )
    root = world.size - 1
    _check(
        world,
        [(2, 3)] * world.size,
        lambda x: hvd.broadcast(x, root),
        lambda x: [x[root] + 0 * tf.add_n(x)] * world.size,
    )
    _check(
        world,
        [(2 * world.size, 2)] * world.size,
        hvd.alltoall,
        lambda x: [tf.concat([t[2 * r : 2 * r + 2] for t in x], 0) for r in world.ranks],
    )
    # Rank r sends s + 1 rows to rank s.
    counts = [s + 1 for s in world.ranks]
    starts = [sum(counts[:s]) for s in world.ranks]
    _check(
        world,
        [(sum(counts), 2)] * world.size,
        lambda x: hvd.alltoall(x, splits=counts)[0],
        lambda x: [
            tf.concat([t[starts[r] : starts[r] + r + 1] for t in x], 0) for r in world.ranks
        ],
    )


def test_gradients_against_finite_differences(hvd, world):
    # All ranks perturb the same element of rank 0's input together.
    weights = _random(world.rank, (4,), seed=2)
    mine = _random(world.rank, (4,))

    def loss(x):
        return tf.reduce_sum(hvd.allreduce(x) ** 3 * weights)

    with tf.GradientTape() as tape:
        tape.watch(mine)
        value = loss(mine)
    gradient = tape.gradient(value, mine)
    step = 1e-6
    for i in range(4):
        shift = tf.one_hot(i, 4, step if world.rank == 0 else 0.0, dtype=tf.float64)
        slope = hvd.allreduce(loss(mine + shift) - loss(mine - shift), op=hvd.Sum) / (2 * step)
        if world.rank == 0:
            assert abs(float(slope) - float(gradient[i])) < 1e-6
