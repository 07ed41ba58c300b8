"""Every collective in every form gives what arithmetic says, on any number of ranks."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time

import numpy as np
import pytest

from .expected import FORMS, OPS, assert_equal, known, reduced, run
from .jobs import slower


@pytest.mark.parametrize("op", OPS)
def test_allreduce_forms_and_ops(hvd, world, op):
    inputs = [known(rank, (3, 5)) for rank in world.ranks]
    for form, name in itertools.product(FORMS, (None, f"named.{op}")):
        result = run(hvd, form, inputs[world.rank].copy(), op=getattr(hvd, op), name=name)
        assert_equal(result, reduced(inputs, op), f"{form} {name}")


def test_allreduce_averages_by_default(hvd, world):
    inputs = [known(rank, 7) for rank in world.ranks]
    assert_equal(hvd.allreduce(inputs[world.rank]), reduced(inputs, "Average"))


def test_allreduce_old_average_argument(hvd, world):
    inputs = [known(rank, 7) for rank in world.ranks]
    mine = inputs[world.rank]
    assert_equal(hvd.allreduce(mine, average=False), reduced(inputs, "Sum"))
    assert_equal(hvd.allreduce(mine, average=True), reduced(inputs, "Average"))
    with pytest.raises(ValueError):
        hvd.allreduce(mine, average=True, op=hvd.Sum)


@pytest.mark.parametrize("op", ("Sum", "Average", "Max"))
def test_scale_factors(hvd, world, op):
    inputs = [known(rank, (4, 3)) for rank in world.ranks]
    scaled = [array * np.float32(0.5) for array in inputs]
    for form in FORMS:
        result = run(
            hvd,
            form,
            inputs[world.rank].copy(),
            op=getattr(hvd, op),
            prescale_factor=0.5,
            postscale_factor=4.0,
        )
        assert_equal(result, reduced(scaled, op) * np.float32(4), form)


def test_scale_factors_of_integers_round_toward_zero(hvd, world):
    inputs = [np.array([-7, -4, 4, 7], np.int32) + 2 * rank for rank in world.ranks]
    total = np.sum(inputs, axis=0)
    result = hvd.allreduce(inputs[world.rank], op=hvd.Sum, postscale_factor=0.25)
    assert_equal(result, np.trunc(total * 0.25).astype(np.int32))
    even = [array * 2 for array in inputs]
    result = hvd.allreduce(even[world.rank], op=hvd.Sum, prescale_factor=0.5)
    assert_equal(result, total.astype(np.int32))


@pytest.mark.parametrize("count", (1, 2, 1023, 4096, 4097, 16385, 65537, 262147, 5_000_011))
def test_allreduce_sizes(hvd, world, comm, count):
    # Cheap to compute, different everywhere, and sums of four stay exact in float32.
    base = np.arange(count, dtype=np.float32) % 4093
    result = hvd.allreduce(base + world.rank, op=hvd.Sum)
    wanted = base * world.size + np.float32(sum(world.ranks))
    np.testing.assert_array_equal(result, wanted)
    result = hvd.allreduce(base + world.rank, op=hvd.Average, postscale_factor=3.0)
    np.testing.assert_allclose(result, 3 * wanted / np.float32(world.size), rtol=1e-6)


@pytest.mark.parametrize("rows", (1, 5000, 150_001))
def test_sizes_of_the_other_collectives(hvd, world, rows):
    def make(rank, count=rows):
        return (np.arange(count * 2) % 1021 + 10_000 * rank).reshape(count, 2).astype(np.float64)

    mine = make(world.rank, rows + world.rank)
    gathered = np.concatenate([make(rank, rows + rank) for rank in world.ranks])
    np.testing.assert_array_equal(hvd.allgather(mine), gathered)
    root = world.size - 1
    np.testing.assert_array_equal(hvd.broadcast(make(world.rank), root), make(root))
    base = sum(make(rank, rows * world.size) for rank in world.ranks)
    result = hvd.reducescatter(make(world.rank, rows * world.size), op=hvd.Sum)
    np.testing.assert_array_equal(result, base[rows * world.rank :][:rows])
    parts = [make(rank, rows * world.size)[rows * world.rank :][:rows] for rank in world.ranks]
    result = hvd.alltoall(make(world.rank, rows * world.size))
    np.testing.assert_array_equal(result, np.concatenate(parts))


@pytest.mark.parametrize("count", (3, 5000, 300_007))
def test_all_ranks_get_identical_bits(hvd, world, comm, rng, count):
    inputs = [rng.standard_normal(count, np.float32) for _ in world.ranks]
    for op in ("Sum", "Average", "Product"):
        result = hvd.allreduce(inputs[world.rank], op=getattr(hvd, op))
        everywhere = comm.allgather(hashlib.sha256(result).digest())
        assert len(set(everywhere)) == 1, op
        again = hvd.allreduce(inputs[world.rank], op=getattr(hvd, op))
        np.testing.assert_array_equal(again, result)
    wide = np.sum(np.stack(inputs).astype(np.float64), axis=0)
    result = hvd.allreduce(inputs[world.rank], op=hvd.Sum)
    np.testing.assert_allclose(result, wide, rtol=1e-5, atol=1e-5)


def test_allgather_of_unequal_rows_in_rank_order(hvd, world):
    inputs = [known(rank, (rank + 1, 2, 3)) for rank in world.ranks]
    wanted = np.concatenate(inputs)
    mine = inputs[world.rank]
    assert_equal(hvd.allgather(mine), wanted)
    assert_equal(hvd.synchronize(hvd.allgather_async(mine, name="ag")), wanted)
    np.testing.assert_array_equal(mine, known(world.rank, (world.rank + 1, 2, 3)))


def test_allgather_keeps_nothing_of_the_input(hvd, world):
    mine = known(world.rank, (2, 2))
    result = hvd.allgather(mine)
    result += 1
    np.testing.assert_array_equal(mine, known(world.rank, (2, 2)))


def test_grouped_allgather(hvd, world):
    shapes = [(2, 3), (1,), (5, 1)]
    inputs = [[known(r, (n + r, *rest), seed=n) for n, *rest in shapes] for r in world.ranks]
    wanted = [np.concatenate(parts) for parts in zip(*inputs, strict=True)]
    for results in (
        hvd.grouped_allgather(inputs[world.rank]),
        hvd.synchronize(hvd.grouped_allgather_async(inputs[world.rank], name="gag")),
    ):
        assert len(results) == len(wanted)
        for result, right in zip(results, wanted, strict=True):
            assert_equal(result, right)


def test_broadcast_from_every_root(hvd, world):
    for root in world.ranks:
        wanted = known(root, (3, 4), seed=root)
        for form in ("broadcast", "broadcast_async", "broadcast_", "broadcast_async_"):
            mine = known(world.rank, (3, 4), seed=root)
            result = getattr(hvd, form)(mine, root)
            if "async" in form:
                result = hvd.synchronize(result)
            assert_equal(result, wanted, f"{form} from {root}")
            if form.endswith("_"):
                assert result is mine
            else:
                np.testing.assert_array_equal(mine, known(world.rank, (3, 4), seed=root))
                assert not np.shares_memory(result, mine)


def test_broadcast_root_must_exist(hvd, world):
    for root in (-1, world.size, world.size + 100):
        with pytest.raises(ValueError):
            hvd.broadcast(np.ones(3), root)
    assert_equal(hvd.allreduce(np.ones(2)), np.ones(2))


def test_alltoall_even(hvd, world):
    inputs = [known(rank, (2 * world.size, 3)) for rank in world.ranks]
    wanted = np.concatenate([array[2 * world.rank :][:2] for array in inputs])
    assert_equal(hvd.alltoall(inputs[world.rank]), wanted)
    assert_equal(hvd.synchronize(hvd.alltoall_async(inputs[world.rank], name="a2a")), wanted)


def test_alltoall_with_splits(hvd, world):
    splits = [[(3 * source + target) % 4 for target in world.ranks] for source in world.ranks]
    inputs = [known(rank, (sum(splits[rank]), 2)) for rank in world.ranks]
    parts = []
    for source in world.ranks:
        start = sum(splits[source][: world.rank])
        parts.append(inputs[source][start : start + splits[source][world.rank]])
    received = [splits[source][world.rank] for source in world.ranks]
    for given in (splits[world.rank], np.array(splits[world.rank], np.int32)):
        output, counts = hvd.alltoall(inputs[world.rank], splits=given)
        assert_equal(output, np.concatenate(parts))
        assert list(counts) == received
    handle = hvd.alltoall_async(inputs[world.rank], splits=splits[world.rank], name="a2as")
    output, counts = hvd.synchronize(handle)
    assert_equal(output, np.concatenate(parts))
    assert list(counts) == received


@pytest.mark.np(2, 3, 4)
def test_alltoall_rows_must_divide(hvd, world):
    with pytest.raises(ValueError):
        hvd.alltoall(np.ones((world.size + 1, 2)))
    assert_equal(hvd.allreduce(np.ones(2)), np.ones(2))


@pytest.mark.parametrize("rows", (1, 3, 7, 12, 1001))
@pytest.mark.parametrize("op", ("Sum", "Average", "Min"))
def test_reducescatter_gives_first_ranks_the_extra_rows(hvd, world, rows, op):
    inputs = [known(rank, (rows, 3)) for rank in world.ranks]
    counts = [rows // world.size + (rank < rows % world.size) for rank in world.ranks]
    start = sum(counts[: world.rank])
    wanted = reduced(inputs, op)[start : start + counts[world.rank]]
    mine = inputs[world.rank]
    assert_equal(hvd.reducescatter(mine, op=getattr(hvd, op)), wanted)
    handle = hvd.reducescatter_async(mine, name=f"rs.{rows}", op=getattr(hvd, op))
    assert_equal(hvd.synchronize(handle), wanted)
    np.testing.assert_array_equal(mine, known(world.rank, (rows, 3)))


def test_reducescatter_averages_by_default_and_scales(hvd, world):
    inputs = [known(rank, (world.size * 2, 2)) for rank in world.ranks]
    wanted = reduced(inputs, "Average")[2 * world.rank :][:2]
    assert_equal(hvd.reducescatter(inputs[world.rank]), wanted)
    result = hvd.reducescatter(
        inputs[world.rank], op=hvd.Sum, prescale_factor=0.5, postscale_factor=8.0
    )
    assert_equal(result, 4 * reduced(inputs, "Sum")[2 * world.rank :][:2])


def test_grouped_reducescatter(hvd, world):
    shapes = [(world.size, 2), (2 * world.size, 1), (3 * world.size,)]
    inputs = [[known(rank, shape, seed=7) for shape in shapes] for rank in world.ranks]
    for results in (
        hvd.grouped_reducescatter(inputs[world.rank], op=hvd.Sum),
        hvd.synchronize(hvd.grouped_reducescatter_async(inputs[world.rank], op=hvd.Sum)),
    ):
        for index, result in enumerate(results):
            total = reduced([arrays[index] for arrays in inputs], "Sum")
            rows = shapes[index][0] // world.size
            assert_equal(result, total[rows * world.rank :][:rows])


@pytest.mark.parametrize("op", ("Sum", "Average", "Max"))
def test_grouped_allreduce(hvd, world, op):
    shapes = [(), (1,), (5, 3), (2, 2, 2), (1000,)]
    dtypes = ["float32", "float64", "int64", "float16", "int32"]

    def make(rank):
        return [known(rank, s, d, seed=3) for s, d in zip(shapes, dtypes, strict=True)]

    everyone = [make(rank) for rank in world.ranks]
    wanted = [reduced(parts, op) for parts in zip(*everyone, strict=True)]
    for suffix in ("", "_async", "_", "_async_"):
        mine = make(world.rank)
        results = getattr(hvd, f"grouped_allreduce{suffix}")(mine, op=getattr(hvd, op))
        if "async" in suffix:
            results = hvd.synchronize(results)
        assert len(results) == len(wanted)
        for index, (result, right) in enumerate(zip(results, wanted, strict=True)):
            assert_equal(result, right, f"{suffix} {index}")
            assert (result is mine[index]) == suffix.endswith("_")


def test_handles_may_be_waited_for_in_any_order(hvd, world, rng):
    order = rng.permutation(20)
    handles = [
        hvd.allreduce_async(np.full(5, i + world.rank, np.float32), op=hvd.Sum) for i in range(20)
    ]
    for i in order:
        wanted = np.full(5, i * world.size + sum(world.ranks), np.float32)
        assert_equal(hvd.synchronize(handles[i]), wanted)
        assert_equal(hvd.synchronize(handles[i]), wanted)  # a second wait gives the same


def test_ranks_may_submit_names_in_different_orders(hvd, world):
    for repeat in range(3):  # the later rounds are answered from the cache
        order = np.random.default_rng((repeat, world.rank)).permutation(40)
        handles = {}
        for i in order:
            value = np.full(int(i) + 1, i * (world.rank + 1), np.float64)
            handles[i] = hvd.allreduce_async(value, name=f"t{i}", op=hvd.Sum)
        for i, handle in handles.items():
            wanted = np.full(int(i) + 1, float(i * sum(rank + 1 for rank in world.ranks)))
            assert_equal(hvd.synchronize(handle), wanted)


def test_poll_turns_true_and_does_not_wait(hvd, world, comm):
    if world.rank == 0:
        handle = hvd.allreduce_async(np.ones(3), name="poll", op=hvd.Sum)
        assert world.size == 1 or not hvd.poll(handle)
    comm.barrier()
    if world.rank != 0:
        handle = hvd.allreduce_async(np.ones(3), name="poll", op=hvd.Sum)
    deadline = time.monotonic() + slower(10)
    while not hvd.poll(handle):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert_equal(hvd.synchronize(handle), np.full(3, float(world.size)))


@pytest.mark.np(2, 3)
def test_wait_with_a_timeout(hvd, world, comm):
    if world.rank == 0:
        handle = hvd.allreduce_async(np.ones(3), name="late", op=hvd.Sum)
        for seconds in (0.0, 0.05):
            began = time.monotonic()
            with pytest.raises(hvd.HvdliteTimeoutError):
                hvd.synchronize(handle, timeout=seconds)
            assert time.monotonic() - began >= seconds
    comm.barrier()
    if world.rank != 0:
        handle = hvd.allreduce_async(np.ones(3), name="late", op=hvd.Sum)
    # The wait gave up, not the collective.
    assert_equal(hvd.synchronize(handle, timeout=slower(10)), np.full(3, float(world.size)))


def test_300_tensors_in_flight(hvd, world):
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 3000, 300)
    kinds = rng.integers(0, 4, 300)
    mine = np.random.default_rng(world.rank).permutation(300)  # each rank in its own order
    handles = {}
    for i in mine:
        array = known(world.rank, sizes[i], ("float32", "float64", "int32")[i % 3], seed=int(i))
        name = f"many.{i}"
        if kinds[i] < 2:
            handles[i] = hvd.allreduce_async(array, name=name, op=hvd.Sum)
        elif kinds[i] == 2:
            handles[i] = hvd.allgather_async(array, name=name)
        else:
            handles[i] = hvd.broadcast_async(array, int(i) % world.size, name=name)
    for i in reversed(mine):
        dtype = ("float32", "float64", "int32")[i % 3]
        inputs = [known(rank, sizes[i], dtype, seed=int(i)) for rank in world.ranks]
        if kinds[i] < 2:
            wanted = reduced(inputs, "Sum")
        elif kinds[i] == 2:
            wanted = np.concatenate(inputs)
        else:
            wanted = inputs[int(i) % world.size]
        assert_equal(hvd.synchronize(handles[i]), wanted, f"tensor {i}")


def test_unnamed_calls_of_different_kinds_match_by_order(hvd, world):
    one = hvd.allreduce_async(np.full(3, world.rank, np.float32), op=hvd.Sum)
    two = hvd.allgather_async(np.full((1, 2), world.rank, np.float32))
    three = hvd.allreduce_async(np.full(4, 1, np.int32), op=hvd.Sum)
    assert_equal(hvd.synchronize(three), np.full(4, world.size, np.int32))
    assert_equal(
        hvd.synchronize(two), np.repeat(np.arange(world.size, dtype=np.float32), 2).reshape(-1, 2)
    )
    assert_equal(hvd.synchronize(one), np.full(3, sum(world.ranks), np.float32))


def test_several_threads_submit_at_once(hvd, world):
    wrong = []

    def work(index):
        try:
            for step in range(20):
                value = np.full(50 + index, index + step + world.rank, np.float64)
                result = hvd.allreduce(value, name=f"thread.{index}", op=hvd.Sum)
                wanted = world.size * (index + step) + sum(world.ranks)
                np.testing.assert_array_equal(result, wanted)
        except BaseException as error:  # reported by the main thread
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_handles_that_nobody_waits_for(hvd, world):
    for step in range(50):
        hvd.allreduce_async(np.full(100 + step, 1.0), name=f"dropped.{step}", op=hvd.Sum)
    hvd.barrier()
    result = hvd.allreduce(np.ones(3), name="after", op=hvd.Sum)
    assert_equal(result, np.full(3, float(world.size)))


@pytest.mark.np(2, 3, 4)
def test_barrier_holds_until_the_last(hvd, world, comm):
    passed = threading.Event()

    def go():
        hvd.barrier()
        passed.set()

    last = world.size - 1
    if world.rank != last:
        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        comm.barrier()
        assert not passed.is_set()
        comm.barrier()
        thread.join()
    else:
        comm.barrier()
        comm.barrier()
        go()
    assert passed.is_set()


def test_read_only_input(hvd, world):
    array = np.ones(4)
    array.flags.writeable = False
    assert_equal(hvd.allreduce(array, op=hvd.Sum), np.full(4, float(world.size)))
    assert_equal(hvd.broadcast(array, 0), np.ones(4))
    for form in ("allreduce_", "allreduce_async_"):
        with pytest.raises(ValueError):
            getattr(hvd, form)(array)
    assert_equal(hvd.allreduce(array), np.ones(4))
